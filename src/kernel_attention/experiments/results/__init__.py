"""Records of trained models, and their comparison row by row."""

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
    write_records,
)
from kernel_attention.experiments.results.robustness import (
    attack_curves,
    corruptions_of,
    relative_corruption_errors,
    robustness_columns,
)

__all__ = [
    "Comparison",
    "Measurement",
    "ResultRecord",
    "Spread",
    "attack_curves",
    "compare_rows",
    "corruptions_of",
    "make_records",
    "read_record",
    "read_records",
    "relative_corruption_errors",
    "robustness_columns",
    "spread",
    "write_records",
]
