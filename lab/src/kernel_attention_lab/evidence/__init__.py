"""Records of trained models, suites that make them, their comparison, and what is drawn from them.

Tables and figures of the documentation are declared in ``docs/tables/*.yaml``. ``read_suite`` and
``read_record`` are light; the trainer, which takes seconds to import, is behind the other names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names
from kernel_attention_lab.evidence.records import (
    ResultRecord,
    make_records,
    read_record,
    read_records,
    write_records,
)
from kernel_attention_lab.evidence.suite import Cell, Start, Suite, list_suites, read_suite

if TYPE_CHECKING:
    from kernel_attention_lab.evidence.comparison import (
        ColumnComparison,
        Comparison,
        Measurement,
        Spread,
        columns_needed,
        compare_over_columns,
        compare_rows,
        evaluation_figure,
        spread,
    )
    from kernel_attention_lab.evidence.findings import Findings, find
    from kernel_attention_lab.evidence.robustness import (
        attack_curves,
        corruption_figures,
        relative_corruption_errors,
        robustness_columns,
        variant_columns,
    )
    from kernel_attention_lab.evidence.run import (
        CellState,
        Places,
        estimates,
        find_state,
        run_cell,
        untrained_starts,
    )
    from kernel_attention_lab.evidence.suite_page import write_page
    from kernel_attention_lab.evidence.workers import Outcome, run_cells

__all__ = [
    "Cell",
    "CellState",
    "ColumnComparison",
    "Comparison",
    "Findings",
    "Measurement",
    "Outcome",
    "Places",
    "ResultRecord",
    "Spread",
    "Start",
    "Suite",
    "attack_curves",
    "columns_needed",
    "compare_over_columns",
    "compare_rows",
    "corruption_figures",
    "estimates",
    "evaluation_figure",
    "find",
    "find_state",
    "list_suites",
    "make_records",
    "read_record",
    "read_records",
    "read_suite",
    "relative_corruption_errors",
    "robustness_columns",
    "run_cell",
    "run_cells",
    "spread",
    "untrained_starts",
    "variant_columns",
    "write_page",
    "write_records",
]

__getattr__ = lazy_names(
    __name__,
    comparison=(
        "ColumnComparison",
        "Comparison",
        "Measurement",
        "Spread",
        "columns_needed",
        "compare_over_columns",
        "compare_rows",
        "evaluation_figure",
        "spread",
    ),
    findings=("Findings", "find"),
    robustness=(
        "attack_curves",
        "corruption_figures",
        "relative_corruption_errors",
        "robustness_columns",
        "variant_columns",
    ),
    run=("CellState", "Places", "estimates", "find_state", "run_cell", "untrained_starts"),
    suite_page=("write_page",),
    workers=("Outcome", "run_cells"),
)
