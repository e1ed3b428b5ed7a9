"""Ctrl-C and SIGTERM between two steps instead of in the middle of one."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

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
        self._before: dict[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Start to record signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}

    def leave(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_made:
            raise KeyboardInterrupt
        self.is_made = True
        if sys.stderr is not None and sys.stderr.isatty():
            print("\nstopping after this step (Ctrl-C again: at once)", file=sys.stderr)
