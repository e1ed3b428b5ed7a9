"""One limit for the memory of a single layer or call, checked before anything is allocated; and deadlines.

The limit is half of the memory that this process may use: that of the machine, or of its control group where
that is less. ``KERNEL_ATTENTION_MEMORY_LIMIT``, in GiB, replaces it.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from pathlib import Path

from kernel_attention.errors import InputError

VARIABLE = "KERNEL_ATTENTION_MEMORY_LIMIT"

_GIB = 2**30
_SHARE = 0.5  # the other half is for everything else
_TRAINING = 4 * 4  # bytes of a float32 parameter, its gradient, and the two averages of Adam


def require_memory(what: str, size: int, advice: str) -> None:
    """Refuse ``size`` bytes beyond the limit; sizes are Python integers, which do not overflow.

    ``what`` is the caller with the option ("PrimalAttention: rank=10000000"), ``advice`` the change that
    helps ("lower rank").

    Raises:
        InputError: with both, and how to raise the limit.
    """
    limit = memory_limit()
    if limit is not None and size > limit:
        raise InputError(
            f"{what} would take about {_gib(size)}, more than the limit of {_gib(int(limit))}; {advice}, "
            f"or set the environment variable {VARIABLE} to more GiB"
        )


def require_parameters(what: str, count: int, advice: str) -> None:
    """``require_memory`` for ``count`` parameters in training: with gradients and Adam's averages."""
    require_memory(f"{what}: training {_number(count)} parameters", count * _TRAINING, advice)


def memory_limit() -> float | None:
    """The limit in bytes; None where the system does not report its memory.

    Raises:
        InputError: where the environment variable holds no positive number.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        available = _usable_memory()
        return None if available is None else _SHARE * available
    try:
        limit = float(given)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise InputError(f"{VARIABLE}={given!r} must be a positive number of GiB")
    return limit * _GIB


@functools.cache
def _usable_memory() -> int | None:
    """The bytes of the machine, or of this process's control group where those are fewer."""
    sizes = [size for size in (_machine_memory(), *_group_limits()) if size is not None]
    return min(sizes, default=None)


def _machine_memory() -> int | None:
    if sys.platform == "win32":
        return _windows_memory()
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _windows_memory() -> int | None:
    import ctypes

    names = ("total", "free", "total_page", "free_page", "total_virtual", "free_virtual", "extended")

    class Status(ctypes.Structure):  # MEMORYSTATUSEX
        _fields_ = [
            *((name, ctypes.c_ulong) for name in ("length", "load")),
            *((name, ctypes.c_ulonglong) for name in names),
        ]

    status = Status(length=ctypes.sizeof(Status))
    windll = getattr(ctypes, "windll")  # noqa: B009  # exists on Windows alone
    return status.total if windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def _group_limits(
    listing: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Limits of the process's control groups: "0::/path" in version 2, "4:memory:/path" in version 1."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        # The limits of the groups around a group bind it too. In a container the root can be the group.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):  # "max", or no such file
                continue
    return limits


def _gib(size: int) -> str:
    """A size in GiB; a power of two where it is astronomical."""
    return f"{size / _GIB:,.2f} GiB" if size < _GIB**2 else f"2^{size.bit_length() - 31} GiB"


def _number(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"2^{count.bit_length() - 1}"


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
