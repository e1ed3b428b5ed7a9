"""The notes of ``kernel_attention.errors`` as lines ``note: ...``, as the command line writes them."""

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Write each note to standard error as a line ``note: ...``."""
    logger, handler = logging.getLogger("kernel_attention"), _Lines(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)
