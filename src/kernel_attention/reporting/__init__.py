"""Reports and tables of finished (and interrupted) runs."""

from kernel_attention.reporting.report import write_report
from kernel_attention.reporting.tables import headline, summary_table

__all__ = ["headline", "summary_table", "write_report"]
