"""A whole multilinear layer through the Gram matrix of its input, where the feature maps are linear.

The Frobenius map divides by one number per sequence, so E_n is linear in the tokens: a token costs one (d, d)
product. Norms and Gram matrices of the modes follow from X^T X, one more, where X is centred: what the tokens
have in common would drown their differences in the squares. Source and legend as in
``kernel_attention.mechanisms.multilinear.functional``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.features.feature_maps import balanced, frobenius
from kernel_attention.mechanisms.multilinear.functional import padded_rows
from kernel_attention.mechanisms.multilinear.fused import multilinear_pass
from kernel_attention.tensors.affine import Affine, autocast
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, num_real, without_autocast


def multilinear_layer(
    x: Tensor,
    modes: Sequence[Affine],
    factors: Sequence[Tensor],
    concat: Affine,
    out_proj: Affine,
    *,
    rows: Tensor | None = None,
    normalize: bool = True,
    attention_mask: Tensor | None = None,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, list[Tensor] | None]:
    """The layer's output and, where wanted, the modes' Gram matrices; not causal.

    The same numbers as ``multilinear_modes`` and ``join_modes`` between the projections, up to
    rounding, in O(N d^2) time and O(D d^3) per sequence.

    Args:
        x: (B, N, d).
        modes: projections to queries, keys and fibers, (d, d) each.
        factors: from ``multilinear_factors``, (h, M, R) each.
        concat: W_c (p, D R) and its bias, shared by the heads.
        out_proj: (d, d).
        rows: sampled rows f(X), (B, h, M', p): the data-dependent form.
        normalize: Frobenius feature map; False: identity.
        attention_mask: (B, N), True = real token.
        with_grams: whether the objective will need them.
        group: processes that hold the parts of every sequence; ``rows`` are those of the whole.

    Returns:
        y (B, N, d), and D tensors (B, h, M_n, M_n) as in ``Modes``, or None.
    """
    x = autocast(x)
    if attention_mask is not None:
        x = x.masked_fill(~attention_mask[..., None], 0.0)  # padding may hold anything, NaN included
    with without_autocast(x):
        projections = torch.stack([exactly(factor) for factor in factors])[:, None]  # (D, 1, h, M, R)
        num_modes = len(modes) * projections.size(2)
        weight = torch.cat([exactly(matrix) for matrix, _ in modes])  # (D h p, d)
        if rows is not None:
            rows = exactly(padded_rows(rows, projections[0, 0]))
            projections = rows.mT @ projections
        maps, constant = _after_features(projections, concat, out_proj)
        middle, count = _middle(x, attention_mask, group)
        centred = (x - middle[:, None]).to(x.dtype)
        if attention_mask is not None:
            centred = centred.masked_fill(~attention_mask[..., None], 0.0)
        level = torch.nn.functional.linear(middle, weight, _biases(modes)).unflatten(1, (num_modes, -1))
        if normalize:
            size = _size(centred, level, group)
            centred, level = balanced(centred, size), balanced(level, size)
        y, grams = multilinear_pass(
            centred, weight.unflatten(0, (num_modes, -1)), level, maps, constant, count, normalize=normalize,
            with_grams=with_grams, group=group,
        )  # fmt: skip
        if grams is None:
            return y, None
        grams = grams.unflatten(0, (len(modes), -1)).transpose(1, 2)  # (D, B, h, p, p)
        if rows is not None:
            normed = frobenius(rows)
            grams = normed @ grams @ normed.mT
        return y, list(grams.unbind())


def _middle(x: Tensor, mask: Tensor | None, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """Mean of the real tokens of x (B, N, d), zero at padded ones: (B, d) in float32 or better, and their
    number (B,); over all parts.

    The mean is a constant to differentiation: the layer is the same function whatever is subtracted from the
    tokens and added to the levels.
    """
    with torch.no_grad():
        count, total = num_real(x, mask), x.sum(dim=1, dtype=accumulation_dtype(x.dtype))
        if group is not None:
            count, total = group.places(count)[1], group.total(total)
        return total / count.clamp_min(1)[:, None], count


def _size(centred: Tensor, level: Tensor, group: SequenceGroup | None) -> Tensor:
    """About the largest entry of what goes into a sequence's norms, (B, 1, 1) in float32 or better."""
    with torch.no_grad():
        of_tokens, of_levels = (exactly(x).abs().amax(dim=(1, 2), keepdim=True) for x in (centred, level))
        return of_levels.maximum(of_tokens if group is None else group.total(of_tokens))


def _biases(modes: Sequence[Affine]) -> Tensor | None:
    """Every mode's bias, (D d,), or None."""
    biases = [exactly(bias) for _, bias in modes if bias is not None]
    return torch.cat(biases) if biases else None


def _after_features(projections: Tensor, concat: Affine, out_proj: Affine) -> tuple[Tensor, Tensor]:
    """All that follows a mode's features: maps (B or 1, D h, p, d) and the constant (d,)."""
    join = exactly(concat[0]).unflatten(1, (projections.size(0), -1)).permute(1, 2, 0)  # (D, R, p)
    out = exactly(out_proj[0]).mT.unflatten(0, (projections.size(2), -1))  # (h, p, d)
    joined = (projections.flatten(1, 3) @ join).unflatten(1, projections.shape[1:4])
    joined = joined.permute(2, 1, 0, 3, 4)  # (h, B or 1, D, p, p)
    maps = (joined.flatten(1, 3) @ out).unflatten(1, joined.shape[1:4])
    maps = maps.permute(1, 2, 0, 3, 4).flatten(1, 2)
    constant = out.new_zeros(out.size(-1)) if out_proj[1] is None else exactly(out_proj[1])
    if concat[1] is not None:
        constant = constant + exactly(concat[1]).expand(out.size(0), -1).flatten() @ out.flatten(0, 1)
    return maps, constant
