"""A whole multilinear layer through the Gram matrix of its input, where the feature maps are linear.

The Frobenius map divides by one number per sequence, so E_n is linear in the tokens: a token costs one (d, d)
product. Norms and Gram matrices of the modes follow from X^T X, one more. Source and legend as in
:mod:`kernel_attention.functional.multilinear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.functional.affine import Affine, autocast
from kernel_attention.functional.multilinear import padded_rows, sequence_projections
from kernel_attention.kernels.statistics import exactly
from kernel_attention.ops.sequence_group import SequenceGroup


def multilinear_layer(
    x: Tensor,
    modes: Sequence[Affine],
    factors: Sequence[Tensor],
    concat: Affine,
    out_proj: Affine,
    *,
    rows: Tensor | None = None,
    normalize: bool = True,
    key_padding_mask: Tensor | None = None,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, list[Tensor] | None]:
    """The layer's output and, where wanted, the modes' Gram matrices; not causal.

    The same numbers as :func:`multilinear_modes` and :func:`join_modes` between the projections, up to
    rounding, in O(N d^2) time and O(D d^3) per sequence.

    Args:
        x: (B, N, d).
        modes: projections to queries, keys and fibers, (d, d) each.
        factors: from :func:`multilinear_factors`, (h, M, R) each.
        concat: W_c (p, D R) and its bias, shared by the heads.
        out_proj: (d, d).
        rows: sampled rows f(X), (B, h, M', p): the data-dependent form.
        normalize: Frobenius feature map; False: identity.
        key_padding_mask: (B, N), True = real token.
        with_grams: whether the objective will need them.
        group: processes that hold the parts of every sequence; ``rows`` are those of the whole.

    Returns:
        y (B, N, d), and D tensors (B, h, M_n, M_n) as in :class:`Modes`, or None.
    """
    x = autocast(x)
    if key_padding_mask is not None:
        x = x.masked_fill(~key_padding_mask[..., None], 0.0)  # padding may hold anything, NaN included
    with torch.autocast(x.device.type, enabled=False):
        stacked = torch.stack([exactly(factor) for factor in factors])
        num_heads = stacked.size(1)
        weight = torch.stack([exactly(w).unflatten(0, (num_heads, -1)) for w, _ in modes])  # (D, h, p, d)
        bias = None
        if all(b is not None for _, b in modes):
            bias = torch.stack([exactly(b).unflatten(0, (num_heads, -1)) for _, b in modes if b is not None])
        grams, energy = None, None
        if with_grams or normalize:
            grams = _mode_grams(x, weight, bias, key_padding_mask)
            grams = grams if group is None else group.total(grams)
            energy = grams.diagonal(dim1=-2, dim2=-1).sum(-1) if normalize else None
        projections, grams = sequence_projections(
            stacked,
            grams if with_grams else None,
            energy=energy,
            rows=None if rows is None else padded_rows(rows, stacked[0]),
        )
        matrix, constant = _fold(projections, weight, bias, concat, out_proj)
        y = torch.baddbmm(constant.to(x.dtype), x, matrix.to(x.dtype).expand(x.size(0), -1, -1))
    return y, None if grams is None else list(grams.unbind())


def _mode_grams(x: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """(X W^T + 1 b^T)^T (X W^T + 1 b^T) over the real tokens, (D, B, h, p, p), from X^T X."""
    exact = exactly(x)
    gram = weight[:, None] @ (exact.mT @ exact)[:, None] @ weight.mT[:, None]
    if bias is None:
        return gram
    total = torch.einsum("bd,nhpd->nbhp", exact.sum(dim=1), weight)
    cross = total[..., :, None] * bias[:, None, :, None, :]
    count = x.size(1) if mask is None else mask.sum(dim=1).to(exact.dtype).view(1, -1, 1, 1, 1)
    return gram + cross + cross.mT + count * (bias[..., :, None] * bias[..., None, :])[:, None]


def _fold(
    projections: Tensor, weight: Tensor, bias: Tensor | None, concat: Affine, out_proj: Affine
) -> tuple[Tensor, Tensor]:
    """Everything that a token meets, multiplied together: (B or 1, d, d) and the constant (B or 1, 1, d)."""
    num_modes, num_heads = weight.shape[:2]
    join = exactly(concat[0]).unflatten(1, (num_modes, -1)).permute(1, 2, 0)[:, None, None]  # (D, 1, 1, R, p)
    out = exactly(out_proj[0]).mT.unflatten(0, (num_heads, -1))  # (h, p, d)
    maps = projections @ join @ out  # (D, B or 1, h, p, d)
    matrix = torch.einsum("nhpd,nbhpo->bdo", weight, maps)
    constant = maps.new_zeros(1, matrix.size(-1))
    if bias is not None:
        constant = constant + torch.einsum("nhp,nbhpo->bo", bias, maps)
    if concat[1] is not None:
        constant = constant + torch.einsum("p,hpo->o", exactly(concat[1]), out)
    if out_proj[1] is not None:
        constant = constant + exactly(out_proj[1])
    return matrix, constant[:, None]
