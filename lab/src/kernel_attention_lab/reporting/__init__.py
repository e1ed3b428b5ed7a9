"""Reports and tables of finished (and interrupted) runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names
from kernel_attention_lab.reporting.report import write_report
from kernel_attention_lab.reporting.tables import (
    attack_table,
    diagnostics_tables,
    evaluation_table,
    shift_lines,
    summary_table,
)

if TYPE_CHECKING:
    from kernel_attention_lab.reporting.diagnostic_plots import plot_diagnostics, plot_over_training

__all__ = [
    "attack_table",
    "diagnostics_tables",
    "evaluation_table",
    "plot_diagnostics",
    "plot_over_training",
    "shift_lines",
    "summary_table",
    "write_report",
]

# matplotlib takes half a second to import, and some commands draw nothing.
__getattr__ = lazy_names(
    __name__,
    diagnostic_plots=("plot_diagnostics", "plot_over_training"),
)
