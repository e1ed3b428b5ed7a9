"""Processes for programs that must not run in that of the tests, and pages without their pictures."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
from forked import Forks

# Fabric asks every installed distribution for callbacks, twice a training.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A process that has imported torch and nothing of ours."""
    server = Forks("torch")
    yield server
    server.close()


@pytest.fixture
def undrawn() -> Iterator[None]:
    """Pages without their pictures."""
    from runs.small_runs import undrawn_pages

    with undrawn_pages():
        yield


@pytest.fixture(scope="module")
def mixer() -> Iterator[ModuleType]:
    """The plugin ``token_mixer``; its mechanism is unknown again after the tests of a file."""
    from kernel_attention.core.registry import MECHANISMS

    module = importlib.import_module("kernel_attention_lab.token_mixer")
    yield module
    del MECHANISMS["token_mixer"], sys.modules[module.__name__]
