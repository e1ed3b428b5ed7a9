"""Causal Primal-Attention one token at a time, with a state of constant size.

The legend is that of ``kernel_attention.mechanisms.primal.functional``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.decoding import move, scale_by, whole_lengths
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.tensors.features.feature_maps import (
    FeatureMap,
    cosine,
    energy_before,
    features_of,
    frobenius,
)
from kernel_attention.tensors.sampling import gathered, weight_row
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, running_mean


class PrimalState(NamedTuple):
    """The state of causal decoding. Its size does not depend on the number of tokens read.

    ``position`` counts the tokens read, one number for all sequences or (B,) int64. ``q_sum`` and ``k_sum``
    are (B, h, 1, p). ``w_e`` and ``w_r`` are the projection weights gathered so far, (B, h, p, s); None with
    data-independent weights. ``q_energy`` and ``k_energy`` (B, h, 1, 1) are ||X||^2 for the Frobenius feature
    map; None with another map.
    """

    position: int | Tensor
    q_sum: Tensor
    k_sum: Tensor
    w_e: Tensor | None
    w_r: Tensor | None
    q_energy: Tensor | None = None
    k_energy: Tensor | None = None

    def to(self, device: torch.device | str) -> PrimalState:
        """The state on another device."""
        return move(self, device)


def primal_start(
    w_e: Tensor, batch_size: int, head_dim: int, data_dependent: bool, feature_map: FeatureMap
) -> PrimalState:
    """The state before the first token; w_e (h, M or p, s) gives sizes, precision and device."""
    num_heads, _, rank = w_e.shape
    sums = w_e.new_zeros(batch_size, num_heads, 1, head_dim, dtype=accumulation_dtype(w_e.dtype))
    found = sums.new_zeros(batch_size, num_heads, head_dim, rank) if data_dependent else None
    energy = energy_before(feature_map, sums)
    return PrimalState(0, sums, sums, found, found, energy, energy)


def primal_step(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    state: PrimalState,
    *,
    row: Tensor | None = None,
    grid_index: int | Tensor | None = None,
    running_means: bool = True,
    feature_map: FeatureMap = cosine,
) -> tuple[PrimalScores, PrimalState]:
    """One token of causal Primal-Attention; equal to the matching row of ``primal_scores(is_causal=True)``.

    Args:
        q: query of the new token, (B, h, 1, p).
        k: key of the new token, (B, h, 1, p).
        w_e: as in ``primal_scores``.
        w_r: as in ``primal_scores``.
        state: what the tokens before left behind.
        row: the new token's slice of the layer input, (B, h, 1, p), where weights are data-dependent.
        grid_index: m if the new token is the m-th sampled row (t_m = position), None otherwise. (B, M) where
            sequences differ: 1 at the row that the token is, and 0 elsewhere.
        running_means: as in ``primal_scores``.
        feature_map: phi, token-wise or the Frobenius map.
    """
    count = scale_by(state.position + 1, state.q_sum)
    q_sum, k_sum = state.q_sum + q, state.k_sum + k
    if running_means:
        q, k = (q_sum / count).to(q.dtype), (k_sum / count).to(k.dtype)
    phi_q, q_energy = features_of(feature_map, q, state.q_energy)
    phi_k, k_energy = features_of(feature_map, k, state.k_energy)
    gathered_e, gathered_r = state.w_e, state.w_r
    if row is not None and gathered_e is not None and gathered_r is not None:
        if grid_index is not None:
            gathered_e = gathered_e + row.mT * weight_row(w_e, grid_index)
            gathered_r = gathered_r + row.mT * weight_row(w_r, grid_index)
        w_e, w_r = gathered_e.to(q.dtype), gathered_r.to(q.dtype)
    scores = PrimalScores(phi_q @ w_e, phi_k @ w_r)
    return scores, PrimalState(state.position + 1, q_sum, k_sum, gathered_e, gathered_r, q_energy, k_energy)


def primal_read(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lengths: Tensor | None,
    *,
    x: Tensor | None = None,
    num_rows: int = 0,
    max_len: int | None = None,
    running_means: bool = True,
    feature_map: FeatureMap = cosine,
) -> PrimalState:
    """The state after a prompt q, k (B, h, N, p), in parallel; the weights and options are those of
    ``primal_step``.

    Args:
        q: queries.
        k: keys.
        w_e: W_e.
        w_r: W_r.
        lengths: real tokens of each sequence, which come first, (B,) int64; None: all.
        x: the layer input in the heads' slices, (B, h, N, p), where weights are data-dependent.
        num_rows: rows of the sampling grid.
        max_len: length of the sampling grid.
        running_means: see there.
        feature_map: see there.
    """
    length = q.size(2)
    real = whole_lengths(q[:, 0], lengths)
    unread = (torch.arange(length, device=q.device) >= real[:, None])[:, None, :, None]
    sums, energies = [], []
    for rows in (exactly(part).masked_fill(unread, 0.0) for part in (q, k)):
        sums.append(rows.sum(dim=2, keepdim=True))
        if feature_map is frobenius:
            rows = running_mean(rows).masked_fill(unread, 0.0) if running_means else rows
            energies.append(rows.square().sum(dim=(-2, -1), keepdim=True))
    weights: list[Tensor] = []
    if x is not None:
        weights = [gathered(x, real, w, num_rows, max_len) for w in (w_e, w_r)]
    return PrimalState(
        length if lengths is None else lengths, *sums, *(weights or (None, None)), *(energies or (None, None))
    )
