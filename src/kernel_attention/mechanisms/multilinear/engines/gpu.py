"""Multilinear attention in few launches, for accelerators, where each costs 5 to 10 us whatever it computes.

All modes come from one product and are normalised together. Factors and concat map are multiplied out to the
maps V_n, so that a head's output is one product too, and the Gram matrices of all modes are another.

Legend: B batch, N tokens, h heads, D modes, p head width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.tensors.affine import Affine
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, frobenius, identity
from kernel_attention.tensors.statistics import exactly, without_autocast
from kernel_attention.tensors.unit_rows import unit_by_head


def has_joint_modes(feature_map: FeatureMap) -> bool:
    """True for the feature maps that this form has."""
    return feature_map in (cosine, frobenius, identity)


def multilinear_launches(
    z: Tensor,
    factors: Sequence[Tensor],
    concat: Affine,
    *,
    feature_map: FeatureMap,
    attention_mask: Tensor | None,
    with_grams: bool,
) -> tuple[Tensor, list[Tensor] | None]:
    """The heads' outputs side by side, (B, N, d), and Gram matrices as in ``Modes``, or None; not causal.

    Args:
        z: queries, keys and fibers, (B, N, D, h, p).
        factors: from ``multilinear_factors``, D tensors (h, p, R).
        concat: W_c (p, D R) and its bias, shared by the heads.
        feature_map: phi, one that ``has_joint_modes``.
        attention_mask: (B, N), True = real token.
        with_grams: whether the objective needs the Gram matrices.
    """
    batch, length, order, heads, size = z.shape
    if attention_mask is not None:
        z = z.masked_fill(~attention_mask[..., None, None, None], 0.0)
    with without_autocast(z):
        dims: tuple[int, ...] | None = None
        if feature_map in (cosine, frobenius):
            dims = (4,) if feature_map is cosine else (1, 4)
        features = unit_by_head(z, dims)  # (h, B, N, D, p)
        weight = exactly(concat[0]).unflatten(1, (order, -1)).permute(1, 2, 0)  # (D, R, p)
        stacked = torch.stack(list(factors)).flatten(1, 2)  # (D, h p, R)
        maps = torch.bmm(stacked, weight).unflatten(1, (heads, size)).transpose(0, 1)
        flat = features.flatten(3), maps.reshape(heads, order * size, size).to(z.dtype)
        rows = flat[0].flatten(1, 2)
        out = (
            torch.bmm(rows, flat[1])
            if concat[1] is None
            else torch.baddbmm(concat[1].to(z.dtype), rows, flat[1])
        )
        out = out.view(heads, batch, length, size).permute(1, 2, 0, 3).flatten(2)
        if not with_grams:
            return out, None
        exact = exactly(flat[0].flatten(0, 1))
        grams = torch.bmm(exact.mT, exact).view(heads, batch, order, size, order, size)
        grams = grams.diagonal(dim1=2, dim2=4).permute(4, 1, 0, 2, 3)  # (D, B, h, p, p)
        return out, list(grams.unbind())
