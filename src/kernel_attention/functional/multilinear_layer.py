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
from kernel_attention.kernels.feature_maps import inverse_norm
from kernel_attention.kernels.statistics import exactly, num_real
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
        weight = _side_by_side(modes, stacked.size(1))
        grams, energy = None, None
        if with_grams or normalize:
            right = _times_gram(x, weight, key_padding_mask)
            grams = _reduced(_mode_grams(weight, right, len(modes)), group) if with_grams else None
            if normalize:
                energy = (
                    _reduced(_mode_energies(weight, right, len(modes)), group)
                    if grams is None
                    else grams.diagonal(dim1=-2, dim2=-1).sum(-1)
                )
        if rows is not None:
            rows = padded_rows(rows, stacked[0])
        scale = None
        if (
            rows is None and energy is not None
        ):  # one number per mode and head: it can wait for the last product
            scale = inverse_norm(energy)
            grams = None if grams is None else grams * scale[..., None, None].square()
            projections = stacked[:, None]
        else:
            projections, grams = sequence_projections(stacked, grams, energy=energy, rows=rows)
        matrix, constant = _fold(projections, scale, weight, concat, out_proj)
        y = torch.baddbmm(constant.to(x.dtype), x, matrix.to(x.dtype).expand(x.size(0), -1, -1))
    return y, None if grams is None else list(grams.unbind())


def _side_by_side(modes: Sequence[Affine], num_heads: int) -> Tensor:
    """Every mode's and head's projection, (D h, p, d), or (.., d + 1) with the biases in the last column."""
    weight = torch.cat([exactly(matrix) for matrix, _ in modes])
    biases = [exactly(bias) for _, bias in modes if bias is not None]
    if biases:
        weight = torch.cat([weight, torch.cat(biases)[:, None]], dim=1)
    return weight.unflatten(0, (len(modes) * num_heads, -1))


def _times_gram(x: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """X^T X times all projections, (B, d, D h, p); with biases, X has a column of ones."""
    exact = exactly(x)
    gram = exact.mT @ exact
    if weight.size(-1) > x.size(-1):
        total = exact.sum(dim=1)
        count = num_real(x, mask).to(exact.dtype)[:, None]
        gram = torch.cat([gram, total[:, None]], dim=1)
        gram = torch.cat([gram, torch.cat([total, count], dim=1)[..., None]], dim=2)
    flat = gram.flatten(0, 1) @ weight.flatten(0, 1).mT
    return flat.unflatten(0, gram.shape[:2]).unflatten(-1, weight.shape[:2])


def _mode_grams(weight: Tensor, right: Tensor, order: int) -> Tensor:
    """Gram matrices of the modes, (D, B, h, p, p)."""
    grams = weight @ right.permute(2, 1, 0, 3).flatten(2)  # (D h, p, B p)
    grams = grams.unflatten(-1, (right.size(0), -1)).unflatten(0, (order, -1))
    return grams.permute(0, 3, 1, 2, 4)


def _mode_energies(weight: Tensor, right: Tensor, order: int) -> Tensor:
    """Their traces, (D, B, h)."""
    energies = (right * weight.permute(2, 0, 1)).sum(dim=(1, 3))
    return energies.unflatten(-1, (order, -1)).transpose(0, 1)


def _reduced(x: Tensor, group: SequenceGroup | None) -> Tensor:
    return x if group is None else group.total(x)


def _fold(
    projections: Tensor, scale: Tensor | None, weight: Tensor, concat: Affine, out_proj: Affine
) -> tuple[Tensor, Tensor]:
    """Everything that a token meets, multiplied together: (B or 1, d, d) and the constant (B or 1, 1, d)."""
    num_modes, _, num_heads = projections.shape[:3]
    join = exactly(concat[0]).unflatten(1, (num_modes, -1)).permute(1, 2, 0)  # (D, R, p)
    out = exactly(out_proj[0]).mT.unflatten(0, (num_heads, -1))  # (h, p, d)
    joined = (projections.flatten(1, 3) @ join).unflatten(1, projections.shape[1:4])  # (D, B or 1, h, p, p)
    if scale is None:
        maps = (joined @ out).transpose(0, 1).flatten(1, 3)  # (B or 1, D h p, d)
        matrix = weight.flatten(0, 1).mT @ maps
    else:
        own = weight.mT @ (joined[:, 0] @ out).flatten(0, 1)  # (D h, d, d)
        matrix = (scale.transpose(0, 1).flatten(1) @ own.flatten(1)).unflatten(-1, own.shape[1:])
    width = out.size(-1)
    constant = matrix[:, matrix.size(1) - 1 :] if weight.size(-1) > width else matrix.new_zeros(1, 1, width)
    if concat[1] is not None:
        constant = constant + (exactly(concat[1]).expand(num_heads, -1).flatten() @ out.flatten(0, 1))
    if out_proj[1] is not None:
        constant = constant + exactly(out_proj[1])
    return matrix[:, :width], constant
