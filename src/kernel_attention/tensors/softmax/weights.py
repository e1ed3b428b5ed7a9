"""The weights of softmax attention by their formula, for all queries or for a block of them.

Legend: B batch, h heads, N queries, S keys, p head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.tensors.recompute import only_formulas


def additive_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as a four-dimensional term of the logits: 0 where a key is seen and -inf elsewhere."""
    if mask is None:
        return None
    return (
        torch.zeros((), dtype=q.dtype, device=q.device)
        .masked_fill(~mask, -torch.inf)
        .expand(*(1,) * (4 - mask.dim()), *mask.shape)
    )


def every_query_sees_a_key(mask: Tensor | None, is_causal: bool) -> bool:
    """True where that is certain; it reads the values of a mask from ``additive_mask``."""
    if mask is None:
        return True
    best = mask[..., 0] if is_causal else mask.amax(dim=-1)
    return bool((best > -torch.inf).all())


def logit_gradients(weights: Tensor, d_weights: Tensor) -> Tensor:
    """The gradient of the logits from that of the weights of their softmax, which is overwritten."""
    d_weights -= (weights * d_weights).sum(dim=-1, keepdim=True)
    return d_weights.mul_(weights)


def softmax_weights(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    start: int = 0,
    *,
    all_see: bool = False,
) -> Tensor:
    """softmax(q k^T + mask), differentiable.

    Args:
        queries: scaled queries, (B, h, N, p).
        keys: (B, h, S, p).
        mask: from ``additive_mask``; broadcasts to (B, h, N, S).
        is_causal: query i sees keys 0..i only.
        start: position of the first query.
        all_see: whether ``every_query_sees_a_key``. It saves three passes over the weights.

    Returns:
        (B, h, N, S). A query that sees no key has zeros.
    """
    logits = queries @ keys.mT
    # In place, but for torch.func: a vmap over the masks alone needs more room, a linearisation a new tensor.
    is_new = only_formulas() is not None
    add, fill = (Tensor.add, Tensor.masked_fill) if is_new else (Tensor.add_, Tensor.masked_fill_)
    if mask is not None:
        logits = add(logits, mask)
    if is_causal:
        position = torch.arange(start, start + logits.size(2), device=logits.device)
        future = torch.arange(logits.size(3), device=logits.device) > position[:, None]
        logits = fill(logits, future, -torch.inf)
    if mask is None or all_see:
        return logits.softmax(dim=-1)
    # A query that sees no key has no softmax. Its weights are zero, and so are their gradients.
    unseen = logits.detach().amax(dim=-1, keepdim=True) == -torch.inf
    return fill(logits, unseen, 0.0).softmax(dim=-1).masked_fill(unseen, 0.0)
