"""The progress of a long command: a line that changes on a terminal, lines with their time in a log."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(seconds: float = 10.0) -> Iterator[Callable[[str], None]]:
    """A function that reports on standard error what the command is doing.

    Args:
        seconds: the least time between two lines of a log; reports in between are dropped.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    last = -math.inf

    def on_progress(line: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)

    yield on_progress
