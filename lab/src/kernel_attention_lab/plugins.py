"""Modules that register mechanisms of their own before names are resolved."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kernel_attention.errors import InputError

_loaded: list[str] = []


def load_plugins(names: Iterable[str]) -> None:
    """Import modules by name, as ``import name`` does. The working folder is searched too, last.

    A module registers its mechanisms when it is imported. A module that is already imported is not imported
    again. Outside of these imports the working folder is not searched: it may be somebody's run folder, with
    a file named as a package that is not installed.

    Raises:
        InputError: for a module that does not exist, or whose import fails.
    """
    for name in names:
        try:
            with _working_folder_searched():
                importlib.import_module(name)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"plugin {name!r} cannot be imported ({why}); accepted: the name of a module on the Python "
                "path or in the working folder, as in `import name`"
            ) from None
        if name not in _loaded:
            _loaded.append(name)


@contextmanager
def _working_folder_searched() -> Iterator[None]:
    """Inside the block the working folder is on the path: last, so that it replaces no installed package."""
    try:
        folder = os.getcwd()
    except FileNotFoundError:  # it was removed
        folder = ""
    is_added = bool(folder) and folder not in sys.path
    if is_added:
        sys.path.append(folder)
    try:
        yield
    finally:
        if is_added and folder in sys.path:
            sys.path.remove(folder)


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
