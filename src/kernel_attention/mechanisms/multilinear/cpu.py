"""Multilinear attention in PyTorch's operations: one product per token, with its gradients written out.

It runs on any device.

The feature maps are linear here: the Frobenius map divides by one number per sequence, so E_n is linear in
the tokens. There are J = D h modes over all heads. Each maps the tokens to X W_j^T + 1 l_j^T, divides by the
Frobenius norm, and multiplies by V_j. Together they give

    y = X M + 1 c^T,    M = sum_j s_j W_j^T V_j,    c = sum_j s_j V_j^T l_j,
    1 / s_j^2 = ||X W_j^T + 1 l_j^T||_F^2 = <X^T X, W_j^T W_j> + 2 <W_j X^T 1, l_j> + N ||l_j||^2.

A token costs one (d, d) product. A second one, X^T X, gives the norms and Gram matrices of the modes.
Cancellation in W_j x costs the square of the norm twice as many digits as the norm, and a common part of the
tokens would drown their differences in the squares. So X is centred. The levels l_j then hold the
contributions of the mean and of the biases to every token.

For short sequences the number of calls decides the time, and automatic differentiation makes three times as
many. So ``map_operator`` holds this product and its gradients, written out, as an operator of PyTorch.

Source as in ``kernel_attention.mechanisms.multilinear.functional``.

Legend: B batch, N tokens, d width, h heads, D modes, p width of a mode, B' = B, or 1 where all sequences
share V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.engine import Engine, Unsupported
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.multilinear.functional import padded_rows
from kernel_attention.mechanisms.multilinear.map_operator import modes_and_maps
from kernel_attention.tensors.affine import Affine, autocast
from kernel_attention.tensors.features.feature_maps import FeatureMap, balanced, frobenius, identity
from kernel_attention.tensors.sampling import Samples, part_positions, sample_rows
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, num_real, without_autocast


class MultilinearWeights(NamedTuple):
    """The parameters of a layer.

    ``modes`` are the projections to queries, keys and fibers, (d, d) each; ``factors`` those of
    ``multilinear_factors``, (h, M, R) each; ``concat`` is W_c (p, D R) with its bias; ``out_proj`` is (d, d).
    """

    modes: Sequence[Affine]
    factors: Sequence[Tensor]
    concat: Affine
    out_proj: Affine


class MultilinearCall(NamedTuple):
    """A call of multilinear attention, as its engines see it.

    Attributes:
        x: (B, N, d).
        weights: the layer's parameters; why they are not all that its projections compute with.
        embed_dim: d.
        num_heads: h.
        feature_map: phi.
        num_rows: rows M of f(X); 0: not the data-dependent form.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only.
        with_grams: whether the objective needs the Gram matrices.
        group: processes that hold the parts of every sequence. x and mask are those of this part.
    """

    x: Tensor
    weights: MultilinearWeights | Unsupported
    embed_dim: int
    num_heads: int
    feature_map: FeatureMap
    num_rows: int
    attention_mask: Tensor | None
    is_causal: bool
    with_grams: bool
    group: SequenceGroup | None

    def rows(self) -> Tensor | None:
        """f(X) of the whole sequence, sharded or not, (B, h, M', p)."""
        if not self.num_rows:
            return None
        if self.group is None:
            rows = sample_rows(self.x, self.num_rows, self.attention_mask)
        else:
            before, total = self.group.places(num_real(self.x, self.attention_mask))
            places = part_positions(self.x, self.num_rows, self.attention_mask, before, total)
            rows = self.group.total(exactly(Samples(*places).read(self.x)))
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


MultilinearResult = tuple[Tensor, list[Tensor] | None]
"""y (B, N, d), and D tensors (B, h, M_n, M_n) as in ``Modes``, or None."""


class OneProduct(Engine[MultilinearCall, MultilinearResult]):
    """One product per token."""

    name = "fused"
    shares_sequences = True

    def why_not(self, call: MultilinearCall, compiled: bool) -> Unsupported | None:
        """A reason for maps that are not frobenius or identity, and for causal calls."""
        if call.is_causal:
            return Unsupported("one product has no form with is_causal=True")
        if call.feature_map not in (frobenius, identity):
            return Unsupported("one product needs the feature map frobenius or identity")
        return call.weights if isinstance(call.weights, Unsupported) else None

    def pays_from(self, call: MultilinearCall, compiled: bool) -> int | None:
        """Measured on CPUs, where multiplying the weights out costs more than it saves below."""
        if call.x.device.type != "cpu":
            return None
        return (4 if compiled else 2) * call.embed_dim

    def attend(self, call: MultilinearCall) -> MultilinearResult:
        """``multilinear_layer``."""
        assert isinstance(call.weights, MultilinearWeights)
        return multilinear_layer(
            call.x, *call.weights, rows=call.rows(), normalize=call.feature_map is frobenius,
            attention_mask=call.attention_mask, with_grams=call.with_grams, group=call.group,
        )  # fmt: skip


FUSED = OneProduct()


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

    The results are those of ``multilinear_modes`` and ``join_modes`` between the projections, up to rounding.
    It takes O(N d^2) time, and O(D d^3) per sequence.

    Args:
        x: (B, N, d).
        modes: projections to queries, keys and fibers, (d, d) each.
        factors: from ``multilinear_factors``, (h, M, R) each.
        concat: W_c (p, D R) and its bias, shared by the heads.
        out_proj: (d, d).
        rows: sampled rows f(X), (B, h, M', p): the data-dependent form.
        normalize: Frobenius feature map; False: identity.
        attention_mask: (B, N), True = real token.
        with_grams: whether the objective needs the Gram matrices.
        group: processes that hold the parts of every sequence; ``rows`` are those of the whole sequence.

    Returns:
        y (B, N, d), and D tensors (B, h, M_n, M_n) as in ``Modes``, or None.
    """
    x = autocast(x)
    if attention_mask is not None:
        x = x.masked_fill(~attention_mask[..., None], 0.0)  # padding may hold any value, also NaN
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
        y, grams = modes_and_maps(
            centred, weight.unflatten(0, (num_modes, -1)), level, maps, constant, count,
            normalize=normalize, with_grams=with_grams, group=group,
        )  # fmt: skip
        if grams is None:
            return y, None
        grams = grams.unflatten(0, (len(modes), -1)).transpose(1, 2)  # (D, B, h, p, p)
        if rows is not None:
            normed = frobenius(rows)
            grams = normed @ grams @ normed.mT
        return y, list(grams.unbind())


def _middle(x: Tensor, mask: Tensor | None, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """The mean of the real tokens over all parts, (B, d) in float32 or better, and their number (B,).

    x (B, N, d) is zero at padded tokens. Differentiation takes the mean for a constant: the layer is the same
    function whatever is subtracted from the tokens and added to the levels.
    """
    with torch.no_grad():
        count, total = num_real(x, mask), x.sum(dim=1, dtype=accumulation_dtype(x.dtype))
        if group is not None:
            count, total = group.places(count)[1], group.total(total)
        return total / count.clamp_min(1)[:, None], count


def _size(centred: Tensor, level: Tensor, group: SequenceGroup | None) -> Tensor:
    """About the largest entry that enters the norms of a sequence, (B, 1, 1) in float32 or better."""
    with torch.no_grad():
        of_tokens, of_levels = (exactly(x).abs().amax(dim=(1, 2), keepdim=True) for x in (centred, level))
        return of_levels.maximum(of_tokens if group is None else group.total(of_tokens))


def _biases(modes: Sequence[Affine]) -> Tensor | None:
    """Every mode's bias, (D d,), or None."""
    biases = [exactly(bias) for _, bias in modes if bias is not None]
    return torch.cat(biases) if biases else None


def _after_features(projections: Tensor, concat: Affine, out_proj: Affine) -> tuple[Tensor, Tensor]:
    """The layer after the features of a mode: maps (B or 1, D h, p, d) and the constant (d,)."""
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
