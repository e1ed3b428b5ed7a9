"""The rows that the benchmarks of very long sequences print."""

from __future__ import annotations

from typing import Any


def print_row(row: dict[str, Any], process: str, processes: str, after: str = "") -> None:
    """Seconds, memory and bytes of a row, with the names that it gives its processes, then ``after``."""
    print(
        f"N {row['length']:,}  {processes} {row[processes]}  {row['seconds']:.2f} s a step  "
        f"{row['peak_gigabytes']:.2f} GB a process ({row['gigabytes_before_the_step']:.2f} before it)  "
        f"{row['bytes_to_collectives']:,} bytes a {process}{after}",
        flush=True,
    )


def require_equal(called: str, found: float, first: float) -> None:
    """SystemExit where a figure differs from the first row's by more than rounding."""
    if abs(found / first - 1) > 1e-4:
        raise SystemExit(f"{called} differ: {found} and {first}")
