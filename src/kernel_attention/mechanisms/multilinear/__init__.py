"""Multilinear (KMLSVD) attention: in the primal, in the dual, and with learnt tensors."""

# isort: off
from kernel_attention.mechanisms.multilinear.layer import MultilinearAttention
from kernel_attention.mechanisms.multilinear.dual_layer import DualMultilinearAttention
from kernel_attention.mechanisms.multilinear.tensor_layer import TensorAttention, tensor_scores

# isort: on
from kernel_attention.mechanisms.multilinear.cpu import multilinear_layer
from kernel_attention.mechanisms.multilinear.dual_functional import dual_multilinear_scores
from kernel_attention.mechanisms.multilinear.functional import (
    Modes,
    join_modes,
    multilinear_attention,
    multilinear_modes,
    multilinear_scores,
)
from kernel_attention.mechanisms.multilinear.objective import core_penalty, kmlsvd_objective

__all__ = [
    "DualMultilinearAttention",
    "Modes",
    "MultilinearAttention",
    "TensorAttention",
    "core_penalty",
    "dual_multilinear_scores",
    "join_modes",
    "kmlsvd_objective",
    "multilinear_attention",
    "multilinear_layer",
    "multilinear_modes",
    "multilinear_scores",
    "tensor_scores",
]
