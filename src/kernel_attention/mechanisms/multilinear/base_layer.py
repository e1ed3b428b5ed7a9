"""The base of the layers over D modes: the projections that their modes read, and those of their scores."""

from __future__ import annotations

import functools
from abc import abstractmethod

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.parameters import Device, TensorLinear, can_join, joint_linear
from kernel_attention.errors import InputError
from kernel_attention.limits import require_parameters
from kernel_attention.tensors.multilinear.kernel_tensors import cubemax_kernel

_LARGEST_ORDER = 16  # torch's kernels take some twenty dimensions, and an einsum two letters for a mode


class ReadsModes(AttentionLayer):
    """An attention layer over D modes: queries, keys and D - 2 fibers.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        order: number of modes D, from 2 to 16.
        bias: whether the projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

    concat: nn.Linear
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        order: int,
        bias: bool,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        if not isinstance(order, int) or isinstance(order, bool) or not 2 <= order <= _LARGEST_ORDER:
            raise InputError(f"order={order!r} must be a whole number from 2 to {_LARGEST_ORDER}")
        require_parameters(
            f"{type(self).__name__}: order={order} with embed_dim={embed_dim}",
            (order + 1) * embed_dim**2,
            "lower order or embed_dim",
        )
        self.order = order
        linear = functools.partial(TensorLinear, bias=bias, device=device, dtype=dtype)
        self.q_proj = linear(embed_dim, embed_dim)
        self.k_proj = linear(embed_dim, embed_dim)
        # One map for all fibers; queries and keys keep the names that other attention layers give them.
        self.f_proj = linear(embed_dim, (order - 2) * embed_dim) if order > 2 else None

    def add_outputs(self, rank: int, bias: bool, device: Device, dtype: torch.dtype | None) -> None:
        """Make ``concat``, the map from a head's D R scores to its outputs, and ``out_proj``."""
        linear = functools.partial(TensorLinear, bias=bias, device=device, dtype=dtype)
        self.concat = linear(self.order * rank, self.head_dim)
        self.out_proj = linear(self.embed_dim, self.embed_dim)

    def reset_parameters(self) -> None:
        """Draw the projections of the modes anew."""
        for projection in (self.q_proj, self.k_proj, self.f_proj):
            if projection is not None:
                projection.reset_parameters()
        self.draw_weights()
        self.concat.reset_parameters()
        self.out_proj.reset_parameters()

    def draw_weights(self) -> None:
        """Draw what the layer has between its inputs' projections and ``concat``, for its constructor too."""

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """``concat`` of the scores of every mode on checked arguments, (B, N, d)."""
        scores = torch.cat(self.scores(x, attention_mask=attention_mask), dim=-1)
        return self.out_proj(self.merge_heads(self.concat(scores))), None

    def mode_maps(self) -> list[nn.Linear]:
        """The projections to queries, keys and fibers."""
        return [self.q_proj, self.k_proj, *([] if self.f_proj is None else [self.f_proj])]

    def sequences(self, x: Tensor) -> list[Tensor]:
        """The input of each mode: D tensors (B, h, N, p)."""
        if can_join(x, *self.mode_maps()):
            z = joint_linear(x, *self.mode_maps()).unflatten(-1, (self.order, self.num_heads, -1))
            return list(z.permute(2, 0, 3, 1, 4).unbind())
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
        """The scores of mode n under the name n, counted from 1."""
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
