"""The laboratory of kernel-attention: data sets, recipes, runs, reports and the command line."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def lazy_names(package: str, **modules: Sequence[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package with these names in its modules.

    Type checkers read the imports under ``TYPE_CHECKING``.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
