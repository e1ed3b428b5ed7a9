"""With is_causal=True output i depends on x[0..i], to the last bit of every statistic."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import BATCH, EMBED_DIM, LENGTH, causal_cases, inputs, right_padding

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@DTYPES
@causal_cases
def test_the_future_changes_no_bit_of_the_past(case, dtype):
    layer, x = case.build(dtype), inputs(dtype)
    for mask in (None, right_padding(), right_padding().flip(1)):
        y = layer(x, key_padding_mask=mask, is_causal=True)
        for now in range(1, LENGTH):
            for size in (1.0, 1e4):
                future = x.clone()
                future[:, now:] = size * torch.randn(BATCH, LENGTH - now, EMBED_DIM, dtype=dtype)
                seen = layer(future, key_padding_mask=mask, is_causal=True)
                real = slice(None) if mask is None else mask[:, :now]
                assert torch.equal(seen[:, :now][real], y[:, :now][real]), f"token {now} changes its past"


@causal_cases
def test_the_future_of_the_mask_changes_no_bit_of_the_past(case):
    layer, x = case.build(), inputs()
    mask = torch.rand(BATCH, LENGTH) < 0.7
    y = layer(x, key_padding_mask=mask, is_causal=True)
    for now in range(1, LENGTH):
        other = torch.cat([mask[:, :now], ~mask[:, now:]], dim=1)
        seen = layer(x, key_padding_mask=other, is_causal=True)
        assert torch.equal(seen[:, :now][mask[:, :now]], y[:, :now][mask[:, :now]])


@causal_cases
def test_a_prefix_alone_gives_the_same_outputs(case):
    layer, x = case.build(), inputs()
    y = layer(x, is_causal=True)
    for now in range(1, LENGTH):
        torch.testing.assert_close(layer(x[:, :now], is_causal=True), y[:, :now])


@causal_cases
def test_gradients_flow_from_no_output_to_its_future(case):
    x = inputs().requires_grad_()
    y = case.build()(x, is_causal=True)
    for now in range(LENGTH):
        (gradient,) = torch.autograd.grad(y[:, now].sum(), x, retain_graph=True)
        assert not gradient[:, now + 1 :].any()
        assert gradient[:, now].any()
