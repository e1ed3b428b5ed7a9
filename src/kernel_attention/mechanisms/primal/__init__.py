"""Primal-Attention: asymmetric kernel SVD of self-attention, solved in the primal.

Its objective may be the nested objective of ``mechanisms.nested_objective``.
"""

from kernel_attention.mechanisms.primal.cpu import primal_layer
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
from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention.mechanisms.primal.one_pass import PrimalWeights

__all__ = [
    "PrimalAttention",
    "PrimalScores",
    "PrimalState",
    "PrimalWeights",
    "concat_scores",
    "ksvd_objective",
    "objective_from_energy",
    "primal_attention",
    "primal_kernel",
    "primal_layer",
    "primal_scores",
    "primal_step",
    "scores_energy",
]
