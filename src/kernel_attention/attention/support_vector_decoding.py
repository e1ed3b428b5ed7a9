"""Decoding of the support-vector layers: linear, sparse, batch_norm, scaled_heads, both, conv1d."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_attention.attention.decoding import Decoder, position_after, whole_lengths
from kernel_attention.attention.kernel_modules import LinearKernel, SparseKernel
from kernel_attention.functional.decoding import (
    FeatureKernel,
    Kernel,
    Memory,
    Moments,
    attention_step,
    empty_memory,
    empty_moments,
    read_memory,
    read_moments,
    recentre_step,
)
from kernel_attention.functional.decoding_state import Position, State, choose, scale_by
from kernel_attention.functional.support_vector import head_groups
from kernel_attention.kernels import accumulation_dtype

if TYPE_CHECKING:
    from kernel_attention.attention.support_vector import SupportVectorAttention


@dataclass(frozen=True)
class HeadsState(State):
    """What the heads of one factor f remember.

    Attributes:
        memory: one key and value for every block of f tokens, or their running sum.
        open_block: the open block's tokens added up, or their maximum, (B, 1, d); None where f is 1.
        moments: of the keys; None without centring.
    """

    memory: Memory
    open_block: Tensor | None
    moments: Moments | None


@dataclass(frozen=True)
class SupportVectorState(State):
    """The tokens read; the heads' states, one for each run of heads of one factor; and the last s - 1 rows of
    what a convolution reads, (B, s - 1, d) each.
    """

    position: Position
    heads: tuple[HeadsState, ...]
    window: tuple[Tensor, ...] = ()


class SupportVectorDecoder(Decoder[SupportVectorState]):
    """Of :class:`kernel_attention.SupportVectorAttention`, where it has a causal form."""

    def __init__(self, layer: SupportVectorAttention) -> None:
        self.layer = layer
        self.groups = head_groups(layer.factors)
        self.kernel: Kernel = None
        if isinstance(layer.kernel, LinearKernel):
            self.kernel = FeatureKernel(layer.kernel.feature_map, layer.kernel.normalize)
        elif isinstance(layer.kernel, SparseKernel):
            self.kernel = layer.kernel.pattern

    def initial_state(self, batch_size: int) -> SupportVectorState:
        """See :class:`Decoder`."""
        layer, weight = self.layer, self.layer.out_proj.weight
        heads = []
        for group, factor in self.groups:
            like = weight.new_empty(batch_size, group.stop - group.start, 0, layer.head_dim)
            dtype = accumulation_dtype(weight.dtype)
            heads.append(
                HeadsState(
                    empty_memory(self.kernel, like),
                    None if factor == 1 else weight.new_zeros(batch_size, 1, layer.embed_dim, dtype=dtype),
                    empty_moments(like) if layer.is_centred else None,
                )
            )
        window: tuple[Tensor, ...] = ()
        if layer.convolution is not None:
            rows = weight.new_zeros(batch_size, layer.convolution.kernel_size - 1, layer.embed_dim)
            window = (rows,) if layer.convolution.weights == "separable" else (rows, rows)
        return SupportVectorState(Position(), tuple(heads), window)

    def step(self, x: Tensor, state: SupportVectorState) -> tuple[Tensor, SupportVectorState]:
        """See :class:`Decoder`."""
        layer, position = self.layer, state.position
        if layer.convolution is not None:
            rows = [
                torch.cat([old, new], dim=1)
                for old, new in zip(state.window, self._convolved_rows(x), strict=True)
            ]
            q, k, v = (layer.split_heads(part[:, -1:]) for part in self._convolve(rows, x))
            out, memory = attention_step(self.kernel, q, k, v, state.heads[0].memory, position)
            parts = [HeadsState(memory, None, None)]
            window = tuple(row[:, 1:] for row in rows)
            outs = [out]
        else:
            q, window, outs, parts = layer.split_heads(layer.q_proj(x)), (), [], []
            for (group, factor), part in zip(self.groups, state.heads, strict=True):
                out, part = self._heads_step(x, q[:, group], group, factor, part, position)
                outs.append(out)
                parts.append(part)
        y = layer.out_proj(layer.merge_heads(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)))
        return y, SupportVectorState(position.next(), tuple(parts), window)

    def read(self, x: Tensor, lengths: Tensor | None) -> SupportVectorState:
        """See :class:`Decoder`."""
        layer, position, lengths = self.layer, position_after(x, lengths), whole_lengths(x, lengths)
        if layer.convolution is not None:
            rows = self._convolved_rows(x)
            q, k, v = (layer.split_heads(part) for part in self._convolve(rows, x))
            heads = [HeadsState(read_memory(self.kernel, q, k, v, lengths), None, None)]
            size = layer.convolution.kernel_size - 1
            window = tuple(_last_rows(row, lengths, size) for row in rows)
            return SupportVectorState(position, tuple(heads), window)
        q, heads = layer.split_heads(layer.q_proj(x)), []
        for group, factor in self.groups:
            pooled = layer.pool_tokens(x, factor, None, True)
            k, v = (layer.project_heads(proj, pooled, group) for proj in (layer.k_proj, layer.v_proj))
            moments = read_moments(k, lengths, factor) if layer.is_centred else None
            if moments is not None and layer.normalize:
                k = k - moments.first
            memory = read_memory(self.kernel, q[:, group], k, v, lengths, factor)
            open_block = None if factor == 1 else self._read_open_block(x, lengths, factor)
            heads.append(HeadsState(memory, open_block, moments))
        return SupportVectorState(position, tuple(heads))

    def _heads_step(
        self, x: Tensor, q: Tensor, group: slice, factor: int, state: HeadsState, position: Position
    ) -> tuple[Tensor, HeadsState]:
        layer, open_block, moments = self.layer, state.open_block, state.moments
        if open_block is not None:
            x, open_block = self._add_to_block(x, open_block, position, factor)
        k, v = (layer.project_heads(proj, x, group) for proj in (layer.k_proj, layer.v_proj))
        if moments is not None:
            q, k, moments = recentre_step(
                q,
                k,
                moments,
                position,
                beta=layer.beta,
                normalize=layer.normalize,
                eps=layer.eps,
                factor=factor,
            )
        out, memory = attention_step(self.kernel, q, k, v, state.memory, position, factor)
        return out, HeadsState(memory, open_block, moments)

    def _add_to_block(
        self, x: Tensor, block: Tensor, position: Position, factor: int
    ) -> tuple[Tensor, Tensor]:
        """The open block pooled, and added up, with one more token."""
        layer, offset = self.layer, position.offset(factor)
        is_max = layer.pooling == "max"
        block = choose(offset == 0, torch.full_like(block, -math.inf if is_max else 0.0), block)
        if is_max:
            block = torch.maximum(block, x.to(block.dtype))
            return block.to(x.dtype), block
        weighed = x
        if layer.pool_kernels is not None:
            weight = factor * layer.pool_kernels[str(factor)].mT[offset]  # (d,) or (B, d)
            weighed = x * (weight if isinstance(offset, int) else weight[:, None])
        block = block + weighed
        return (block / scale_by(offset + 1, block)).to(x.dtype), block

    def _read_open_block(self, x: Tensor, lengths: Tensor, factor: int) -> Tensor:
        """The open block added up after a prompt, (B, 1, d)."""
        token = torch.arange(x.size(1), device=x.device)
        inside = (token < lengths[:, None]) & (token >= (lengths // factor * factor)[:, None])
        rows = x.to(accumulation_dtype(x.dtype))
        if self.layer.pooling == "max":
            return rows.masked_fill(~inside[..., None], -math.inf).amax(dim=1, keepdim=True)
        if self.layer.pool_kernels is not None:
            rows = rows * factor * self.layer.pool_kernels[str(factor)].mT[token % factor]
        return rows.masked_fill(~inside[..., None], 0.0).sum(dim=1, keepdim=True)

    def _convolved_rows(self, x: Tensor) -> list[Tensor]:
        """What the convolution reads: tokens where separable, else queries and keys; (B, N, d) each."""
        convolution = self.layer.convolution
        assert convolution is not None
        return [x] if convolution.weights == "separable" else [self.layer.q_proj(x), self.layer.k_proj(x)]

    def _convolve(self, rows: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens in ``rows``; x where values are not convolved."""
        layer, convolution = self.layer, self.layer.convolution
        assert convolution is not None
        if convolution.weights == "separable":
            for_q, for_k, for_v = convolution.before(rows[0], None, True)
            return layer.q_proj(for_q), layer.k_proj(for_k), layer.v_proj(for_v)
        q, k = convolution.after(rows[0], rows[1], None, True)
        return q, k, layer.v_proj(x)


def _last_rows(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The last ``size`` of each sequence's real rows, zeros before its first: (B, N, d) -> (B, size, d)."""
    index = lengths[:, None] - size + torch.arange(size, device=x.device)
    rows = x.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, x.size(2)))
    return rows.masked_fill(index[..., None] < 0, 0.0)
