"""Writes that leave either the whole new file or the old one. This module imports no other of the library."""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO


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


def remove_unfinished(folder: Path) -> None:
    """Delete the temporary files of killed writes in a folder and its subfolders."""
    for path in folder.rglob(".*.tmp"):
        if is_unfinished(path):
            path.unlink(missing_ok=True)
