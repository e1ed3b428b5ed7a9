"""Sequences end to end in one row have the outputs, objectives and gradients that they have alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.testing.battery import check, close, required
from kernel_attention.testing.subjects import Subject, inputs, objective

_LENGTHS = (7, 1, 5)


def _results(layer: AttentionLayer, x: Tensor, weight: Tensor, **call: Any) -> tuple[Any, ...]:
    """The outputs of x (1, N, d), J, and the gradients of their sum, each J times its weight."""
    x = x.clone().requires_grad_()
    y, leaves = layer(x, **call), [x, *layer.parameters()]
    found, total = objective(layer), y.square().sum()
    if found is not None:
        total = total + (found * weight).sum()
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    zeroed = (
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)
    )
    return y, found, *zeroed


@check("packing")
def packed_sequences_have_what_they_have_alone(case: Subject) -> None:
    layer, x = case.build(), inputs(batch=1, length=sum(_LENGTHS))
    boundaries = torch.tensor((0, *_LENGTHS)).cumsum(dim=0)
    over_tokens = case.objective_over == "tokens"
    weights = torch.tensor(_LENGTHS if over_tokens else [1] * len(_LENGTHS)).double()
    weights = weights / weights.sum()
    for form in case.call_forms():
        alone = [
            _results(layer, part, weight, **form)
            for part, weight in zip(x.split(_LENGTHS, dim=1), weights, strict=True)
        ]
        outputs, objectives, dx, *dw = zip(*alone, strict=True)
        has_each = objectives[0] is not None and objectives[0].dim() == 1
        weight = weights if has_each else torch.ones(())
        y, found, dx_packed, *dw_packed = _results(layer, x, weight, cu_seqlens=boundaries, **form)
        close(y, torch.cat(outputs, dim=1))
        close(dx_packed, torch.cat(dx, dim=1))
        for together, each in zip(dw_packed, dw, strict=True):
            close(together, sum(each))
        if has_each:
            close(found, torch.cat(objectives))
        elif objectives[0] is not None:
            close(required(found), (torch.stack(objectives) * weights).sum())
