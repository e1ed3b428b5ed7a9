"""Multilinear (KMLSVD) attention in the dual as a layer, for short sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.core.parameters import Device
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_positive
from kernel_attention.mechanisms.multilinear.base_layer import ReadsModes
from kernel_attention.mechanisms.multilinear.dual_functional import dual_multilinear_scores
from kernel_attention.tensors.sampling import sample_rows
from kernel_attention.tensors.statistics import accumulation_dtype

_GIB = 2**30


@register_attention(
    "dual_multilinear",
    summary="the same scores from the kernel tensor itself; short sequences",
    paper="Verbeek 2025, 3D Primal Attention",
    equation="E_1 = K_(1) (U_3 (x) U_2) S_(1)^T, K = cubemax(sum q k f / p) = S x U_1 x U_2 x U_3",
    time="D N^(D+1)",
    memory="N^D",
)
class DualMultilinearAttention(ReadsModes):
    """Multi-head multilinear attention of order D in the dual (Verbeek, TU Delft 2025), for short sequences.

    The kernel tensor K = cubemax(sum of q k f / p) of every sequence and head is formed and decomposed. The
    scores are E_n = K_(n) (U (x) U) S_(n)^T, and ``concat`` joins the D R scores of a token into the head's
    output. Every forward recomputes the decomposition, and gradients flow through it; nothing of it is
    learnt. There is no causal form, because every token depends on singular vectors of the whole sequence.
    Time and memory are O(N^D).

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        order: number of modes D, from 2 to 16. Order 2 is attention's matrix with its SVD.
        rank: R, of every mode; None: the head width p. Scores past the number of tokens are zero.
        num_samples: decompose the kernel tensor of this many tokens, evenly spaced over the real ones, and
            score all tokens against it: N M^(D - 1) numbers instead of N^D. None: all tokens.
        chunk_size: tokens of a slice of K held at once; slices are computed again in the backward pass. None:
            all of K.
        memory_limit: GiB that K, or a slice of it, may take; training needs about six times as much.
        bias: whether the projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        order: int = 3,
        rank: int | None = None,
        num_samples: int | None = None,
        chunk_size: int | None = None,
        memory_limit: float = 1.0,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, order, bias, device, dtype)
        self.rank = self.head_dim if rank is None else rank
        given = {"rank": self.rank, "num_samples": num_samples, "chunk_size": chunk_size}
        require_positive(**{name: value for name, value in given.items() if value is not None})
        if not memory_limit > 0:
            raise InputError(f"memory_limit={memory_limit!r} must be a positive number of GiB")
        self.num_samples = num_samples
        self.chunk_size = chunk_size
        self.memory_limit = memory_limit
        self.add_outputs(self.rank, bias, device, dtype)

    def why_not_causal(self) -> str | None:
        """There is no causal form, because the decomposition reads the whole sequence."""
        return "every token reads singular vectors of the whole sequence; use 'multilinear', the primal form"

    def scores(self, x: Tensor, *, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """E_1..E_D of every token, each (B, h, N, R); arguments as in the layer's call.

        Raises:
            InputError: where K would take more than ``memory_limit``.
        """
        self._check_memory(x)
        samples, sample_mask = None, None
        if self.num_samples is not None:
            rows = sample_rows(x, self.num_samples, attention_mask)
            if attention_mask is not None and torch.compiler.is_compiling():
                # Their number must not depend on the length there; the mask hides the rows added.
                rows = torch.nn.functional.pad(rows, (0, 0, 0, self.num_samples - rows.size(1)))
            samples = self.sequences(rows)
            if attention_mask is not None:
                position = torch.arange(rows.size(1), device=x.device)[None]
                sample_mask = position < attention_mask.sum(dim=1, keepdim=True)
        return dual_multilinear_scores(
            self.sequences(x),
            self.rank,
            samples=samples,
            attention_mask=attention_mask,
            sample_mask=sample_mask,
            chunk_size=self.chunk_size,
        )

    def _check_memory(self, x: Tensor) -> None:
        batch, length = x.size(0), x.size(1)
        rows = length if self.chunk_size is None else min(self.chunk_size, length)
        others = length if self.num_samples is None else min(self.num_samples, length)
        bytes_each = accumulation_dtype(x.dtype).itemsize
        check_kernel_size(
            type(self).__name__,
            batch * self.num_heads,
            rows,
            others,
            self.order,
            bytes_each,
            self.memory_limit,
            "set num_samples (sub-sampling: the kernel tensor of evenly spaced tokens), chunk_size (slices), "
            "or raise memory_limit",
        )

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, order={self.order}, rank={self.rank}, "
            f"num_samples={self.num_samples}, chunk_size={self.chunk_size}"
        )


def check_kernel_size(
    layer: str,
    matrices: int,
    rows: int,
    others: int,
    order: int,
    bytes_each: int,
    memory_limit: float,
    advice: str,
) -> None:
    """InputError where matrices x rows x others^(order - 1) numbers exceed ``memory_limit`` (GiB)."""
    size = matrices * rows * others ** (order - 1) * bytes_each
    if size > memory_limit * _GIB:
        raise InputError(
            f"{layer}: the kernel tensor of {matrices} x {rows} x {others}^{order - 1} numbers takes "
            f"{size / _GIB:.2f} GiB, more than memory_limit={memory_limit} GiB; {advice}"
        )
