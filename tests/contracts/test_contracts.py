"""Every mechanism, in every variant, keeps what `kernel_attention.testing` says any mechanism must keep."""

from __future__ import annotations

import re

import pytest
import torch
from contracts.cases import CASES, CONTEXT, EMBED_DIM, VARIANTS, Case, inputs, right_padding

from kernel_attention import InputError, create_attention, list_attention
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.registry import MECHANISMS, register_attention
from kernel_attention.testing import CHECKS, Subject, check_attention, checks_of, subject

# A compilation takes seconds: test_compile.py has one in the quick suite.
COMPILED = {
    "graphs_of_dynamic_length_equal_eager": (),
    "an_evaluated_layer_can_be_exported_with_any_length": (),
    "one_graph_serves_forward_and_backward": (),
    "new_lengths_do_not_compile_anew": (),
}
# Names of a layer's class with other options, which another name checks in full.
PRESETS = {"symmetric", "cosine", "gated_delta", "batch_norm", "scaled_heads"}
# What an option can break where the mechanism is right: numbers, masks, decoding, the making of parameters.
# Hooks, transforms, adapters, copies and questions to the device depend on the code, which variants share.
# Their gradients are compared with the loops' in tests/mechanisms.
OF_OPTIONS = {
    "a_layer_made_on_meta_becomes_a_new_layer",
    "a_padded_batch_gives_each_sequence_its_own_output",
    "a_padded_batch_has_the_mean_objective_of_its_sequences",
    "a_prefix_alone_gives_the_same_outputs",
    "an_empty_sequence_disturbs_nobody",
    "cross_attention_reads_another_sequence_of_its_own_length",
    "every_parameter_is_trained",
    "float32_is_close_to_float64",
    "prompts_of_different_lengths_go_on_as_if_each_were_alone",
    "steps_equal_the_parallel_causal_form",
    "zero_tokens_pass_no_exploding_gradient",
}
# What divides by a norm, a variance or a sum has options of these names.
DIVIDING = {"feature_map", "normalize", "readout", "core"}


def _is_quick(case: Case, check: str) -> bool:
    if check in COMPILED:
        return str(case) in COMPILED[check]
    options = case.variant.options
    if "impl" in options or (not case.variant_name and case.mechanism.name not in PRESETS):
        return True
    if check == "extreme_inputs_give_finite_outputs_and_gradients":
        return bool(DIVIDING & options.keys())
    return check in OF_OPTIONS


def _pairs():
    for case in CASES:
        for check in checks_of(case.subject()):
            marks = () if _is_quick(case, check) else pytest.mark.slow
            yield pytest.param(case, check, marks=marks, id=f"{check}-{case}")


@pytest.mark.parametrize(("case", "check"), list(_pairs()))
def test_the_contract(case: Case, check: str):
    assert check_attention(case.subject(), only=[check]) == [check]


def test_the_battery_covers_every_mechanism_and_exempts_only_from_checks_that_exist():
    names = {mechanism.name for mechanism in list_attention()}
    assert {case.mechanism.name for case in CASES} == names
    assert set(VARIANTS) <= names
    assert {check for case in CASES for check in case.variant.exempt} <= set(CHECKS)
    assert {*COMPILED, *OF_OPTIONS} <= set(CHECKS)
    assert {*PRESETS, *(name for quick in COMPILED.values() for name in quick)} <= names


def test_a_layer_that_breaks_a_promise_is_found_out():
    class Leaking(type(create_attention("softmax", 15, 3))):
        def attend(self, x, context, attention_mask, is_causal):
            return super().attend(x, context, attention_mask, False)

    with pytest.raises(AssertionError, match=r"leaking: the_future_changes_no_bit_of_the_past: token 1"):
        check_attention(Subject("leaking", Leaking), only=["the_future_changes_no_bit_of_the_past"])


@pytest.mark.parametrize(
    ("make_state", "check", "message"),
    [
        (
            lambda layer, _: layer.register_parameter("gain", torch.nn.Parameter(torch.ones(3))),
            "a_layer_made_on_meta_becomes_a_new_layer",
            "reset_parameters: gain has other numbers than in a new layer",
        ),
        (
            lambda layer, _: layer.register_buffer("table", torch.zeros(3, device="cpu")),
            "a_layer_made_on_meta_becomes_a_new_layer",
            "table was made on cpu",
        ),
        (
            lambda layer, where: layer.register_buffer("table", torch.zeros(3, device=where.get("device"))),
            "device_and_dtype_say_where_and_in_which_precision_a_layer_is_made",
            "torch.float64: table is torch.float32",
        ),
    ],
    ids=["not reset", "one device", "one precision"],
)
def test_state_that_a_layer_forgets_is_found_out(make_state, check, message):
    class Forgetful(type(create_attention("softmax", 15, 3))):
        def __init__(self, embed_dim, num_heads, **where):
            super().__init__(embed_dim, num_heads, **where)
            make_state(self, where)

    with pytest.raises(AssertionError, match=re.escape(f"forgetful: {check}: {message}")):
        check_attention(Subject("forgetful", Forgetful), only=[check])


def test_a_mechanism_of_attend_alone_is_checked_and_an_error_of_torch_names_its_check(request):
    """It has no ``device`` and ``dtype``, which PyTorch's own modules have and this class need not have."""
    request.addfinalizer(lambda: MECHANISMS.pop("half"))

    @register_attention("half", paper="", equation="v / 2", time="N p", memory="N p")
    class Half(AttentionLayer):
        def __init__(self, embed_dim, num_heads):
            super().__init__(embed_dim, num_heads)
            self.v_proj = torch.nn.Linear(embed_dim, embed_dim)

        def attend(self, x, context, attention_mask, is_causal):
            if x.dtype == torch.bfloat16:
                raise NotImplementedError("no such product")
            return self.v_proj(x) / 2

    placed, shape = (
        "device_and_dtype_say_where_and_in_which_precision_a_layer_is_made",
        "output_has_the_shape_and_dtype_of_the_input",
    )
    assert check_attention("half", only=[placed, "a_full_mask_is_no_mask"]) == ["a_full_mask_is_no_mask"]
    with pytest.raises(AssertionError, match=f"half: {shape}: NotImplementedError: no such product") as found:
        check_attention("half", only=[shape])
    assert found.value.__notes__ == [
        f"to leave the check out: exempt={{'{shape}': 'why'}}",
        "passed before it: none",
    ]
    assert check_attention("half", only=[shape], exempt={shape: "float32 alone"}) == []


def test_an_unknown_check_or_mechanism_is_refused():
    with pytest.raises(InputError, match="unknown check 'a_full_mask'"):
        check_attention("softmax", only=["a_full_mask"])
    with pytest.raises(InputError, match="unknown attention mechanism 'mine'"):
        check_attention("mine")
    assert subject("primal", rank=2).build().max_len == 17


# What the base class refuses is the same for every mechanism: once is enough.


def refused(message: str, x, **arguments: object) -> None:
    layer = create_attention("softmax", EMBED_DIM, 3).double()
    with pytest.raises(InputError, match=re.escape(message)) as error:
        layer(x, **arguments)
    assert "\n" not in str(error.value)


def test_a_bad_call_is_refused_with_the_argument_and_the_value():
    x, mask = inputs(), right_padding()
    refused(f"x has shape (11, 15), expected (B, N, {EMBED_DIM})", x[0])
    refused("x has shape (7, 11, 14)", x[..., 1:])
    refused("x has shape (7, 0, 15)", x[:, :0])
    refused("x has dtype torch.int64", x.long())
    refused("attention_mask has shape (7, 11) and dtype torch.float64", x, attention_mask=mask.double())
    refused("torch.bool (True = real token)", x, attention_mask=mask.long())
    refused("attention_mask has shape (7, 10)", x, attention_mask=mask[:, 1:])
    refused("attention_mask has shape (11,)", x, attention_mask=mask[0])
    refused("expected (7, 11)", x, attention_mask=mask[:1])
    refused("context has shape (6, 11, 15), expected (7, S, 15)", x, context=x[1:])
    refused("context has shape (11, 15)", x, context=x[0])
    refused("context has shape (7, 11, 14)", x, context=x[..., 1:])
    refused("context has shape (7, 0, 15)", x, context=x[:, :0])
    refused("attention_mask has shape (7, 11)", x, context=inputs(length=CONTEXT), attention_mask=mask)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="embed_dim=15 must be divisible by num_heads=4"):
        create_attention("softmax", 15, 4)
    for bad in (0, -3, 2.5, "15", None, True):
        for name, sizes in (("embed_dim", (bad, 3)), ("num_heads", (15, bad))):
            with pytest.raises(
                InputError, match=re.escape(f"{name}={bad!r} must be a whole number of at least 1")
            ):
                create_attention("softmax", *sizes)


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_every_mechanism_can_be_checked_by_its_name_alone(name):
    check = "output_has_the_shape_and_dtype_of_the_input"
    assert check_attention(name, only=[check]) == [check]
    assert subject(name).fixed_length == (name == "conv2d")
