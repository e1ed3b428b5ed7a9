"""Writes that leave either the whole new file or the old one; and the folder of what can be made again."""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kernel_attention.errors import InputError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call ``write`` on a temporary file next to ``path``, flush it to disk, and rename it to ``path``.

    The temporary file is this call's alone: processes of several machines or containers, which may have one
    number, and threads may write ``path`` at the same time.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text in UTF-8 in the same way; what is no text in it, as of the names of files, is escaped."""
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def is_unfinished(path: Path) -> bool:
    """True where this is the temporary file of a killed write."""
    return re.fullmatch(r"\..+\.[0-9a-f]+\.tmp", path.name) is not None


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
