"""Primal-Attention: asymmetric kernel SVD of self-attention, solved in the primal.

Its form with values is linear attention with the scores for features, so it builds on ``mechanisms.linear``.
"""

from kernel_attention.mechanisms.primal.decoding import PrimalState, primal_step
from kernel_attention.mechanisms.primal.functional import (
    PrimalScores,
    concat_scores,
    ksvd_objective,
    objective_from_energy,
    primal_attention,
    primal_kernel,
    primal_scores,
    scores_energy,
)
from kernel_attention.mechanisms.primal.fused import PrimalWeights, primal_layer
from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention.mechanisms.primal.nested import KernelGrams, kernel_grams, nested_objective
from kernel_attention.mechanisms.primal.values import PrimalValueAttention, primal_value_attention

__all__ = [
    "KernelGrams",
    "PrimalAttention",
    "PrimalScores",
    "PrimalState",
    "PrimalValueAttention",
    "PrimalWeights",
    "concat_scores",
    "kernel_grams",
    "ksvd_objective",
    "nested_objective",
    "objective_from_energy",
    "primal_attention",
    "primal_kernel",
    "primal_layer",
    "primal_scores",
    "primal_step",
    "primal_value_attention",
    "scores_energy",
]
