"""The future changes nothing, and decoding token by token equals the parallel causal form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import reorder
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.testing.battery import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    PROMPTS,
    Subject,
    check,
    close,
    inputs,
    right_padding,
)


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
