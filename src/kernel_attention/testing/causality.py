"""No output depends on a later token."""

from __future__ import annotations

import torch

from kernel_attention.testing.battery import check, close
from kernel_attention.testing.subjects import BATCH, EMBED_DIM, LENGTH, Subject, inputs, right_padding


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
