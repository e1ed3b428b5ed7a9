"""What a long command says while it works: a line that changes on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(seconds: float = 10.0) -> Iterator[Callable[[str], None]]:
    """A function that says on standard error what goes on.

    Args:
        seconds: between two lines of a log; what is said in between is left out.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    last = -math.inf

    def told(line: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)

    yield told
