"""One process at a time writes into a run folder, or makes a cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kernel_attention.errors import InputError
from kernel_attention.notes import note

LOCK_NAME = ".lock"

_FAR = 1 << 30  # on Windows other readers cannot read locked bytes, so the locked byte is after the text
_PATIENCE = 2.0  # seconds in which a process that has taken a lock has written its name into it
_PAUSE = 0.2  # seconds between two tries to take a lock
_HELD = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_log = logging.getLogger(__name__)


class HeldByAnother(InputError):
    """Another process works in the folder."""


@contextlib.contextmanager
def locked(folder: Path, name: str = LOCK_NAME) -> Iterator[None]:
    """Hold the folder for this process.

    The operating system holds the lock and releases it when the process ends for any reason.

    Args:
        folder: which exists.
        name: of the file in it; a folder can have several locks, each for a part of what it holds.

    Raises:
        HeldByAnother: where another process holds it; the message has its number and machine.
        OSError: where the folder cannot be written.
    """
    path = folder / name
    file = _take(path)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        _release(file, path)


@contextlib.contextmanager
def locked_in_turn(path: Path) -> Iterator[None]:
    """Hold the place of a file or folder that is to be made; wait for a process that holds it.

    Raises:
        OSError: where the folder around it cannot be written.
    """
    with contextlib.ExitStack() as held:
        is_waiting = False
        while True:
            try:
                held.enter_context(locked(path.parent, f".{path.name}.lock"))
                break
            except HeldByAnother:
                if not is_waiting:
                    note(f"another process makes {path}; waiting for it")
                is_waiting = True
                time.sleep(_PAUSE)
        yield


def _take(path: Path) -> IO[bytes]:
    while True:
        file = path.open("a+b", buffering=0)  # a full disk fails here, and not when the file is closed
        try:
            is_ours = _lock(file)
            if not is_ours:
                raise HeldByAnother(
                    f"run {path.parent}: {_holder(file)} is writing into it; wait for it, or end it"
                )
            # The previous holder may have removed the file after we opened it and before we locked it.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _holder(file: IO[bytes]) -> str:
    """The words that the holder wrote of itself, which it does just after it took the lock."""
    until = time.monotonic() + _PATIENCE
    while True:
        file.seek(0)
        if text := file.read(200):
            return text.decode(errors="replace")
        if time.monotonic() > until:
            return "another process"
        time.sleep(0.01)


def _release(file: IO[bytes], path: Path) -> None:
    if os.name == "nt":  # an open file cannot be removed there
        file.close()
        with contextlib.suppress(OSError):
            path.unlink()
        return
    with contextlib.suppress(OSError):
        path.unlink()
    file.close()


def _lock(file: IO[bytes]) -> bool:
    """Return whether this process has the lock now; True also where the file system has no locks."""
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(_FAR)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        _log.warning("%s cannot be locked (%s): start no second process in it", file.name, error.strerror)
    return True
