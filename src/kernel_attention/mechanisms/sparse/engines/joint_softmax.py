"""One softmax over the two parts of a sparse pattern, and the query's own key where the form is causal."""

from __future__ import annotations

import torch
from torch import Tensor


def joint_softmax(
    logits: list[Tensor], allowed: list[Tensor], own: tuple[Tensor, Tensor] | None, dropout_p: float
) -> tuple[Tensor, ...]:
    """One softmax over all parts, (..., keys) each, in parts again; the query's own key is last."""
    # Not -inf: rows of padded queries may be empty and must stay finite.
    smallest = torch.finfo(logits[0].dtype).min
    parts = [part.masked_fill(~may, smallest) for part, may in zip(logits, allowed, strict=True)]
    parts += [] if own is None else [own[0]]
    weights = torch.cat(parts, dim=-1).softmax(dim=-1).to(logits[0].dtype)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    return weights.split([part.size(-1) for part in parts], dim=-1)


def finished(
    out: Tensor, weights: tuple[Tensor, ...], allowed: list[Tensor], own: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The output with the query's own value, (..., p); without one, zeros where no key is seen."""
    if own is not None:
        return out + weights[2] * own[1]
    first, second = (part.any(dim=-1, keepdim=True) for part in allowed)
    return out.masked_fill(~(first | second), 0.0)
