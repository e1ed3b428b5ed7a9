"""What is worth knowing and is no error: notes, said through the logger ``kernel_attention``.

Python shows them on standard error unless logging is configured otherwise; the command line writes each as a
line ``note: ...``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator

_LOGGER = logging.getLogger("kernel_attention")


def note(sentence: str) -> None:
    """Say a sentence."""
    _LOGGER.warning(sentence)


@functools.cache
def note_once(sentence: str) -> None:
    """Say a sentence the first time that this process comes to it."""
    note(sentence)


@contextlib.contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Write notes to standard error, a line ``note: ...`` each."""
    handler = _Lines(logging.WARNING)
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)
