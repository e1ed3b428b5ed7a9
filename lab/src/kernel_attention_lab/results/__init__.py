"""Records of trained models, and their comparison row by row."""

from kernel_attention_lab.results.column_comparison import (
    ColumnComparison,
    columns_needed,
    compare_over_columns,
)
from kernel_attention_lab.results.comparison import (
    Comparison,
    CorruptionErrors,
    Detection,
    Measurement,
    PairedFigure,
    Spread,
    compare_rows,
    evaluation_figure,
    spread,
)
from kernel_attention_lab.results.records import (
    ResultRecord,
    make_records,
    read_record,
    read_records,
    require_same_config,
    write_records,
)
from kernel_attention_lab.results.robustness import (
    attack_curves,
    corruption_figures,
    corruptions_of,
    relative_corruption_errors,
    robustness_columns,
    variant_columns,
)

__all__ = [
    "ColumnComparison",
    "Comparison",
    "CorruptionErrors",
    "Detection",
    "Measurement",
    "PairedFigure",
    "ResultRecord",
    "Spread",
    "attack_curves",
    "columns_needed",
    "compare_over_columns",
    "compare_rows",
    "corruption_figures",
    "corruptions_of",
    "evaluation_figure",
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
