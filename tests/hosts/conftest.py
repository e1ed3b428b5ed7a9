"""The libraries whose models are changed; a test that needs one skips where it is absent."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ModuleNotFoundError)
    return pytest.importorskip("timm", reason="timm is not installed")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="transformers is not installed")


# timm and torchvision: made importable as for the benchmarks.
runpy.run_path(str(Path(__file__).parent / "timm_beside_cpu_torch.py"))
