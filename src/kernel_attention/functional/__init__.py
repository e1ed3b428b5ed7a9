"""The mechanisms as pure functions on (B, h, N, p) tensors."""

from kernel_attention.functional.primal import (
    PrimalScores,
    PrimalState,
    concat_scores,
    ksvd_objective,
    primal_attention,
    primal_kernel,
    primal_scores,
    primal_step,
)
from kernel_attention.functional.softmax import cosine_attention, softmax_attention

__all__ = [
    "PrimalScores",
    "PrimalState",
    "concat_scores",
    "cosine_attention",
    "ksvd_objective",
    "primal_attention",
    "primal_kernel",
    "primal_scores",
    "primal_step",
    "softmax_attention",
]
