"""One process at a time writes into a run folder, or makes a cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from kernel_attention.errors import InputError, note

LOCK_NAME = ".lock"

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # answers of a file system that has none

_log = logging.getLogger(__name__)


class HeldByAnother(InputError):
    """Another process works in the folder."""


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK_NAME, *, wait: bool = False) -> Iterator[None]:
    """Hold the folder for this process; the operating system releases it however the process ends.

    Args:
        folder: which exists.
        name: of the file in it; a folder can have several locks, each for a part of what it holds.
        wait: until another process that holds it has released it.

    Raises:
        HeldByAnother: where another process holds it; the message has its number and machine.
        OSError: where the folder cannot be written.
    """
    path = folder / name
    lock = FileLock(path, on_acquired=_write_holder)
    try:
        lock.acquire(timeout=-1 if wait else 0, poll_interval=0.2)
    except Timeout:
        words = f"run {folder}: {_holder(path)} is writing into it; wait for it, or end it"
        raise HeldByAnother(words) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _log.warning("%s cannot be locked (%s): start no second process in it", path, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # while it is ours; after the release it may be another's
            path.unlink()
        lock.release()


@contextlib.contextmanager
def locked_in_turn(path: Path) -> Iterator[None]:
    """Hold the place of a file or folder that is to be made; wait for a process that holds it.

    Raises:
        OSError: where the folder around it cannot be written.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(path.parent, f".{path.name}.lock"))
        except HeldByAnother:
            note(f"another process makes {path}; waiting for it")
            held.enter_context(locked(path.parent, f".{path.name}.lock", wait=True))
        yield


def _write_holder(file: int) -> None:
    os.ftruncate(file, 0)
    os.write(file, f"\0process {os.getpid()} on {platform.node()}".encode())  # Windows locks the first byte


def _holder(path: Path) -> str:
    """The words that the holder wrote of itself just after it took the lock."""
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        file.seek(1)
        return file.read(200).decode(errors="replace") or "another process"
    return "another process"
