"""The time that a fit may take: what is left of it, and how much work fits into that."""

from __future__ import annotations

import math
import time


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()


class Deadline:
    """A number of seconds from now on.

    Args:
        seconds: None: without end.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else now() + seconds

    @property
    def is_set(self) -> bool:
        """True where the time has an end."""
        return self._end < math.inf

    def left(self) -> float:
        """Seconds that are left, at least 0."""
        return max(self._end - now(), 0.0)

    def part(self, share: float, reserve: float = 0.0) -> Deadline:
        """The end of this share of the seconds that are left without a reserve."""
        return Deadline(max(self.left() - reserve, 0.0) * share if self.is_set else None)

    def fits(self, seconds: float) -> bool:
        """True where work of so many seconds ends in time."""
        return seconds <= self.left()
