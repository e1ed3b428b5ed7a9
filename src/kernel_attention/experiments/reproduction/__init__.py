"""Tables of the papers: run, and compared with what was reported."""

from kernel_attention.experiments.reproduction.measured import measurements
from kernel_attention.experiments.reproduction.run import Places, State, estimates, find_state, run_cell
from kernel_attention.experiments.reproduction.suite import Cell, Suite, list_suites, read_suite

__all__ = [
    "Cell",
    "Places",
    "State",
    "Suite",
    "estimates",
    "find_state",
    "list_suites",
    "measurements",
    "read_suite",
    "run_cell",
]
