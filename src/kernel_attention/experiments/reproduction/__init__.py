"""Tables of the papers: run, and compared with what was reported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_attention.experiments.reproduction.suite import Cell, Start, Suite, list_suites, read_suite

if TYPE_CHECKING:
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

# The trainer takes seconds to import, and a list of the suites needs none.
_HOMES = {
    "CellState": "run",
    "Findings": "findings",
    "Outcome": "workers",
    "Places": "run",
    "estimates": "run",
    "find": "findings",
    "find_state": "run",
    "measurements": "measured",
    "run_cell": "run",
    "run_cells": "workers",
    "untrained_starts": "run",
    "write_page": "page",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(
            importlib.import_module(f"kernel_attention.experiments.reproduction.{_HOMES[name]}"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
