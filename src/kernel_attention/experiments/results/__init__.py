"""Records of trained models, and their comparison row by row."""

from kernel_attention.experiments.results.column_comparison import (
    ColumnComparison,
    columns_needed,
    compare_over_columns,
)
from kernel_attention.experiments.results.comparison import (
    Comparison,
    Measurement,
    Spread,
    compare_rows,
    spread,
)
from kernel_attention.experiments.results.records import (
    ResultRecord,
    make_records,
    read_record,
    read_records,
    require_same_config,
    write_records,
)
from kernel_attention.experiments.results.robustness import (
    attack_curves,
    corruptions_of,
    relative_corruption_errors,
    robustness_columns,
    variant_columns,
)

__all__ = [
    "ColumnComparison",
    "Comparison",
    "Measurement",
    "ResultRecord",
    "Spread",
    "attack_curves",
    "columns_needed",
    "compare_over_columns",
    "compare_rows",
    "corruptions_of",
    "make_records",
    "read_record",
    "read_records",
    "relative_corruption_errors",
    "require_same_config",
    "robustness_columns",
    "spread",
    "variant_columns",
    "write_records",
]
