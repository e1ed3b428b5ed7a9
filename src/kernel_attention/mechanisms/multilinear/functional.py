"""Multilinear (KMLSVD) attention of any order D >= 2 in the primal: the scores, the joined output, the core.

Source: Verbeek, "3D Primal Attention", TU Delft 2025 (eq. 2-19, 2-23, 3-9 to 3-15; order 3 there).

Legend: B batch, h heads, N_n tokens read by mode n, p head width, M_n features of mode n (p, or the number of
sampled rows in the data-dependent form), R_n rank of mode n. The weights W_n are (h, M_n, R_n), the core S
(h, R_1..R_D), the compatibility tensor C is None (superdiagonal identity), its superdiagonal (h, M) or the
whole tensor (h, M_1..M_D).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.tensors.features.feature_maps import FeatureMap, balanced, frobenius, inverse_norm
from kernel_attention.tensors.multilinear.factors import alike, multilinear_factors
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.statistics import exactly, valid_ranks, without_autocast

Masks = Tensor | Sequence[Tensor | None] | None


class Modes(NamedTuple):
    """The two factors of every mode's scores: E_n = features[n] @ projections[n].

    ``features`` (B, h, N_n, M) are zero at padded tokens; ``projections`` are (B or 1, h, M, R_n). ``joined``
    holds the features side by side where all modes read the same tokens. ``grams``, if asked for, are
    Phi_n^T Phi_n, (B, h, M_n, M_n) in float32 or better. In the data-dependent form their features are
    f(X) phi(x), with f(X) scaled to norm 1: otherwise ||K||^2 grows with the 2D-th power of the input.
    """

    features: list[Tensor]
    projections: list[Tensor]
    joined: Tensor | None
    grams: list[Tensor] | None

    def scores(self) -> tuple[Tensor, ...]:
        """E_1..E_D, (B, h, N_n, R_n) each."""
        pairs = zip(self.features, self.projections, strict=True)
        return tuple(features @ projection.to(features.dtype) for features, projection in pairs)


def multilinear_modes(
    sequences: Sequence[Tensor],
    factors: Sequence[Tensor],
    *,
    rows: Tensor | None = None,
    grid: Tensor | None = None,
    feature_map: FeatureMap = frobenius,
    attention_mask: Masks = None,
    is_causal: bool = False,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> Modes:
    """Features and projection of every mode.

    Args:
        sequences: the input of each mode (queries, keys, fibers), (B, h, N_n, p_n); lengths may differ.
        factors: from ``multilinear_factors``, (h, M_n, R_n).
        rows: sampled rows f(X) of the layer input, (B, h, M', p) with M' <= M: the data-dependent form, whose
            features are f(X) phi(x) (eq. 3-11 in index form: the sequence takes the place of C, linearly).
        grid: positions of ``rows`` in the sequence, (M',) int64; needed with ``rows`` when ``is_causal``.
        feature_map: phi, from ``kernel_attention.features``.
        attention_mask: (B, N), True = real token; or one per mode, (B, N_n) or None.
        is_causal: token i sees tokens 0..i only.
        with_grams: whether the objective will need Phi_n^T Phi_n.
        group: the processes that share every sequence; only with ``is_causal`` and without ``rows``.

    Raises:
        InputError: for ``rows`` with ``is_causal`` but without ``grid``, for a number of sequences or masks
            that is not the number of modes, or for a ``group`` where there is no shared form.
    """
    order = len(factors)
    masks = [attention_mask] * order if isinstance(attention_mask, Tensor | None) else list(attention_mask)
    if not len(sequences) == order == len(masks):
        raise InputError(
            f"sequences: {len(sequences)} of them and {len(masks)} attention_mask for {order} modes, "
            "expected one each"
        )
    if group is not None and (rows is not None or not is_causal):
        raise InputError("group: processes share the causal form without rows; see also multilinear_layer")
    if rows is not None:
        if is_causal and grid is None:
            raise InputError("grid=None: rows with is_causal=True need grid, the positions of the rows")
        rows = padded_rows(rows, factors[0])
    read = functools.partial(
        _modes, rows=rows, grid=grid, feature_map=feature_map, is_causal=is_causal, with_grams=with_grams,
        group=group,
    )  # fmt: skip
    # Modes of equal sizes are computed together.
    if alike(sequences) and alike(factors) and all(mask is masks[0] for mask in masks):
        return read(sequences, torch.stack(list(factors)), masks[0])
    parts = [read([s], f[None], mask) for s, f, mask in zip(sequences, factors, masks, strict=True)]
    grams = [gram for part in parts for gram in part.grams or ()]
    return Modes(
        [p.features[0] for p in parts], [p.projections[0] for p in parts], None, grams if with_grams else None
    )


def _modes(
    sequences: Sequence[Tensor],
    factors: Tensor,
    mask: Tensor | None,
    *,
    rows: Tensor | None,
    grid: Tensor | None,
    feature_map: FeatureMap,
    is_causal: bool,
    with_grams: bool,
    group: SequenceGroup | None,
) -> Modes:
    """Modes that read the same tokens, with ``factors`` (D, h, M, R)."""
    # Dividing the small projection by ||X||_F, one number per sequence and head, is cheaper than dividing
    # all features.
    norm_later = feature_map is frobenius and not is_causal
    if norm_later:
        features = list(sequences)
    elif group is not None and feature_map is frobenius:
        features = _shared_features(sequences, mask, group)
    else:
        features = [feature_map(sequence, mask, is_causal) for sequence in sequences]
    if rows is not None and is_causal:
        features = [phi @ rows.mT for phi in features]
    joined = torch.cat(features, dim=-1)
    unread = None if mask is None else ~mask[:, None, :, None]
    if rows is not None and is_causal and grid is not None:
        rank = torch.arange(joined.size(2), device=joined.device)[None] if mask is None else valid_ranks(mask)
        ahead = torch.nn.functional.pad(
            grid > rank[:, None, :, None], (0, rows.size(2) - grid.size(0)), value=True
        )
        ahead = ahead.repeat(1, 1, 1, len(features))
        unread = ahead if unread is None else unread | ahead
    if unread is not None:
        joined = joined.masked_fill(unread, 0.0)
    if norm_later:
        joined = balanced(joined, exactly(joined.detach()).abs().amax(dim=(-2, -1), keepdim=True))
    parts = list(joined.split(features[0].size(-1), dim=-1))
    with without_autocast(joined):
        exact = [exactly(part) for part in parts]
        grams = torch.stack([part.mT @ part for part in exact]) if with_grams else None
        if grams is not None and group is not None:
            grams = group.total(grams)
        energy = None
        if norm_later and grams is not None:
            energy = grams.diagonal(dim1=-2, dim2=-1).sum(-1)
        elif norm_later:
            energy = torch.stack([part.square().sum((-2, -1)) for part in exact])
        projections, grams = _sequence_projections(
            factors, grams, energy=energy, rows=rows, rows_in_features=is_causal
        )
    return Modes(parts, list(projections.unbind()), joined, None if grams is None else list(grams.unbind()))


def _shared_features(sequences: Sequence[Tensor], mask: Tensor | None, group: SequenceGroup) -> list[Tensor]:
    """The causal Frobenius features of this rank's part: its norms begin with those of the ranks before."""
    real = [exactly(zero_padding(sequence, mask)) for sequence in sequences]
    energy = torch.stack([sequence.square().sum(dim=(2, 3), keepdim=True) for sequence in real])
    pairs = zip(sequences, group.before(energy), strict=True)
    return [frobenius(sequence, mask, is_causal=True, before=before) for sequence, before in pairs]


def padded_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """A row of f(X) for every row of the weights; the last rows of a short sequence are zero."""
    return torch.nn.functional.pad(rows, (0, 0, 0, factor.size(1) - rows.size(2)))


def _sequence_projections(
    factors: Tensor,
    grams: Tensor | None,
    *,
    energy: Tensor | None,
    rows: Tensor | None,
    rows_in_features: bool,
) -> tuple[Tensor, Tensor | None]:
    """``factors`` (D, h, M, R) times what depends on the sequence: its norm and, if data-dependent, f(X).

    Args:
        factors: the factors of modes of equal size, stacked.
        grams: Gram matrices of the modes' features before normalisation, (D, B, h, p, p), or None.
        energy: ||X||_F^2 of the Frobenius feature map, (D, B, h); None: no division.
        rows: (B, h, M, p), or None.
        rows_in_features: whether the features are f(X) phi(x) already (causal).

    Returns:
        projections (D, B or 1, h, p, R) and the Gram matrices of ``Modes``.
    """
    projections = factors[:, None]
    if energy is not None:
        scale = inverse_norm(energy)[..., None, None]
        projections = projections * scale
        grams = None if grams is None else grams * scale.square()
    if rows is not None:
        rows = exactly(rows)
        if not rows_in_features:
            projections = rows.mT @ projections
        if grams is not None and not rows_in_features:
            normed = frobenius(rows)
            grams = normed @ grams @ normed.mT
        elif grams is not None:
            grams = grams * inverse_norm(rows.square().sum((-2, -1)))[..., None, None].square()
    return projections, grams


def multilinear_scores(
    sequences: Sequence[Tensor],
    weights: Sequence[Tensor],
    core: Tensor,
    *,
    compatibility: Tensor | None = None,
    rows: Tensor | None = None,
    grid: Tensor | None = None,
    feature_map: FeatureMap = frobenius,
    attention_mask: Masks = None,
    is_causal: bool = False,
) -> tuple[Tensor, ...]:
    """E_1..E_D of eq. 2-23, one per mode and each of its own length: (B, h, N_n, R_n).

    E_1[i, r] = sum over a, b, c, j, k of Phi_1[i, a] C[a, b, c] W_2[b, j] W_3[c, k] S[r, j, k], and so on
    round the modes. ``weights`` are (h, M_n, R_n), ``core`` (h, R_1..R_D), ``compatibility`` as in the
    module's legend; the other arguments are those of ``multilinear_modes``.
    """
    factors = multilinear_factors(weights, core, compatibility)
    return multilinear_modes(
        sequences,
        factors,
        rows=rows,
        grid=grid,
        feature_map=feature_map,
        attention_mask=attention_mask,
        is_causal=is_causal,
    ).scores()


def join_modes(modes: Modes, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """o_i = W_c [E_1 ; .. ; E_D] + b_c (eq. 3-7), (B, h, N, p); the weight is (p, R_1 + .. + R_D).

    W_c is multiplied into the projections first, so the scores are never formed.

    Raises:
        InputError: where the modes read different tokens: their scores cannot be joined token by token.
    """
    if modes.joined is None:
        raise InputError(
            "sequences: modes that read different tokens have scores of their own, but no joint output"
        )
    with without_autocast(weight):
        parts = exactly(weight).split([projection.size(-1) for projection in modes.projections], dim=-1)
        folded = [projection @ part.mT for projection, part in zip(modes.projections, parts, strict=True)]
        projection = torch.cat(folded, dim=-2)
    out = modes.joined @ projection.to(modes.joined.dtype)
    return out if bias is None else out + bias.to(out.dtype)


def multilinear_attention(
    sequences: Sequence[Tensor],
    weights: Sequence[Tensor],
    core: Tensor,
    w_out: Tensor,
    b_out: Tensor | None = None,
    *,
    compatibility: Tensor | None = None,
    rows: Tensor | None = None,
    grid: Tensor | None = None,
    feature_map: FeatureMap = frobenius,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Multilinear attention of one layer, heads apart: D sequences (B, h, N, p) -> (B, h, N, p).

    ``w_out`` (p, R_1 + .. + R_D) and ``b_out`` (p,) join the scores; the other arguments are those of
    ``multilinear_scores``. It takes O(N D p^2) time, plus the factors, which do not depend on the tokens.
    """
    modes = multilinear_modes(
        sequences,
        multilinear_factors(weights, core, compatibility),
        rows=rows,
        grid=grid,
        feature_map=feature_map,
        attention_mask=attention_mask,
        is_causal=is_causal,
    )
    return join_modes(modes, w_out, b_out)
