"""Causal linear attention by the kernel of flash-linear-attention.

Legend: B batch, N tokens, h heads, p head width.
"""

from typing import Any, NamedTuple

from torch import Tensor

from kernel_attention.core.engine import CausalKernel, Unsupported
from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.mechanisms.linear.joint import has_linear_pass
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.features.feature_maps import FeatureMap, features_in_range
from kernel_attention.tensors.gpu import find_kernel, run_kernel
from kernel_attention.tensors.packing import PackedSequences
from kernel_attention.tensors.statistics import without_autocast

_KERNEL = "linear_attn.chunk_linear_attn"


class LinearCall(NamedTuple):
    """The input x (B, N, d) and options of a call, and its heads once an engine is chosen.

    ``normalize``: whether the sums of the weights divide. ``is_whole``: whether x has all keys, without
    padding and on one process. ``packed``: the sequences that lie end to end in x; None: every row is one.
    ``heads``: queries, keys and values, (B, h, N, p); None while an engine is being chosen.
    """

    x: Tensor
    num_heads: int
    head_dim: int
    feature_map: FeatureMap
    normalize: bool
    is_causal: bool
    is_whole: bool = True
    packed: PackedSequences | None = None
    heads: tuple[Tensor, Tensor, Tensor] | None = None


class FlashLinearAttention(CausalKernel):
    """The kernel for causal linear attention."""

    def kernel(self, call: LinearCall) -> str | Unsupported:
        """The name of the kernel, or why there is none."""
        if not has_linear_pass(call.feature_map):
            return Unsupported("the feature map has another width than a head, or reads the sequence")
        return _KERNEL

    def attend(self, call: LinearCall) -> Tensor:
        """(B, N, h, p)."""
        assert call.heads is not None
        dtype = product_dtype(call.heads[2])
        with without_autocast(call.x):
            heads = (x.to(dtype).transpose(1, 2) for x in call.heads)
            return run_kernel(_Function(call, by_kernel=True), _Function(call, by_kernel=False), *heads)


class _Function:
    """A call as a function of queries, keys and values, (B, N, h, p) each."""

    def __init__(self, call: LinearCall, *, by_kernel: bool) -> None:
        self.feature_map, self.normalize = call.feature_map, call.normalize
        self.packed, self.by_kernel = call.packed, by_kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = self.packed
        if self.by_kernel:
            q, k = (
                features_in_range(self.feature_map, x, None, True).to(v.dtype).contiguous() for x in (q, k)
            )
            options: dict[str, Any] = {} if packed is None else {"cu_seqlens": packed.boundaries}
            found: Any = find_kernel(_KERNEL)
            # Unscaled: with a scale the outputs of a kernel without normalisation are others.
            return found(q, k, v.contiguous(), scale=1.0, normalize=self.normalize, **options)[0]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if packed is not None:
            q, k, v = (packed.unpack_heads(x) for x in (q, k, v))
        form: dict[str, Any] = {"feature_map": self.feature_map, "normalize": self.normalize}
        out = linear_attention(q, k, v, is_causal=True, **form)
        return (out if packed is None else packed.pack_heads(out)).transpose(1, 2)


ENGINES = (FlashLinearAttention(),)
