"""Decoding of the primal layers: a state whose size does not depend on what was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernel_attention import functional
from kernel_attention.attention.decoding import Decoder, whole_lengths
from kernel_attention.attention.modes import required_max_len
from kernel_attention.functional.decoding import energy_before, features_of
from kernel_attention.functional.decoding_state import SHARED, State
from kernel_attention.functional.primal import PrimalState, weight_row
from kernel_attention.kernels import accumulation_dtype, evenly_spaced, frobenius, rows_before, running_mean
from kernel_attention.kernels.statistics import exactly

if TYPE_CHECKING:
    from kernel_attention.attention.multilinear import MultilinearAttention
    from kernel_attention.attention.primal import PrimalAttention


def grid_rows(layer: PrimalAttention | MultilinearAttention, position: int | Tensor) -> int | Tensor | None:
    """Which row of the weights the token at ``position`` is sampled for: m, or None; (B, M) 0 or 1 for
    positions (B,).
    """
    if isinstance(position, Tensor):
        max_len = required_max_len(layer.max_len, int(position.max()) + 1)
        grid = evenly_spaced(layer.num_rows, max_len, position.device)
        return (grid == position[:, None]).to(layer.out_proj.weight.dtype)
    max_len = required_max_len(layer.max_len, position + 1)
    index = rows_before(position, layer.num_rows, max_len)
    return index if rows_before(position + 1, layer.num_rows, max_len) > index else None


def gathered(layer: PrimalAttention | MultilinearAttention, x: Tensor, lengths: Tensor, w: Tensor) -> Tensor:
    """f(X)^T W over the rows of the grid that a prompt reaches: x (B, N, d), w (h, M, s) -> (B, h, p, s)."""
    max_len = required_max_len(layer.max_len, x.size(1))
    grid = evenly_spaced(layer.num_rows, max_len, x.device)
    grid = grid[: rows_before(x.size(1), layer.num_rows, max_len)]
    rows = exactly(layer.split_heads(x[:, grid]))
    rows = rows.masked_fill(grid[:, None] >= lengths[:, None, None, None], 0.0)
    return rows.mT @ exactly(w)[:, : grid.size(0)]


class PrimalDecoder(Decoder[PrimalState]):
    """Of :class:`kernel_attention.PrimalAttention`."""

    def __init__(self, layer: PrimalAttention) -> None:
        if layer.data_dependent:
            required_max_len(layer.max_len, 0)
        self.layer = layer

    def initial_state(self, batch_size: int) -> PrimalState:
        """See :class:`Decoder`."""
        layer = self.layer
        dtype = accumulation_dtype(layer.w_e.dtype)
        sums = layer.w_e.new_zeros(batch_size, layer.num_heads, 1, layer.head_dim, dtype=dtype)
        weights = sums.new_zeros(batch_size, layer.num_heads, layer.head_dim, layer.rank)
        found = weights if layer.data_dependent else None
        energy = energy_before(layer.feature_map, sums)
        return PrimalState(0, sums, sums, found, found, energy, energy)

    def step(self, x: Tensor, state: PrimalState) -> tuple[Tensor, PrimalState]:
        """See :class:`Decoder`."""
        layer = self.layer
        row, grid_index = None, None
        if layer.data_dependent:
            row, grid_index = layer.split_heads(x), grid_rows(layer, state.position)
        scores, state = functional.primal_step(
            layer.split_heads(layer.q_proj(x)),
            layer.split_heads(layer.k_proj(x)),
            layer.w_e,
            layer.w_r,
            state,
            row=row,
            grid_index=grid_index,
            running_means=layer.running_means,
            feature_map=layer.feature_map,
        )
        return layer.output(scores), state

    def read(self, x: Tensor, lengths: Tensor | None) -> PrimalState:
        """See :class:`Decoder`."""
        layer, real = self.layer, whole_lengths(x, lengths)
        unread = (torch.arange(x.size(1), device=x.device) >= real[:, None])[:, None, :, None]
        sums, energies = [], []
        for projection in (layer.q_proj, layer.k_proj):
            rows = exactly(layer.split_heads(projection(x))).masked_fill(unread, 0.0)
            sums.append(rows.sum(dim=2, keepdim=True))
            if layer.feature_map is frobenius:
                rows = running_mean(rows).masked_fill(unread, 0.0) if layer.running_means else rows
                energies.append(rows.square().sum(dim=(-2, -1), keepdim=True))
        weights: list[Tensor] = []
        if layer.data_dependent:
            weights = [gathered(layer, x, real, w) for w in (layer.w_e, layer.w_r)]
        position = x.size(1) if lengths is None else lengths
        return PrimalState(
            position,
            *sums,
            *(weights or (None, None)),
            *(energies or (None, None)),
        )


@dataclass(frozen=True)
class MultilinearState(State):
    """What causal decoding remembers of D modes.

    Attributes:
        position: tokens read, one number or (B,) int64.
        projections: f(X)^T times the factors right of Phi_n over the sampled rows reached so far,
            (B, h, p, R) per mode; empty where the variant reads no rows.
        energies: ||X||^2 of every mode, (B, h, 1, 1); empty where the feature map does not divide by it.
        factors: the factors right of Phi_n, (h, M, R) per mode, computed once per sequence. A state is
            for the weights it was made with.
    """

    position: int | Tensor
    projections: tuple[Tensor, ...]
    energies: tuple[Tensor, ...]
    factors: tuple[Tensor, ...] = field(metadata=SHARED)


class MultilinearDecoder(Decoder[MultilinearState]):
    """Of :class:`kernel_attention.MultilinearAttention`."""

    def __init__(self, layer: MultilinearAttention) -> None:
        if layer.variant == "data_dependent":
            required_max_len(layer.max_len, 0)
        self.layer = layer

    def initial_state(self, batch_size: int) -> MultilinearState:
        """See :class:`Decoder`."""
        layer = self.layer
        factors = tuple(layer.factors()[1])
        size = (batch_size, layer.num_heads, layer.head_dim, layer.rank)
        projections: tuple[Tensor, ...] = ()
        if layer.variant == "data_dependent":
            projections = tuple(factor.new_zeros(size) for factor in factors)
        energy = energy_before(layer.feature_map, layer.w.new_empty(*size[:2], 0, layer.head_dim))
        return MultilinearState(0, projections, () if energy is None else (energy,) * layer.order, factors)

    def step(self, x: Tensor, state: MultilinearState) -> tuple[Tensor, MultilinearState]:
        """See :class:`Decoder`."""
        layer, energies = self.layer, state.energies or (None,) * self.layer.order
        read = [
            features_of(layer.feature_map, mode, energy)
            for mode, energy in zip(layer.sequences(x), energies, strict=True)
        ]
        projections = state.projections
        if projections:
            index, row = grid_rows(layer, state.position), exactly(layer.split_heads(x))
            if index is not None:
                projections = tuple(
                    old + row.mT * weight_row(factor, index)
                    for old, factor in zip(projections, state.factors, strict=True)
                )
        scores = [
            phi @ weight.to(phi.dtype)
            for (phi, _), weight in zip(read, projections or state.factors, strict=True)
        ]
        y = layer.out_proj(layer.merge_heads(layer.concat(torch.cat(scores, dim=-1))))
        after = tuple(energy for _, energy in read if energy is not None)
        return y, MultilinearState(state.position + 1, projections, after, state.factors)

    def read(self, x: Tensor, lengths: Tensor | None) -> MultilinearState:
        """See :class:`Decoder`."""
        layer, real = self.layer, whole_lengths(x, lengths)
        factors = tuple(layer.factors()[1])
        projections: tuple[Tensor, ...] = ()
        if layer.variant == "data_dependent":
            projections = tuple(gathered(layer, x, real, factor) for factor in factors)
        energies: tuple[Tensor, ...] = ()
        if layer.feature_map is frobenius:
            unread = (torch.arange(x.size(1), device=x.device) >= real[:, None])[:, None, :, None]
            energies = tuple(
                exactly(mode).square().masked_fill(unread, 0.0).sum(dim=(-2, -1), keepdim=True)
                for mode in layer.sequences(x)
            )
        position = x.size(1) if lengths is None else lengths
        return MultilinearState(position, projections, energies, factors)
