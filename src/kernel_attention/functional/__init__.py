"""The mechanisms as pure functions on (B, h, N, p) tensors."""

from kernel_attention.functional.decoding_state import KeyValueCache, Position, move, reorder, state_bytes
from kernel_attention.functional.dual_multilinear import (
    attention_tensor,
    cubemax_kernel,
    dual_multilinear_scores,
)
from kernel_attention.functional.kernel_pca import (
    PrincipalPursuit,
    principal_attention_pursuit,
    pursuit_threshold,
    rpc_attention,
    scaled_attention,
)
from kernel_attention.functional.kmlsvd import core_penalty, kmlsvd_objective, multilinear_kernel
from kernel_attention.functional.linear import linear_attention
from kernel_attention.functional.multilinear import (
    Modes,
    join_modes,
    multilinear_attention,
    multilinear_modes,
    multilinear_scores,
)
from kernel_attention.functional.multilinear_factors import mlsvd_core, multilinear_factors
from kernel_attention.functional.multilinear_layer import multilinear_layer
from kernel_attention.functional.primal import (
    PrimalScores,
    PrimalState,
    concat_scores,
    ksvd_objective,
    objective_from_energy,
    primal_attention,
    primal_kernel,
    primal_scores,
    primal_step,
    scores_energy,
)
from kernel_attention.functional.primal_layer import PrimalWeights, primal_layer
from kernel_attention.functional.softmax import cosine_attention, softmax_attention
from kernel_attention.functional.sparse import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.functional.support_vector import (
    batch_norm_attention,
    recentre,
    scaled_heads_attention,
    support_vector_attention,
)
from kernel_attention.functional.tensor import tensor_scores
from kernel_attention.kernels.thresholds import shrink

__all__ = [
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
    "objective_from_energy",
    "primal_attention",
    "primal_kernel",
    "primal_layer",
    "primal_scores",
    "primal_step",
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
