"""Parts that the data-dependent and the multilinear layers share: the rows sampled from a sequence, the
projections that their modes read, and their initial weights.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.kernel_tensors import cubemax_kernel

_LARGEST_ORDER = 16  # torch's kernels take some twenty dimensions, and an einsum two letters for a mode


class ReadsModes(AttentionLayer):
    """An attention layer over D modes: queries, keys and D - 2 fibers.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        order: number of modes D, from 2 to 16.
        bias: whether the projections have biases.
    """

    def __init__(self, embed_dim: int, num_heads: int, order: int, bias: bool) -> None:
        super().__init__(embed_dim, num_heads)
        if not isinstance(order, int) or isinstance(order, bool) or not 2 <= order <= _LARGEST_ORDER:
            raise InputError(f"order={order!r} must be a whole number from 2 to {_LARGEST_ORDER}")
        require_parameters(
            f"{type(self).__name__}: order={order} with embed_dim={embed_dim}",
            (order + 1) * embed_dim**2,
            "lower order or embed_dim",
        )
        self.order = order
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        # One map for all fibers; queries and keys keep the names that other attention layers give them.
        self.f_proj = nn.Linear(embed_dim, (order - 2) * embed_dim, bias=bias) if order > 2 else None

    def sequences(self, x: Tensor) -> list[Tensor]:
        """The input of each mode: D tensors (B, h, N, p)."""
        modes = [self.q_proj(x), self.k_proj(x)]
        if self.f_proj is not None:
            modes += self.f_proj(x).split(self.embed_dim, dim=-1)
        return [self.split_heads(mode) for mode in modes]

    @abstractmethod
    def scores(self, x: Tensor, *, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """E_1..E_D of every token, each (B, h, N, R); arguments as in the layer's call."""

    def named_scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> dict[str, Tensor]:
        """See [`AttentionLayer`][kernel_attention.core.layer.AttentionLayer]."""
        found = self.scores(x, attention_mask=attention_mask)
        return {str(n + 1): score for n, score in enumerate(found)}

    def kernel_tensor(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor | None:
        """The cubemax tensor of the modes, (B, h, N, .., N), zero at padded tokens; for analysis."""
        return cubemax_kernel(self.sequences(x), [attention_mask] * self.order)

    def projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight (d, d) and bias of every mode's map."""
        maps: list[tuple[Tensor, Tensor | None]] = [(p.weight, p.bias) for p in (self.q_proj, self.k_proj)]
        if self.f_proj is None:
            return maps
        weights = self.f_proj.weight.split(self.embed_dim)
        biases = [None] * len(weights) if self.f_proj.bias is None else self.f_proj.bias.split(self.embed_dim)
        return [*maps, *zip(weights, biases, strict=True)]


def orthonormal(num_heads: int, num_rows: int, rank: int) -> Tensor:
    """(h, num_rows, rank): orthonormal columns in every head, or rows where there are fewer of them."""
    weight = torch.empty(num_heads, num_rows, rank)
    for head in weight:
        nn.init.orthogonal_(head)
    return weight


def compatibility_tensor(variant: str, num_heads: int, width: int, order: int) -> nn.Parameter | None:
    """C as learnt, starting from the identity."""
    if variant == "learnable_diagonal":
        return nn.Parameter(torch.ones(num_heads, width))
    if variant != "learnable":
        return None
    tensor = torch.zeros(num_heads, *[width] * order)
    diagonal = torch.arange(width)
    index: tuple[slice | Tensor, ...] = (slice(None), *[diagonal] * order)
    tensor[index] = 1.0
    return nn.Parameter(tensor)
