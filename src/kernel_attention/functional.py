"""The mechanisms as pure functions on (B, h, N, p) tensors."""

from kernel_attention.core.decoding import KeyValueCache, Position, move, reorder, state_bytes
from kernel_attention.mechanisms.gaussian_process import (
    Distribution,
    kernel_gp_attention,
    kernel_gp_divergence,
    kernel_gp_posterior,
    sgpa_posterior,
)
from kernel_attention.mechanisms.kernel_pca import (
    PrincipalPursuit,
    principal_attention_pursuit,
    pursuit_threshold,
    rpc_attention,
    scaled_attention,
)
from kernel_attention.mechanisms.linear import cosine_attention, linear_attention
from kernel_attention.mechanisms.multilinear import (
    Modes,
    core_penalty,
    dual_multilinear_scores,
    join_modes,
    kmlsvd_objective,
    multilinear_attention,
    multilinear_layer,
    multilinear_modes,
    multilinear_scores,
    tensor_scores,
)
from kernel_attention.mechanisms.nested_objective import KernelGrams, kernel_grams, nested_objective
from kernel_attention.mechanisms.primal import (
    PrimalScores,
    PrimalState,
    PrimalWeights,
    concat_scores,
    ksvd_objective,
    objective_from_energy,
    primal_attention,
    primal_kernel,
    primal_layer,
    primal_scores,
    primal_step,
    scores_energy,
)
from kernel_attention.mechanisms.primal_values import primal_value_attention
from kernel_attention.mechanisms.regression import delta_attention, ridge_attention
from kernel_attention.mechanisms.softmax import softmax_attention
from kernel_attention.mechanisms.sparse import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.mechanisms.support_vector import (
    batch_norm_attention,
    recentre,
    scaled_heads_attention,
    support_vector_attention,
)
from kernel_attention.tensors.multilinear.factors import mlsvd_core, multilinear_factors
from kernel_attention.tensors.multilinear.kernel_tensors import (
    attention_tensor,
    cubemax_kernel,
    multilinear_kernel,
)
from kernel_attention.tensors.statistics import shrink

__all__ = [
    "Distribution",
    "KernelGrams",
    "KeyValueCache",
    "Modes",
    "Position",
    "PrimalScores",
    "PrimalState",
    "PrimalWeights",
    "PrincipalPursuit",
    "SparsePattern",
    "attention_tensor",
    "batch_norm_attention",
    "concat_scores",
    "core_penalty",
    "cosine_attention",
    "cubemax_kernel",
    "delta_attention",
    "dual_multilinear_scores",
    "join_modes",
    "kernel_gp_attention",
    "kernel_gp_divergence",
    "kernel_gp_posterior",
    "kernel_grams",
    "kmlsvd_objective",
    "ksvd_objective",
    "linear_attention",
    "mlsvd_core",
    "move",
    "multilinear_attention",
    "multilinear_factors",
    "multilinear_kernel",
    "multilinear_layer",
    "multilinear_modes",
    "multilinear_scores",
    "nested_objective",
    "objective_from_energy",
    "primal_attention",
    "primal_kernel",
    "primal_layer",
    "primal_scores",
    "primal_step",
    "primal_value_attention",
    "principal_attention_pursuit",
    "pursuit_threshold",
    "recentre",
    "reorder",
    "ridge_attention",
    "rpc_attention",
    "scaled_attention",
    "scaled_heads_attention",
    "scores_energy",
    "sgpa_posterior",
    "shrink",
    "softmax_attention",
    "sparse_attention",
    "sparse_mask",
    "state_bytes",
    "support_vector_attention",
    "tensor_scores",
]
