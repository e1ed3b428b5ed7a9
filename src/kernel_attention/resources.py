"""What a machine can hold, and the refusal of what it cannot. Every room may use it."""

from __future__ import annotations

import os
from pathlib import Path

from kernel_attention.errors import InputError

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int | None:
    """Bytes of memory that this process may have in all; None where the system does not say.

    A container's limit counts where it is smaller than the machine.
    """
    found = [_total()]
    for name in _GROUP_LIMITS:
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    known = [size for size in found if size]
    return min(known) if known else None


def require_memory(size: int, what: str, advice: str) -> None:
    """Refuse what this machine cannot hold, before it is asked for.

    Args:
        size: bytes that are needed.
        what: who needs them, the subject of the message.
        advice: what to change.

    Raises:
        InputError: where the machine has less.
    """
    limit = machine_memory()
    if limit is not None and size > limit:
        raise InputError(f"{what} needs {_gib(size)} of memory, this machine has {_gib(limit)}: {advice}")


def _total() -> int | None:
    if os.name == "nt":
        import ctypes

        kilobytes = ctypes.c_ulonglong()
        found = ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(  # type: ignore[attr-defined, unused-ignore]
            ctypes.byref(kilobytes)
        )
        return kilobytes.value * 1024 if found else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
