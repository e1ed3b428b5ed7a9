"""Reports and tables of finished (and interrupted) runs, and of benchmarks."""

from typing import Any

from kernel_attention.experiments.reporting.attack_tables import attack_table, shift_lines
from kernel_attention.experiments.reporting.benchmark_tables import benchmark_tables
from kernel_attention.experiments.reporting.benchmarks import write_benchmark
from kernel_attention.experiments.reporting.report import write_report
from kernel_attention.experiments.reporting.tables import (
    diagnostics_tables,
    evaluation_table,
    summary_table,
)

__all__ = [
    "attack_table",
    "benchmark_tables",
    "diagnostics_tables",
    "evaluation_table",
    "plot_diagnostics",
    "plot_over_training",
    "shift_lines",
    "summary_table",
    "write_benchmark",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a name on first use: matplotlib takes half a second, and some commands draw nothing."""
    if name == "plot_diagnostics":
        from kernel_attention.experiments.reporting.diagnostic_plots import plot_diagnostics

        return plot_diagnostics
    if name == "plot_over_training":
        from kernel_attention.experiments.reporting.course_plots import plot_over_training

        return plot_over_training
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
