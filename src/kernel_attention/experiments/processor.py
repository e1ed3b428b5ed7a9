"""The name of the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name(described: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the processor, as the system describes it; its architecture where it does not say.

    Args:
        described: the file in which Linux describes the processors.
    """
    try:
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), "") or platform.processor() or platform.machine()
