"""The largest memory that this process has held.

Linux tells it in ``/proc/self/status`` and can set it back. Other systems with ``getrusage`` tell it since
the start of the process. Windows has neither, so there it is None.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_resident() -> int | None:
    """Bytes of the largest resident set so far, or since ``reset_peak_resident``; None if unknown."""
    largest = _line("VmHWM")  # getrusage would count a parent's too
    if largest is not None:
        return largest
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def reset_peak_resident() -> int | None:
    """Count the peak from here on: the bytes resident now; None where the system cannot."""
    resident = _line("VmRSS")
    if resident is None or _line("VmHWM") is None or not os.access(_CLEAR, os.W_OK):
        return None
    _CLEAR.write_text("5", encoding="ascii")
    return resident


def _line(name: str) -> int | None:
    """A line of ``/proc/self/status`` in bytes; None where there is no such line."""
    if not _STATUS.is_file():
        return None
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    found = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(found[0].split()[1]) if found else None
