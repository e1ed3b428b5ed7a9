"""Gradients are right, extreme inputs stay finite, lower precision stays close."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import (
    BATCH,
    EMBED_DIM,
    LENGTH,
    every_case,
    inputs,
    objective,
    objective_cases,
    right_padding,
)

from kernel_attention import auxiliary_loss


@every_case
def test_gradients_of_inputs_and_parameters_equal_finite_differences(case):
    layer = case.build()
    names = [name for name, _ in layer.named_parameters()]
    mask = right_padding((5, 3))

    def outputs(form, x, *parameters):
        y = torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), x, {"key_padding_mask": mask, **form}
        )
        return y[mask], auxiliary_loss(layer)

    leaves = [inputs(batch=2, length=5), *layer.parameters()]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    for form in case.call_forms():
        # Auxiliary losses of layers without an objective have nothing to differentiate.
        call = (lambda *v, form=form: outputs(form, *v)) if auxiliary_loss_of(layer, form) else (
            lambda *v, form=form: outputs(form, *v)[0]
        )  # fmt: skip
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def auxiliary_loss_of(layer, form) -> bool:
    layer(inputs(batch=2, length=5), **form)
    return objective(layer) is not None


def token_sets() -> dict[str, torch.Tensor]:
    """Sequences that make a norm, a mean or a variance vanish or overflow; (B, N, d) float32."""
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


@pytest.mark.parametrize("tokens", list(token_sets()))
@every_case
def test_extreme_inputs_give_finite_outputs_and_gradients(case, tokens):
    x = token_sets()[tokens]
    all_but_one = torch.zeros(x.shape[:2], dtype=torch.bool)
    all_but_one[:, 0] = True
    for form in case.call_forms():
        for mask in (None, all_but_one):
            layer, leaf = case.build(torch.float32), x.clone().requires_grad_()
            y = layer(leaf, key_padding_mask=mask, **form)
            (y.sum() + auxiliary_loss(layer)).backward()
            for name, value in {
                "y": y,
                "x": leaf.grad,
                **{n: p.grad for n, p in layer.named_parameters()},
            }.items():
                assert value.isfinite().all(), f"{name} is not finite ({form}, mask={mask is not None})"


@every_case
def test_zero_tokens_pass_no_exploding_gradient(case):
    # A token of zeros (an embedding's padding row, a dead ReLU) sits where x / ||x|| has no slope.
    x = token_sets()["zero_rows"]
    for form in case.call_forms():
        layer, leaf = case.build(torch.float32), x.clone().requires_grad_()
        layer(leaf, **form).sum().backward()
        assert leaf.grad.abs().max() < 1e3


@every_case
def test_float32_is_close_to_float64(case):
    x, mask = inputs(), right_padding()
    for form in case.call_forms():
        exact = case.build()(x, key_padding_mask=mask, **form)[mask]
        single = case.build(torch.float32)(x.float(), key_padding_mask=mask, **form)[mask]
        assert (single.double() - exact).norm() < 2e-6 * exact.norm()


@every_case
def test_autocast_stays_close_and_keeps_the_objective_in_float32(case):
    x, mask = inputs(torch.float32), right_padding()
    for form in case.call_forms():
        layer = case.build(torch.float32)
        exact = layer(x, key_padding_mask=mask, **form)[mask]
        objective_exact = objective(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x, key_padding_mask=mask, **form)
        # A handful of products rounded to 2^-9 each.
        assert (y[mask].float() - exact).norm() < 8 * 2.0**-9 * exact.norm()
        if objective_exact is not None:
            assert objective(layer).dtype == torch.float32
            error = (objective(layer) - objective_exact).abs()
            assert (error < 8 * 2.0**-9 * (1 + objective_exact.abs())).all()
        (y[mask].float().sum() + auxiliary_loss(layer)).backward()
        assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in layer.parameters())


@objective_cases
def test_a_bfloat16_model_keeps_its_objective_in_float32(case):
    layer = case.build(torch.bfloat16)
    layer(inputs(torch.bfloat16))
    assert objective(layer).dtype == torch.float32


@every_case
def test_training_forwards_are_deterministic(case):
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        layer = case.build(torch.float32)
        y = layer(inputs(torch.float32), key_padding_mask=right_padding())
        (y.square().sum() + auxiliary_loss(layer)).backward()
        runs.append([y, *(p.grad for p in layer.parameters())])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@every_case
def test_non_contiguous_inputs_are_inputs(case):
    layer = case.build()
    x = torch.randn(EMBED_DIM, BATCH, LENGTH, dtype=torch.float64).permute(1, 2, 0)
    torch.testing.assert_close(layer(x), layer(x.contiguous()))
