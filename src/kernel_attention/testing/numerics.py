"""Gradients, precisions and extreme inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.objective import auxiliary_loss, collect_objectives
from kernel_attention.testing.battery import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    Subject,
    check,
    close,
    inputs,
    objective,
    required,
    right_padding,
)

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
