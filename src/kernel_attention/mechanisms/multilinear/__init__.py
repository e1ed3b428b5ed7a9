"""Multilinear (KMLSVD) attention: in the primal, in the dual, and with learnt tensors."""

# isort: off
from kernel_attention.mechanisms.multilinear.layer import MultilinearAttention
from kernel_attention.mechanisms.multilinear.dual_layer import DualMultilinearAttention
from kernel_attention.mechanisms.multilinear.tensor_layer import TensorAttention
# isort: on

__all__ = ["DualMultilinearAttention", "MultilinearAttention", "TensorAttention"]
