"""Shapes, devices and precisions, and what a layer refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.testing.battery import (
    BATCH,
    CONTEXT,
    EMBED_DIM,
    HEADS,
    LENGTH,
    Subject,
    check,
    close,
    inputs,
    refused,
    right_padding,
)


@check()
def output_has_the_shape_and_dtype_of_the_input(case: Subject) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer, x = case.build(dtype), inputs(dtype)
        for form in case.call_forms():
            for mask in (None, right_padding()):
                y = layer(x, attention_mask=mask, **form)
                assert y.shape == (BATCH, LENGTH, EMBED_DIM), f"shape {tuple(y.shape)}"
                assert y.dtype == dtype, f"{dtype} became {y.dtype}"


@check()
def what_a_layer_does_not_support_it_refuses(case: Subject) -> None:
    layer, x = case.build(), inputs()
    if not layer.supports(causal=True):
        refused(lambda: layer(x, is_causal=True), "is_causal")
    if not layer.supports(context=True):
        refused(lambda: layer(x, context=x), "context")
    refused(lambda: layer(x, context=x, is_causal=True), "context", "is_causal")
    if not layer.supports(decoding=True):
        refused(lambda: layer.initial_state(BATCH), "does not decode")
        refused(lambda: layer.step(x[:, 0], None), "does not decode")
        refused(lambda: layer.prefill(x), "does not decode")


@check("context")
def cross_attention_reads_another_sequence_of_its_own_length(case: Subject) -> None:
    layer = case.build()
    x, context = inputs(), inputs(length=CONTEXT)
    y = layer(x, context=context)
    assert y.shape == (BATCH, LENGTH, EMBED_DIM)
    close(layer(x, context=x), layer(x))
    assert not torch.allclose(layer(x, context=2 * context), y), "the context is not read"
    mask = torch.arange(CONTEXT)[None] < torch.arange(1, BATCH + 1)[:, None]
    y = layer(x, context=context, attention_mask=mask)
    for b in range(BATCH):
        close(y[b : b + 1], layer(x[b : b + 1], context=context[b : b + 1, : b + 1]))


@check()
def printing_a_layer_says_its_sizes(case: Subject) -> None:
    assert f"{EMBED_DIM}, {HEADS}" in repr(case.build())


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _same_numbers(layer: nn.Module, other: nn.Module, what: str) -> None:
    for (name, value), expected in zip(_tensors(layer).items(), _tensors(other).values(), strict=True):
        assert value.dtype == expected.dtype, f"{what}: {name} is {value.dtype}, not {expected.dtype}"
        assert torch.equal(value, expected), f"{what}: {name} has other numbers than in a new layer"


def _new(case: Subject, **where: Any) -> AttentionLayer:
    torch.manual_seed(1)
    return case.make(EMBED_DIM, HEADS, **where)


@check()
def a_layer_made_on_meta_becomes_a_new_layer(case: Subject) -> None:
    with torch.device("meta"):
        layer = _new(case)
    for name, value in _tensors(layer).items():
        assert value.is_meta, f"{name} was made on {value.device}"
    layer.to_empty(device="cpu")
    for value in _tensors(layer).values():
        value.detach().fill_(float("nan") if value.is_floating_point() else -1)
    torch.manual_seed(1)
    layer.reset_parameters()
    new = _new(case)
    _same_numbers(layer, new, "reset_parameters")
    x = inputs(torch.float32)
    assert torch.equal(layer.eval()(x), new.eval()(x)), "a materialised layer has other outputs"


@check("placement")
def device_and_dtype_say_where_and_in_which_precision_a_layer_is_made(case: Subject) -> None:
    for name, value in _tensors(_new(case, device="meta")).items():
        assert value.is_meta, f"device='meta': {name} was made on {value.device}"
    _same_numbers(
        _new(case, device="cpu", dtype=torch.float32), _new(case, dtype=torch.float32), "device='cpu'"
    )
    for dtype in (torch.float64, torch.bfloat16):
        layer = _new(case, dtype=dtype)
        for name, value in _tensors(layer).items():
            assert value.dtype == dtype or not value.is_floating_point(), f"{dtype}: {name} is {value.dtype}"
        assert layer(inputs(dtype)).isfinite().all(), f"{dtype}: outputs are not finite"
