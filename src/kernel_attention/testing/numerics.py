"""Shapes, devices, gradients, precisions and extreme inputs, and what a layer refuses."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import auxiliary_loss, collect_objectives
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
    objective,
    refused,
    required,
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


_BFLOAT16_ERROR = 8 * 2.0**-9  # a few products, each rounded to 2^-9


@check("any length")
def gradients_equal_finite_differences(case: Subject) -> None:
    layer = case.build()
    names = [name for name, _ in layer.named_parameters()]
    mask = right_padding((5, 3))
    leaves = [inputs(batch=2, length=5), *layer.parameters()]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for form in case.call_forms():
        layer(inputs(batch=2, length=5), **form)
        has_objective = objective(layer) is not None

        def call(
            x: Tensor, *parameters: Tensor, form: dict[str, bool] = form, both: bool = has_objective
        ) -> Any:
            with collect_objectives() as objectives:
                y = torch.func.functional_call(
                    layer, dict(zip(names, parameters, strict=True)), x, {"attention_mask": mask, **form}
                )
            return (y[mask], objectives.total()) if both else y[mask]

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def extreme_inputs() -> dict[str, Tensor]:
    """Sequences whose norm, mean or variance vanishes or overflows; (B, N, d) float32."""
    x = inputs(torch.float32)
    half_zero = x.clone()
    half_zero[:, ::2] = 0.0
    one_token = inputs(torch.float32, length=1)
    return {
        "zeros": torch.zeros_like(x),
        "zero_rows": half_zero,
        "constant": torch.full_like(x, 3.0),
        "repeated_token": x[:, :1].expand(-1, LENGTH, -1).clone(),
        "large": 1e4 * x,
        "large_constant": torch.full_like(x, -1e4),
        "alternating": 1e4 * (1 - 2 * (torch.arange(LENGTH) % 2))[None, :, None].expand_as(x).float(),
        "one_token": one_token,
        "one_large_token": 1e4 * one_token,
        "one_zero_token": torch.zeros_like(one_token),
    }


@check()
def extreme_inputs_give_finite_outputs_and_gradients(case: Subject) -> None:
    layer = case.build(torch.float32)
    for kind, x in extreme_inputs().items():
        if case.fixed_length and x.size(1) != LENGTH:
            continue
        first = torch.zeros(x.shape[:2], dtype=torch.bool)
        first[:, 0] = True
        for form in case.call_forms():
            for mask in (None, first):
                leaf = x.clone().requires_grad_()
                layer.zero_grad()
                y = layer(leaf, attention_mask=mask, **form)
                (y.sum() + auxiliary_loss(layer)).backward()
                found = {"y": y, "x": leaf.grad, **{n: p.grad for n, p in layer.named_parameters()}}
                for name, value in found.items():
                    assert required(value).isfinite().all(), f"{kind}: {name} is not finite ({form})"


@check()
def zero_tokens_pass_no_exploding_gradient(case: Subject) -> None:
    # A token of zeros (an embedding's padding row, a dead ReLU) sits where x / ||x|| has no slope.
    x = extreme_inputs()["zero_rows"]
    for form in case.call_forms():
        layer, leaf = case.build(torch.float32), x.clone().requires_grad_()
        layer(leaf, **form).sum().backward()
        largest = required(leaf.grad).abs().max()
        assert largest < 1e3, f"a gradient of {largest:.1e}"


@check()
def float32_is_close_to_float64(case: Subject) -> None:
    x, mask = inputs(), right_padding()
    for form in case.call_forms():
        exact = case.build()(x, attention_mask=mask, **form)[mask]
        single = case.build(torch.float32)(x.float(), attention_mask=mask, **form)[mask]
        error = (single.double() - exact).norm() / exact.norm()
        assert error < 2e-6, f"relative error {error:.1e} ({form})"


@check()
def autocast_stays_close_and_keeps_the_objective_in_float32(case: Subject) -> None:
    x, mask = inputs(torch.float32), right_padding()
    for form in case.call_forms():
        layer = case.build(torch.float32)
        exact = layer(x, attention_mask=mask, **form)[mask]
        before = objective(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16), collect_objectives() as objectives:
            y = layer(x, attention_mask=mask, **form)
        assert (y[mask].float() - exact).norm() < _BFLOAT16_ERROR * exact.norm(), "far from float32"
        if before is not None:
            after = required(objective(layer))
            assert after.dtype == torch.float32, f"the objective is {after.dtype}"
            assert ((after - before).abs() < _BFLOAT16_ERROR * (1 + before.abs())).all()
        (y[mask].float().sum() + objectives.total()).backward()
        assert all(required(p.grad).isfinite().all() for p in layer.parameters())
        assert all(required(p.grad).dtype == torch.float32 for p in layer.parameters())


@check()
def a_bfloat16_layer_keeps_its_objective_in_float32(case: Subject) -> None:
    layer = case.build(torch.bfloat16)
    layer(inputs(torch.bfloat16))
    found = objective(layer)
    assert found is None or found.dtype == torch.float32


@check()
def training_forwards_are_deterministic(case: Subject) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        layer = case.build(torch.float32)
        y = layer(inputs(torch.float32), attention_mask=right_padding())
        (y.square().sum() + auxiliary_loss(layer)).backward()
        runs.append([y, *(required(p.grad) for p in layer.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@check()
def non_contiguous_inputs_are_inputs(case: Subject) -> None:
    layer = case.build()
    x = torch.randn(EMBED_DIM, BATCH, LENGTH, dtype=torch.float64).permute(1, 2, 0)
    close(layer(x), layer(x.contiguous()))
