"""Tables of the papers: run, and compared with what was reported."""

from kernel_attention.experiments.reproduction.findings import Findings, find
from kernel_attention.experiments.reproduction.measured import measurements
from kernel_attention.experiments.reproduction.page import write_page
from kernel_attention.experiments.reproduction.run import (
    CellState,
    Places,
    estimates,
    find_state,
    run_cell,
    untrained_starts,
)
from kernel_attention.experiments.reproduction.suite import Cell, Start, Suite, list_suites, read_suite
from kernel_attention.experiments.reproduction.workers import Outcome, run_cells

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
