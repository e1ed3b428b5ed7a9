"""Primal attention with values in few launches, for accelerators; not causal.

Legend: B batch, N tokens, h heads, p head width, s rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.tensors.affine import wide
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, identity
from kernel_attention.tensors.statistics import without_autocast
from kernel_attention.tensors.unit_rows import unit_by_head


def has_value_form(feature_map: FeatureMap) -> bool:
    """True for the feature maps that this form has."""
    return feature_map in (cosine, identity)


def primal_values_launches(
    z: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    sqrt_lambda: Tensor,
    *,
    feature_map: FeatureMap,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads' outputs and the features of queries and keys, (B, h, N, p) each, by heads in memory.

    Args:
        z: queries, keys and values, (B, N, 3, h, p).
        w_e: (h, p, s).
        w_r: (h, p, s).
        sqrt_lambda: (h, s).
        feature_map: phi, one that ``has_value_form``.
        attention_mask: (B, N), True = real token.
    """
    z = wide(z)
    batch, length, _, heads, size = z.shape
    with without_autocast(z):
        both, values = z.split([2, 1], dim=2)
        features = unit_by_head(both, (4,) if feature_map is cosine else None)
        phi_q, phi_k = features.unbind(3)  # (h, B, N, p)
        if attention_mask is not None:
            phi_k = phi_k.masked_fill(~attention_mask[..., None], 0.0)
        # Lambda costs less on the weights than on the scores of every token.
        scale = sqrt_lambda.to(z.dtype).square()[:, None]
        scale = scale if attention_mask is not None else scale / length
        e = torch.bmm(phi_q.flatten(1, 2), w_e.to(z.dtype))
        r = torch.bmm(phi_k.flatten(1, 2), w_r.to(z.dtype) * scale)
        e, r = (x.view(heads * batch, length, -1) for x in (e, r))
        v = values.squeeze(2).permute(2, 0, 1, 3).reshape(heads * batch, length, size)
        out = torch.bmm(e, torch.bmm(r.mT, v)).view(heads, batch, length, size)
        if attention_mask is not None:
            out = out / attention_mask.sum(dim=1).clamp_min(1)[:, None, None].to(out.dtype)
    return out.transpose(0, 1), phi_q.transpose(0, 1), phi_k.transpose(0, 1)
