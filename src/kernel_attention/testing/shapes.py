"""Shapes, precisions, and what a layer refuses."""

from __future__ import annotations

import torch

from kernel_attention.testing.battery import check, close, refused
from kernel_attention.testing.subjects import (
    BATCH,
    CONTEXT,
    EMBED_DIM,
    HEADS,
    LENGTH,
    Subject,
    inputs,
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
