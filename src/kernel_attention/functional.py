"""The mechanisms as pure functions on (B, h, N, p) tensors."""

from kernel_attention.core.decoding import KeyValueCache, Position, move, reorder, state_bytes
from kernel_attention.mechanisms.kernel_pca.functional import (
    PrincipalPursuit,
    principal_attention_pursuit,
    pursuit_threshold,
    rpc_attention,
    scaled_attention,
)
from kernel_attention.mechanisms.linear.functional import cosine_attention, linear_attention
from kernel_attention.mechanisms.multilinear.dual_functional import dual_multilinear_scores
from kernel_attention.mechanisms.multilinear.functional import (
    Modes,
    join_modes,
    multilinear_attention,
    multilinear_modes,
    multilinear_scores,
)
from kernel_attention.mechanisms.multilinear.fused import multilinear_layer
from kernel_attention.mechanisms.multilinear.objective import core_penalty, kmlsvd_objective
from kernel_attention.mechanisms.multilinear.tensor_functional import tensor_scores
from kernel_attention.mechanisms.primal import primal_value_attention
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
from kernel_attention.mechanisms.primal.nested import KernelGrams, kernel_grams, nested_objective
from kernel_attention.mechanisms.softmax.functional import softmax_attention
from kernel_attention.mechanisms.sparse.functional import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.mechanisms.support_vector.functional import (
    batch_norm_attention,
    recentre,
    scaled_heads_attention,
    support_vector_attention,
)
from kernel_attention.tensors.kernel_tensors import attention_tensor, cubemax_kernel, multilinear_kernel
from kernel_attention.tensors.multilinear import mlsvd_core, multilinear_factors
from kernel_attention.tensors.shrinkage import shrink

__all__ = [
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
    "dual_multilinear_scores",
    "join_modes",
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
    "rpc_attention",
    "scaled_attention",
    "scaled_heads_attention",
    "scores_energy",
    "shrink",
    "softmax_attention",
    "sparse_attention",
    "sparse_mask",
    "state_bytes",
    "support_vector_attention",
    "tensor_scores",
]
