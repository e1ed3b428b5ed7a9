"""Primal attention with values: the rank-s model of a kernel, applied to the tokens' values.

Primal-Attention's scores are the features of a low-rank model of its kernel, K = E Lambda R^T (theorem 3.2:
at the kernel SVD it is the best one). Its output joins the scores themselves, so that tokens meet only in a
few sampled rows. Here the model weighs values, o_i = sum_j kappa(x_i, x_j) v_j, at the cost of linear
attention with s features. The nested objective draws the model to the kernel's own SVD.

A mean of n values with signed weights shrinks as n grows, so that it hardly counts beside a residual stream.
The output of every head is therefore scaled to one size, as in the retention of Sun et al. 2023 ("Retentive
Network") and the NormAttention of Qin et al. 2022 ("The Devil in Linear Transformer"). The other
normalisations are options.

Legend: B batch, h heads, N queries, S keys, p head width, m features of phi, s rank.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.regression.functional import ridge_attention
from kernel_attention.tensors.features.feature_maps import identity
from kernel_attention.tensors.statistics import divide

Readout = Literal["correlation", "ridge", "twicing"]
"""How a low-rank kernel weighs values: as it is, by ridge regression on its features, or 2 A - A^2."""


def primal_value_attention(
    scores: PrimalScores,
    v: Tensor,
    sqrt_lambda: Tensor | None = None,
    *,
    readout: Readout = "correlation",
    lam: Tensor | float = 1.0,
    features: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    group: SequenceGroup | None = None,
) -> Tensor:
    """sum_j (e_i . Lambda r_j) v_j over the n real keys that query i sees, divided by n; O(N s p) time.

    The weights take both signs, so their own sum may vanish and does not divide them. The row sums of phi's
    kernel, whose model the weights are, do with ``features``. That is A v, A the matrix of the weights.

    The other readouts are filters of the kernel's spectrum. "ridge" is the ridge regression of the values on
    the keys' scores, E Lambda^1/2 (Lambda^1/2 R^T R Lambda^1/2 + lambda I)^-1 Lambda^1/2 R^T v, which
    nothing divides: sigma / (sigma + lambda) for sigma. "twicing" adds what A left over, A v + A (v - A v):
    2 sigma - sigma^2.

    Args:
        scores: e (B, h, N, s) of the queries and r (B, h, S, s) of the keys.
        v: values, (B, h, S, p).
        sqrt_lambda: square root of Lambda's diagonal, (h, s); None: Lambda is 1, or part of the scores.
        readout: which of them. "twicing" needs as many queries as keys, those of the same tokens.
        lam: lambda of "ridge", a number or (h,).
        features: phi of the queries (B, h, N, m) and of the keys (B, h, S, m), whose kernel is never
            negative: sum_j phi(q_i) . phi(k_j) divides in the place of n.
        attention_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only.
        group: processes that hold the parts of every sequence; the arguments are this part's.

    Returns:
        (B, h, N, p). A query that sees no key gets zeros.
    """
    e, r = scores
    if sqrt_lambda is not None:
        root = sqrt_lambda[:, None, :].to(v.dtype)
        e, r = e * root, r * root
    options: dict[str, Any] = {
        "feature_map": identity, "normalize": False, "attention_mask": attention_mask,
        "is_causal": is_causal, "group": group,
    }  # fmt: skip
    if readout == "ridge":
        del options["normalize"]
        return ridge_attention(e, r, v, lam, **options)
    if features is not None:
        total = linear_attention(*features, torch.ones_like(v[..., :1]), **options)
    else:
        total = _seen_keys(v, attention_mask, is_causal, group).clamp_min(1).to(v.dtype)

    def weighted(values: Tensor) -> Tensor:
        out = linear_attention(e, r, values, **options)
        return divide(out, total) if features is not None else out / total.to(out.dtype)

    once = weighted(v)
    return once if readout == "correlation" else 2 * once - weighted(once)


def _seen_keys(
    v: Tensor, attention_mask: Tensor | None, is_causal: bool, group: SequenceGroup | None
) -> Tensor:
    """How many real keys each query sees, (B or 1, 1, S or 1, 1)."""
    real = torch.ones(1, v.size(2), dtype=torch.bool, device=v.device)
    real = real if attention_mask is None else attention_mask
    counts = real.cumsum(dim=1) if is_causal else real.sum(dim=1, keepdim=True)
    if group is not None:
        before, total = group.places(real.sum(dim=1).expand(v.size(0)))
        counts = before[:, None] + counts if is_causal else total[:, None]
    return counts[:, None, :, None]
