"""Notes: remarks that are not errors, written to the logger ``kernel_attention``.

Python shows them on standard error unless logging is configured otherwise. The command line writes each as a
line ``note: ...``.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator

_LOGGER = logging.getLogger("kernel_attention")


def note(sentence: str) -> None:
    """Write a note of one sentence."""
    _LOGGER.warning(sentence)


@functools.cache
def note_once(sentence: str) -> None:
    """Write a note the first time in this process."""
    note(sentence)


@contextlib.contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Write each note to standard error as a line ``note: ...``."""
    handler = _Lines(logging.WARNING)
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)
