"""Padding, batches and packing change nothing for the real tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import auxiliary_loss, collect_objectives
from kernel_attention.testing.battery import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    LENGTHS,
    Subject,
    check,
    close,
    inputs,
    masks,
    objective,
    required,
    right_padding,
)


def _with_garbage(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[..., None], x, 1e4 * torch.randn_like(x))


@check("any length")
def a_padded_batch_gives_each_sequence_its_own_output(case: Subject) -> None:
    layer, x = case.build(), inputs()
    for mask in masks():
        for form in case.call_forms():
            y = layer(_with_garbage(x, mask), attention_mask=mask, **form)
            for b in range(BATCH):
                close(y[b, mask[b]], layer(x[b, mask[b]][None], **form)[0])


@check("any length")
def a_padded_batch_has_the_mean_objective_of_its_sequences(case: Subject) -> None:
    layer, x = case.build(), inputs()
    layer(x)
    if objective(layer) is None:
        return
    for mask in masks():
        for form in case.call_forms():
            layer(_with_garbage(x, mask), attention_mask=mask, **form)
            together, alone = required(objective(layer)), []
            for b in range(BATCH):
                layer(x[b, mask[b]][None], **form)
                alone.append(required(objective(layer)))
            if together.dim() == 1:  # every sequence has its own
                close(together, torch.cat(alone))
                continue
            weight = mask.sum(1) if case.objective_over == "tokens" else torch.ones(BATCH)
            close(together, (torch.stack(alone) * weight).sum() / weight.sum())


@check()
def the_content_of_the_padding_changes_neither_outputs_nor_gradients(case: Subject) -> None:
    layer, x = case.build(), inputs()
    for mask in masks():
        for form in case.call_forms():
            results = []
            for content in (x, _with_garbage(x, mask), x.masked_fill(~mask[..., None], 0.0)):
                leaf = content.clone().requires_grad_()
                layer.zero_grad()
                y = layer(leaf, attention_mask=mask, **form)
                (y[mask].square().sum() + auxiliary_loss(layer)).backward()
                grad = required(leaf.grad)
                assert not grad[~mask].any(), "gradients flow into the padding"
                results.append([y[mask], grad[mask], *(p.grad for p in layer.parameters())])
            for other in results[1:]:
                close(other, results[0])


@check()
def a_full_mask_is_no_mask(case: Subject) -> None:
    layer, x = case.build(), inputs()
    full = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    for form in case.call_forms():
        close(layer(x, attention_mask=full, **form), layer(x, **form))


@check()
def an_empty_sequence_disturbs_nobody(case: Subject) -> None:
    x, mask = inputs().requires_grad_(), right_padding().clone()
    mask[2] = False
    rest = torch.arange(BATCH) != 2
    for form in case.call_forms():
        layer = case.build()
        with collect_objectives() as objectives:
            y = layer(x, attention_mask=mask, **form)
        close(y[rest], layer(x[rest], attention_mask=mask[rest], **form))
        (y[mask].sum() + objectives.total()).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in (x, *layer.parameters()))


@check()
def a_sequence_does_not_depend_on_its_batch(case: Subject) -> None:
    layer, x, mask = case.build(), inputs(), right_padding()
    order = torch.randperm(BATCH)
    for form in case.call_forms():
        with collect_objectives() as before:
            y = layer(x, attention_mask=mask, **form)
        with collect_objectives() as after:
            close(layer(x[order], attention_mask=mask[order], **form), y[order])
        close(after.total(), before.total())
        for b in range(BATCH):
            alone = layer(x[b : b + 1], attention_mask=mask[b : b + 1], **form)
            close(alone[:, : LENGTHS[b]], y[b : b + 1, : LENGTHS[b]])


@check()
def tokens_mix_as_the_table_says(case: Subject) -> None:
    if case.mixes_tokens not in ("yes", "no"):
        return
    layer, x = case.build(), inputs()
    y = layer(x)
    x[:, 3] = torch.randn(BATCH, EMBED_DIM)
    changed = (layer(x) - y).abs().amax(dim=(0, 2)) > 1e-9
    assert changed[3], "a token does not change its own output"
    mixes = bool(changed[torch.arange(LENGTH) != 3].any())
    assert mixes == (case.mixes_tokens == "yes"), f"mixes_tokens={case.mixes_tokens!r}, tokens mix: {mixes}"


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
