"""Shapes, and the words in which a bad call is refused."""

from __future__ import annotations

import re

import pytest
import torch
from contracts.cases import (
    BATCH,
    CASES,
    CONTEXT,
    EMBED_DIM,
    LENGTH,
    VARIANTS,
    cases_where,
    every_case,
    every_class,
    inputs,
    right_padding,
)

from kernel_attention import InputError, auxiliary_loss, list_attention


def test_the_battery_covers_every_mechanism_and_exempts_only_from_tests_that_exist():
    assert {case.mechanism.name for case in CASES} == {mechanism.name for mechanism in list_attention()}
    assert set(VARIANTS) <= {mechanism.name for mechanism in list_attention()}
    import contracts

    written = "\n".join(path.read_text() for folder in contracts.__path__ for path in _tests_in(folder))
    for case in CASES:
        for test in case.variant.exempt:
            assert f"def {test}(" in written, f"{case} is exempt from {test}, which does not exist"


def _tests_in(folder):
    from pathlib import Path

    return Path(folder).glob("test_*.py")


@every_case
def test_output_has_the_shape_of_the_input(case):
    layer = case.build()
    for form in case.call_forms():
        assert layer(inputs(), **form).shape == (BATCH, LENGTH, EMBED_DIM)
        assert layer(inputs(), key_padding_mask=right_padding(), **form).shape == (BATCH, LENGTH, EMBED_DIM)


@every_case
def test_the_output_keeps_the_dtype(case):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert case.build(dtype)(inputs(dtype)).dtype == dtype


@cases_where(lambda case: case.mechanism.cross)
def test_cross_attention_reads_another_sequence_of_its_own_length(case):
    layer = case.build()
    x, context = inputs(), inputs(length=CONTEXT)
    y = layer(x, context=context)
    assert y.shape == (BATCH, LENGTH, EMBED_DIM)
    torch.testing.assert_close(layer(x, context=x), layer(x))
    assert not torch.allclose(layer(x, context=2 * context), y)


@cases_where(lambda case: case.mechanism.cross)
def test_the_mask_of_cross_attention_is_over_the_context(case):
    layer = case.build()
    x, context = inputs(), inputs(length=CONTEXT)
    mask = torch.arange(CONTEXT)[None] < torch.arange(1, BATCH + 1)[:, None]
    y = layer(x, context=context, key_padding_mask=mask)
    for b in range(BATCH):
        alone = layer(x[b : b + 1], context=context[b : b + 1, : b + 1])
        torch.testing.assert_close(y[b : b + 1], alone)


@cases_where(lambda case: case.mechanism.cross and not case.variant_name)
def test_causality_across_two_sequences_is_refused(case):
    with pytest.raises(InputError, match="is_causal=True cannot be combined with context"):
        case.build()(inputs(), context=inputs(), is_causal=True)


@cases_where(lambda case: not case.mechanism.cross and not case.variant_name)
def test_a_mechanism_without_cross_attention_refuses_context(case):
    with pytest.raises(InputError, match="context"):
        case.build()(inputs(), context=inputs())


@cases_where(lambda case: not case.causal)
def test_a_mechanism_without_a_causal_form_refuses_it(case):
    with pytest.raises(InputError, match="is_causal"):
        case.build()(inputs(), is_causal=True)


def refused(layer, message: str, x: torch.Tensor, **arguments: object) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        layer(x, **arguments)
    assert "\n" not in str(error.value)


@every_class
def test_a_bad_call_is_refused_with_the_argument_and_the_value(case):
    layer, x, mask = case.build(), inputs(), right_padding()
    refused(layer, f"x has shape (11, 15), expected (B, N, {EMBED_DIM})", x[0])
    refused(layer, "x has shape (7, 11, 14)", x[..., 1:])
    refused(layer, "x has shape (7, 0, 15)", x[:, :0])
    refused(layer, "x has dtype torch.int64", x.long())
    refused(
        layer, "key_padding_mask has shape (7, 11) and dtype torch.float64", x, key_padding_mask=mask.double()
    )
    refused(layer, "torch.bool (True = real token)", x, key_padding_mask=mask.long())
    refused(layer, "key_padding_mask has shape (7, 10)", x, key_padding_mask=mask[:, 1:])
    refused(layer, "key_padding_mask has shape (11,)", x, key_padding_mask=mask[0])
    refused(layer, "expected (7, 11)", x, key_padding_mask=mask[:1])


@cases_where(lambda case: case.mechanism.cross and not case.variant_name)
def test_a_bad_context_is_refused_with_the_argument_and_the_value(case):
    layer, x = case.build(), inputs()
    refused(layer, "context has shape (6, 11, 15), expected (7, S, 15)", x, context=x[1:])
    refused(layer, "context has shape (11, 15)", x, context=x[0])
    refused(layer, "context has shape (7, 11, 14)", x, context=x[..., 1:])
    refused(layer, "context has shape (7, 0, 15)", x, context=x[:, :0])
    refused(
        layer, "key_padding_mask has shape (7, 11)", x,
        context=inputs(length=CONTEXT), key_padding_mask=right_padding(),
    )  # fmt: skip


@every_class
def test_sizes_that_do_not_fit_are_refused(case):
    options = dict(case.variant.options)
    name = case.mechanism.name
    from kernel_attention import create_attention

    with pytest.raises(InputError, match="embed_dim=15 must be divisible by num_heads=4"):
        create_attention(name, 15, 4, **options)
    for bad in (0, -3, 2.5, "15", None, True):
        with pytest.raises(
            InputError, match=re.escape(f"embed_dim={bad!r} must be a whole number of at least 1")
        ):
            create_attention(name, bad, 3, **options)
        with pytest.raises(
            InputError, match=re.escape(f"num_heads={bad!r} must be a whole number of at least 1")
        ):
            create_attention(name, 15, bad, **options)


@every_class
def test_a_refused_call_leaves_no_objective_behind(case):
    layer = case.build()
    with pytest.raises(InputError):
        layer(inputs()[..., 1:])
    assert auxiliary_loss(layer).item() == 0.0
