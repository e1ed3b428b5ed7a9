"""Padding, batches, packing and the future change nothing, and decoding equals the parallel causal form."""

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import reorder
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import auxiliary_loss, collect_objectives
from kernel_attention.testing.battery import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    LENGTHS,
    PROMPTS,
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


@check("causal")
def the_future_changes_no_bit_of_the_past(case: Subject) -> None:
    for dtype in (torch.float64, torch.float32):
        layer, x = case.build(dtype), inputs(dtype)
        for mask in (None, right_padding(), right_padding().flip(1)):
            y = layer(x, attention_mask=mask, is_causal=True)
            for now in range(1, LENGTH):
                for size in (1.0, 1e4):
                    future = x.clone()
                    future[:, now:] = size * torch.randn(BATCH, LENGTH - now, EMBED_DIM, dtype=dtype)
                    seen = layer(future, attention_mask=mask, is_causal=True)
                    real = slice(None) if mask is None else mask[:, :now]
                    assert torch.equal(seen[:, :now][real], y[:, :now][real]), f"token {now} changes its past"


@check("causal")
def the_future_of_the_mask_changes_no_bit_of_the_past(case: Subject) -> None:
    layer, x = case.build(), inputs()
    mask = torch.rand(BATCH, LENGTH) < 0.7
    y = layer(x, attention_mask=mask, is_causal=True)
    for now in range(1, LENGTH):
        other = torch.cat([mask[:, :now], ~mask[:, now:]], dim=1)
        seen = layer(x, attention_mask=other, is_causal=True)
        assert torch.equal(seen[:, :now][mask[:, :now]], y[:, :now][mask[:, :now]]), f"mask of token {now}"


@check("causal")
def a_prefix_alone_gives_the_same_outputs(case: Subject) -> None:
    layer, x = case.build(), inputs()
    y = layer(x, is_causal=True)
    for now in range(1, LENGTH):
        close(layer(x[:, :now], is_causal=True), y[:, :now])


@check("causal")
def gradients_flow_from_no_output_to_its_future(case: Subject) -> None:
    x, layer = inputs().requires_grad_(), case.build()
    y = layer(x, is_causal=True)
    for now in range(LENGTH):
        (gradient,) = torch.autograd.grad(y[:, now].sum(), x, retain_graph=True)
        assert not gradient[:, now + 1 :].any(), f"token {now} has a gradient in its future"
        assert gradient[:, now].any(), f"token {now} has no gradient in itself"


def decoded(layer: AttentionLayer, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """The outputs for x (B, N, d), decoded token by token, and the last state."""
    y = []
    for token in x.unbind(dim=1):
        out, state = layer.step(token, state)
        y.append(out)
    return torch.stack(y, dim=1), state


def _nearly(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-10, atol=1e-10)


@check("decoding")
def steps_equal_the_parallel_causal_form(case: Subject) -> None:
    layer, x = case.build(), inputs()
    expected = layer(x, is_causal=True)
    y, _ = decoded(layer, x, layer.initial_state(BATCH))
    _nearly(y, expected)
    for now in (1, 4, 6, LENGTH - 1):
        y, state = layer.prefill(x[:, :now])
        _nearly(y, expected[:, :now])
        _nearly(decoded(layer, x[:, now:], state)[0], expected[:, now:])


@check("decoding")
def prompts_of_different_lengths_go_on_as_if_each_were_alone(case: Subject) -> None:
    layer, new = case.build(), inputs(length=6)
    right = right_padding((*PROMPTS, LENGTH))[:BATCH]
    for mask in (right, right.flip(1), right[:, torch.randperm(LENGTH)]):
        x = inputs().masked_fill(~mask[..., None], torch.nan)
        _, state = layer.prefill(x, mask)
        y, _ = decoded(layer, new, state)
        for b in range(BATCH):
            alone = torch.cat([x[b, mask[b]], new[b]])[None]
            _nearly(y[b], layer(alone, is_causal=True)[0, -6:])


@check("decoding")
def a_reordered_state_goes_on_from_the_sequences_asked_for(case: Subject) -> None:
    layer, x = case.build(), inputs()
    expected = layer(x, is_causal=True)
    kept = torch.tensor([2, 2, 0, 5])
    _, state = layer.prefill(x[:, :5])
    beams = reorder(state, kept)
    assert type(beams) is type(state)
    new = torch.randn(4, 3, EMBED_DIM, dtype=x.dtype)
    y, _ = decoded(layer, new, beams)
    _nearly(y, layer(torch.cat([x[kept, :5], new], dim=1), is_causal=True)[:, 5:])
    # Decoding wrote into the copy, not into the state it was made from.
    _nearly(decoded(layer, x[:, 5:], state)[0], expected[:, 5:])


@check("decoding")
def an_older_state_can_be_gone_back_to(case: Subject) -> None:
    layer, x = case.build(), inputs()
    _, state = layer.prefill(x[:, :5])
    decoded(layer, inputs(length=4), state)
    _nearly(decoded(layer, x[:, 5:], state)[0], layer(x, is_causal=True)[:, 5:])
