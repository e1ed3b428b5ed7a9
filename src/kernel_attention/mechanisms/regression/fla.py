"""The causal delta rule, with a decay or without one, by the kernels of flash-linear-attention.

Legend: B batch, N tokens, h heads, p head width.
"""

from typing import Any, NamedTuple

from torch import Tensor

from kernel_attention.core.engine import CausalKernel
from kernel_attention.mechanisms.regression.functional import delta_attention
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.features.feature_maps import cosine
from kernel_attention.tensors.gpu import find_kernel, run_kernel
from kernel_attention.tensors.packing import PackedSequences
from kernel_attention.tensors.statistics import exactly, without_autocast

_KERNELS = {False: "delta_rule.chunk_delta_rule", True: "gated_delta_rule.chunk_gated_delta_rule"}


class DeltaCall(NamedTuple):
    """The input x (B, N, d) and options of a call, and its heads once an engine is chosen.

    ``gated``: whether the memory decays. ``is_whole``: whether x has all keys, without padding. ``packed``:
    the sequences that lie end to end in x; None: every row is one. ``heads``: queries, keys and values, (B,
    h, N, p), beta and, where gated, log alpha, (B, h, N); None while an engine is being chosen.
    """

    x: Tensor
    num_heads: int
    head_dim: int
    gated: bool
    is_causal: bool
    is_whole: bool = True
    packed: PackedSequences | None = None
    heads: tuple[Tensor, ...] | None = None


class FlashDelta(CausalKernel):
    """The kernels for the causal delta rule."""

    def kernel(self, call: DeltaCall) -> str:
        """The name of the kernel."""
        return _KERNELS[call.gated]

    def attend(self, call: DeltaCall) -> Tensor:
        """(B, N, h, p)."""
        assert call.heads is not None
        dtype = product_dtype(call.heads[2])
        with without_autocast(call.x):
            q, k, v, *steps = (x.transpose(1, 2) for x in call.heads)
            by_kernel, by_formula = (_Function(call, by_kernel=way) for way in (True, False))
            return run_kernel(by_kernel, by_formula, q.to(dtype), k.to(dtype), v.to(dtype), *steps)


class _Function:
    """A call as a function of queries, keys and values (B, N, h, p), beta and log alpha (B, N, h)."""

    def __init__(self, call: DeltaCall, *, by_kernel: bool) -> None:
        self.gated, self.packed, self.by_kernel = call.gated, call.packed, by_kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *decay: Tensor) -> Tensor:
        packed = self.packed
        if self.by_kernel:
            q, k = (cosine(exactly(x)).to(v.dtype).contiguous() for x in (q, k))
            options: dict[str, Any] = {"beta": beta.to(v.dtype).contiguous(), "scale": 1.0}
            if self.gated:
                options["g"] = decay[0].contiguous()
            if packed is not None:
                options["cu_seqlens"] = packed.boundaries
            found: Any = find_kernel(_KERNELS[self.gated])
            return found(q, k, v.contiguous(), **options)[0]
        heads = [x.transpose(1, 2) for x in (q, k, v, beta, *decay)]
        if packed is not None:
            heads = [packed.unpack(x.transpose(1, 2)).transpose(1, 2) for x in heads]
        out = delta_attention(*heads, is_causal=True)
        return (out if packed is None else packed.pack_heads(out)).transpose(1, 2)


ENGINES = (FlashDelta(),)
