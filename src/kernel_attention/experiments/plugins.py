"""Modules that register mechanisms of their own before names are resolved."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable

from kernel_attention.errors import InputError

_loaded: list[str] = []


def load_plugins(names: Iterable[str]) -> None:
    """Import modules by name, as ``import name`` does. The working folder is searched last.

    A module registers its mechanisms when it is imported. A module that is already imported is not imported
    again.

    Raises:
        InputError: for a module that does not exist, or whose import fails.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file here cannot replace an installed package
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"plugin {name!r} cannot be imported ({why}); accepted: the name of a module on the Python "
                "path or in the working folder, as in `import name`"
            ) from None
        if name not in _loaded:
            _loaded.append(name)


def loaded_plugins() -> list[str]:
    """The names that ``load_plugins`` imported, in that order, for processes that need them too."""
    return list(_loaded)


def require_plugins(names: Iterable[str]) -> None:
    """InputError for the first module that is not imported.

    This function imports nothing: the names may come from a run folder, and opening a run executes nothing
    from it.
    """
    for name in names:
        if name not in sys.modules:
            raise InputError(
                f"this run needs the plugin {name!r}; give --plugin {name} (in Python: import {name})"
            )
