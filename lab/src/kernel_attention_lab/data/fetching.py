"""Data that are made or downloaded where they are first needed, and a block in which they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from kernel_attention.errors import InputError, writing
from kernel_attention_lab.lock import locked_in_turn

Content = TypeVar("Content")

_may_fetch = ContextVar("may_fetch", default=True)


class NotGeneratedError(Exception):
    """Data would be generated here, inside ``without_fetching``."""


class NotDownloadedError(Exception):
    """Data would be downloaded here, inside ``without_fetching``."""


@contextmanager
def without_fetching() -> Iterator[None]:
    """Inside the block, data that would be generated or downloaded raise an error: both can take long."""
    token = _may_fetch.set(False)
    try:
        yield
    finally:
        _may_fetch.reset(token)


def require_generation(what: object) -> None:
    """Call this before data are generated.

    Raises:
        NotGeneratedError: inside ``without_fetching``.
    """
    if not _may_fetch.get():
        raise NotGeneratedError(str(what))


def require_download(name: str) -> None:
    """Call this before a data set is downloaded.

    Raises:
        NotDownloadedError: inside ``without_fetching``.
    """
    if not _may_fetch.get():
        raise NotDownloadedError(f"dataset {name!r} is not on this machine; its first training downloads it")


def made_once(path: Path, read: Callable[[], Content | None], make: Callable[[], None]) -> Content:
    """The result of ``read``; where that is None, one process makes it and the others wait.

    Args:
        path: of the file or folder.
        read: its content; None where it is missing or damaged.
        make: writes it.

    Raises:
        InputError: where it cannot be written.
    """
    content = read()
    if content is None:
        with writing(f"cache {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked_in_turn(path):
                content = read()  # another process may have made it meanwhile
                if content is None:
                    make()
                    content = read()
    if content is None:
        raise InputError(f"cache {path}: is damaged as soon as it is written")
    return content
