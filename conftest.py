"""What every test shares: fixed seeds, examples drawn the same everywhere, and Ctrl-C switched on."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

# `make test-library`: the library is installed alone. An editable laboratory must not be found either.
if os.environ.get("KERNEL_ATTENTION_ALONE"):
    sys.modules["kernel_attention_lab"] = None  # type: ignore[assignment]

settings.register_profile("reproducible", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("reproducible")

# A shell starts background jobs with SIGINT ignored, and children inherit that: the tests of Ctrl-C would
# then test nothing. A worker whose tests are not in the main thread cannot set it and has no need to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.default_int_handler)


# For a GPU that may come later, torch.manual_seed writes down who called it: 8 % of the contracts' time.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests keep decoded and generated data in a cache of their own, which their processes share."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / "cache")}):
        if engine := sys.modules.get("kernel_attention.mechanisms.primal.native"):
            engine.LIBRARY.look()  # what this machine's user has built, tests do without
        yield folder / "cache"


@pytest.fixture
def built_engines(shared_cache: Path) -> Iterator[None]:
    """The engines in C++ are built, in a cache that other tests and their processes do not see."""
    from kernel_attention.mechanisms.primal.native import LIBRARY
    from kernel_attention.native import find_compiler

    if not sys.platform.startswith("linux"):
        pytest.skip("the engines in C++ are for Linux")
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(shared_cache / "built")}):
        LIBRARY.build()
        yield
    LIBRARY.look()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests are made and none is garbage, nor are the modules: there is nothing to look for."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole pages, commands and Triton's interpreter come first.

    These tests take longest, and no process shall wait for the last.
    """
    here = Path(__file__).parent
    first = {here / "tests", here / "lab" / "tests"}
    items.sort(key=lambda item: item.path.parent not in first and item.path.name != "test_triton.py")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """Forgets what earlier tests compiled: a size that varied there would be a symbol here, which is slow."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def peak_memory() -> Callable[[], int]:
    """The most memory this process has held so far, in bytes; 0 where nothing tells it, as on Windows."""
    try:
        import resource
    except ModuleNotFoundError:
        return lambda: 0
    unit = 1 if sys.platform == "darwin" else 1024
    return lambda: unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture(autouse=True)
def _callbacks_of_packages_looked_up_once() -> None:
    """Lightning reads the entry points of every installed package for a trainer, a quarter of a small fit."""
    if fabric := sys.modules.get("lightning_fabric.fabric"):
        load = fabric._load_external_callbacks
        fabric._load_external_callbacks = load if hasattr(load, "cache_info") else functools.cache(load)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    """A test may set the number of threads; the next one has its own again."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _plugins_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in this process leaves the names of its plugins; later workers would look for them."""
    if plugins := sys.modules.get("kernel_attention_lab.plugins"):
        monkeypatch.setattr(plugins, "_loaded", list(plugins._loaded))


@pytest.fixture(autouse=True)
def _workers_without_hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers inherit sys.path, where tests of hosts put a torchvision that must stay unseen."""
    if {"reproduction", "sweeping", "test_readme.py", "test_sharding.py"} & set(request.path.parts):
        hosts = Path(sys.prefix) / "hosts"
        monkeypatch.setattr(sys, "path", [place for place in sys.path if Path(place) != hosts])


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the folder ``tools``, whose modules are forgotten after the test."""
    folder = Path(__file__).parent / "tools"
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)
