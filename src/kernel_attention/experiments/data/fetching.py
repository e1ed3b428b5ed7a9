"""Data that are generated or downloaded where they are first needed, and a block in which they are not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

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
