"""Tables of uncertainty, and the picture of attentions far from their training inputs."""

from kernel_attention_lab.evidence.uncertainty.rows import (
    training_costs,
    uncertainty_columns,
    uncertainty_curves,
    uncertainty_differences,
    uncertainty_rows,
)

__all__ = [
    "training_costs",
    "uncertainty_columns",
    "uncertainty_curves",
    "uncertainty_differences",
    "uncertainty_rows",
]
