"""How well a primal layer with values models the kernel attention of its own feature map.

The layer weighs values by E Lambda R^T, a model of rank s of K = phi(Q) phi(K)^T. Here its distance from K
and from the attention by K itself stands beside the least that rank s allows, that of the truncated SVD.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.nested_objective.functional import KernelGrams, kernel_grams
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal_values import PrimalValueAttention, primal_value_attention
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.statistics import exactly, smallest


class KernelModelErrors(NamedTuple):
    """Relative errors of every sequence, (B,) each.

    ``kernel`` is ||K - a E Lambda R^T|| / ||K|| (Frobenius; root mean square over the heads), with the best
    factor a where the layer scales its outputs, which no factor changes, and a = 1 elsewhere. ``least`` is
    that of the truncated SVD of K, below which no model of rank s falls. ``output`` is ||Y - Y'|| / ||Y'||
    over the real tokens, with Y' the heads' outputs where K itself weighs the values.
    """

    kernel: Tensor
    least: Tensor
    output: Tensor


@torch.no_grad()
def kernel_model_errors(
    layer: PrimalValueAttention,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> KernelModelErrors:
    """The errors of a layer's model of its kernel on inputs x, (B, N, d); O(N m^2) time for m features.

    ``kernel`` and ``least`` are those of the whole sequence, in the causal form too, as the objective is.

    Args:
        layer: in either mode; nothing in it changes.
        x: inputs, (B, N, d).
        attention_mask: (B, N), True = real token; right padding where ``is_causal``.
        is_causal: whether ``output`` is that of the causal form.
    """
    kernel = layer.kernel
    q, k = layer.queries_and_keys(x, x)
    grams = kernel_grams(
        q, k, feature_map=kernel.feature_map, query_mask=attention_mask, attention_mask=attention_mask,
        normalize=kernel.by_row_sums,
    )  # fmt: skip
    values = torch.linalg.svdvals(_root(grams.queries) @ _root(grams.keys))  # of K, but for zeros
    shares = values.square()[..., layer.rank :].sum(dim=-1) / _nonzero(values.square().sum(dim=-1))

    v = layer.split_heads(layer.v_proj(x))
    options: dict[str, Any] = {"attention_mask": attention_mask, "is_causal": is_causal}
    phi_q, phi_k = (kernel.feature_map(part, None, True) for part in (q, k))
    exact = primal_value_attention(
        PrimalScores(phi_q, phi_k), v,
        features=(phi_q, phi_k) if kernel.by_row_sums else None, **options,
    )  # fmt: skip
    both = [
        zero_padding(layer.scale_heads(heads), attention_mask)
        for heads in (kernel(q, k, v, **options), exact)
    ]
    found, wanted = (exactly(heads).flatten(1) for heads in both)
    output = (found - wanted).norm(dim=1) / _nonzero(wanted.norm(dim=1))
    squares = _model_errors(layer, grams)
    return KernelModelErrors(squares.mean(dim=1).sqrt(), shares.mean(dim=1).sqrt(), output)


def _model_errors(layer: PrimalValueAttention, grams: KernelGrams) -> Tensor:
    """||K - a f g^T||^2 / ||K||^2, (B, h)."""
    kernel = layer.kernel
    root = exactly(kernel.sqrt_lambda)[:, None]
    left, right = exactly(kernel.w_e) * root, exactly(kernel.w_r) * root
    crossed = ((grams.queries @ left) * (grams.keys @ right)).sum(dim=(-2, -1))  # <f g^T, K>
    own = ((left.mT @ grams.queries @ left) * (right.mT @ grams.keys @ right)).sum(dim=(-2, -1))
    whole = _nonzero((grams.queries * grams.keys).sum(dim=(-2, -1)))
    factor = crossed / _nonzero(own) if layer.normalize == "output" else torch.ones_like(own)
    return (1 - (2 * factor * crossed - factor.square() * own) / whole).clamp_min(0.0)


def _root(gram: Tensor) -> Tensor:
    """C^(1/2) of positive semidefinite matrices."""
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp_min(0.0).sqrt()[..., None, :]) @ vectors.mT


def _nonzero(x: Tensor) -> Tensor:
    return x.clamp_min(smallest(x.dtype))
