"""Tables of the papers: run, and compared with what was reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names
from kernel_attention_lab.reproduction.suite import Cell, Start, Suite, list_suites, read_suite

if TYPE_CHECKING:
    from kernel_attention_lab.reproduction.findings import Findings, find, measurements
    from kernel_attention_lab.reproduction.page import write_page
    from kernel_attention_lab.reproduction.run import (
        CellState,
        Places,
        estimates,
        find_state,
        run_cell,
        untrained_starts,
    )
    from kernel_attention_lab.reproduction.workers import Outcome, run_cells

__all__ = [
    "Cell",
    "CellState",
    "Findings",
    "Outcome",
    "Places",
    "Start",
    "Suite",
    "estimates",
    "find",
    "find_state",
    "list_suites",
    "measurements",
    "read_suite",
    "run_cell",
    "run_cells",
    "untrained_starts",
    "write_page",
]

# The trainer takes seconds to import, and a list of the suites needs none.
__getattr__ = lazy_names(
    __name__,
    findings=("Findings", "find", "measurements"),
    page=("write_page",),
    run=("CellState", "Places", "estimates", "find_state", "run_cell", "untrained_starts"),
    workers=("Outcome", "run_cells"),
)
