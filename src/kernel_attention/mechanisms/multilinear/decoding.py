"""Causal multilinear attention one token at a time.

The legend is that of ``kernel_attention.mechanisms.multilinear.functional``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernel_attention.core.decoding import SHARED, State, whole_lengths
from kernel_attention.tensors.features.feature_maps import FeatureMap, energy_before, features_of, frobenius
from kernel_attention.tensors.sampling import gathered, weight_row
from kernel_attention.tensors.statistics import exactly


@dataclass(frozen=True)
class MultilinearState(State):
    """The state of causal decoding with D modes.

    Attributes:
        position: the number of tokens read, one number or (B,) int64.
        projections: f(X)^T times the factors to the right of Phi_n, over the sampled rows reached so far,
            (B, h, p, R) per mode; empty where the variant samples no rows.
        energies: ||X||^2 of every mode, (B, h, 1, 1); empty where the feature map does not divide by it.
        factors: the factors to the right of Phi_n, (h, M, R) per mode, computed once per sequence. So a state
            is valid only for the weights that made it.
    """

    position: int | Tensor
    projections: tuple[Tensor, ...]
    energies: tuple[Tensor, ...]
    factors: tuple[Tensor, ...] = field(metadata=SHARED)


def multilinear_start(
    factors: Sequence[Tensor], batch_size: int, head_dim: int, data_dependent: bool, feature_map: FeatureMap
) -> MultilinearState:
    """The state before the first token of ``batch_size`` sequences; factors (h, M, R) per mode."""
    num_heads, _, rank = factors[0].shape
    projections: tuple[Tensor, ...] = ()
    if data_dependent:
        projections = tuple(factor.new_zeros(batch_size, num_heads, head_dim, rank) for factor in factors)
    energy = energy_before(feature_map, factors[0].new_empty(batch_size, num_heads, 0, head_dim))
    return MultilinearState(
        0, projections, () if energy is None else (energy,) * len(factors), tuple(factors)
    )


def multilinear_step(
    modes: Sequence[Tensor],
    state: MultilinearState,
    *,
    row: Tensor | None = None,
    grid_index: int | Tensor | None = None,
    feature_map: FeatureMap = frobenius,
) -> tuple[tuple[Tensor, ...], MultilinearState]:
    """One token's scores E_1..E_D, (B, h, 1, R) each, and the state with it.

    Args:
        modes: the token's D modes, (B, h, 1, p) each.
        state: what the tokens before left behind.
        row: the token's slice of the layer input, (B, h, 1, p), where the variant is data-dependent.
        grid_index: as in ``kernel_attention.functional.primal_step``.
        feature_map: phi, token-wise or the Frobenius map.
    """
    energies = state.energies or (None,) * len(modes)
    read = [features_of(feature_map, mode, energy) for mode, energy in zip(modes, energies, strict=True)]
    projections = state.projections
    if row is not None and grid_index is not None:
        projections = tuple(
            old + exactly(row).mT * weight_row(factor, grid_index)
            for old, factor in zip(projections, state.factors, strict=True)
        )
    scores = tuple(
        phi @ weight.to(phi.dtype)
        for (phi, _), weight in zip(read, projections or state.factors, strict=True)
    )
    after = tuple(energy for _, energy in read if energy is not None)
    return scores, MultilinearState(state.position + 1, projections, after, state.factors)


def multilinear_read(
    modes: Sequence[Tensor],
    factors: Sequence[Tensor],
    lengths: Tensor | None,
    *,
    x: Tensor | None = None,
    num_rows: int = 0,
    max_len: int | None = None,
    feature_map: FeatureMap = frobenius,
) -> MultilinearState:
    """The state after a prompt, in parallel.

    Args:
        modes: D modes, (B, h, N, p) each.
        factors: the factors to the right of Phi_n, (h, M, R) per mode.
        lengths: the number of real tokens of each sequence, which come first, (B,) int64; None: all tokens.
        x: the layer input in the heads' slices, (B, h, N, p), where the variant is data-dependent.
        num_rows: rows of the sampling grid.
        max_len: length of the sampling grid.
        feature_map: phi, token-wise or the Frobenius map.
    """
    length = modes[0].size(2)
    device = modes[0].device
    real = whole_lengths(modes[0][:, 0], lengths)
    projections: tuple[Tensor, ...] = ()
    if x is not None:
        projections = tuple(gathered(x, real, factor, num_rows, max_len) for factor in factors)
    energies: tuple[Tensor, ...] = ()
    if feature_map is frobenius:
        unread = (torch.arange(length, device=device) >= real[:, None])[:, None, :, None]
        energies = tuple(
            exactly(mode).square().masked_fill(unread, 0.0).sum(dim=(-2, -1), keepdim=True) for mode in modes
        )
    return MultilinearState(length if lengths is None else lengths, projections, energies, tuple(factors))
