"""The libraries whose models are changed; a test that needs one skips where it is absent."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ModuleNotFoundError)
    return pytest.importorskip("timm", reason="timm is not installed")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def _declare_torchvision_operators() -> None:
    """torchvision's wheel on the registry is built for a CUDA torch. Beside a CPU torch its operators are
    missing and its import fails on describing them; their signatures are all it needs, as nothing here
    calls them.
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for operator in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", signature)
        importlib.import_module("torchvision")


# Where the Makefile puts timm and torchvision; an environment that has them itself needs no such folder.
if (_hosts := Path(sys.prefix) / "hosts").is_dir():
    sys.path.append(str(_hosts))
_declare_torchvision_operators()
