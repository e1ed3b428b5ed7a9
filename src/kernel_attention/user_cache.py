"""The folder of what can be made or fetched again, and the user's home folder."""

import os
from pathlib import Path

from kernel_attention.errors import InputError


def cache_folder() -> Path:
    """``kernel-attention`` in the user's cache folder: downloads without a data root, compiled kernels.

    Raises:
        InputError: where neither ``XDG_CACHE_HOME`` nor a home folder is known.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative path is to be ignored: https://specifications.freedesktop.org/basedir-spec
    return (base if base.is_absolute() else expand_home("~") / ".cache") / "kernel-attention"


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path with its ``~`` or ``~user`` replaced; InputError where that home folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a user without an entry, as in many containers
        raise InputError(
            f"{os.fspath(path)}: the home folder is not known; set the environment variable HOME "
            "(for caches alone: XDG_CACHE_HOME)"
        ) from None
