"""Ctrl-C and SIGTERM between two steps instead of in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Records the first Ctrl-C or SIGTERM; a second signal raises KeyboardInterrupt at once.

    An interrupted step leaves weights, moments and random numbers that belong to no step, and no run could
    resume from them. Signals reach only the main thread; in another thread nothing is recorded.

    Attributes:
        is_made: whether a signal has come.
    """

    def __init__(self) -> None:
        self.is_made = False

    @contextlib.contextmanager
    def listening(self, wanted: bool = True) -> Iterator[None]:
        """Record signals within the block, where ``wanted``."""
        if not wanted or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
        if sys.stderr is not None and sys.stderr.isatty():
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr)
