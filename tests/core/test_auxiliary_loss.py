"""auxiliary_loss: sum over the layers of eta J^2."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from kernel_attention import InputError, PrimalAttention, SoftmaxAttention, auxiliary_loss, create_attention
from kernel_attention.core import objective as collecting
from kernel_attention.core import penalized
from kernel_attention.core.calls import Objective
from kernel_attention.core.penalized import bounded_square
from kernel_attention.models import SequenceClassifier


def layers(*etas: float) -> nn.Sequential:
    return nn.Sequential(*(PrimalAttention(6, 2, rank=2, eta=eta) for eta in etas), SoftmaxAttention(6, 2))


def test_it_is_the_sum_of_eta_times_the_square_of_every_layers_objective():
    model = layers(0.1, 0.0, 0.7)
    model(torch.randn(3, 5, 6))
    first, second = model[0].objective, model[2].objective
    expected = 0.1 * first**2 + 0.7 * second**2
    torch.testing.assert_close(auxiliary_loss(model), expected)
    torch.testing.assert_close(auxiliary_loss(model, "mean"), expected / 2)


def test_eta_may_be_changed_between_steps():
    model = layers(0.1)
    model(torch.randn(3, 5, 6))
    before = auxiliary_loss(model)
    model[0].eta = 0.2
    torch.testing.assert_close(auxiliary_loss(model), 2 * before)


def test_a_model_without_objectives_adds_a_zero_that_can_be_summed():
    model = layers(0.0)
    y = model(torch.randn(3, 5, 6))
    (y.sum() + auxiliary_loss(model)).backward()
    assert auxiliary_loss(nn.Identity()).item() == 0.0


def test_an_unknown_reduction_is_refused():
    with pytest.raises(InputError, match="reduction='max' must be 'sum' or 'mean'"):
        auxiliary_loss(layers(0.1), "max")


def test_an_objective_without_gradients_is_refused_where_gradients_are_wanted():
    model = layers(0.1)
    with torch.no_grad():
        model(torch.randn(3, 5, 6))
        assert auxiliary_loss(model) > 0
    with pytest.raises(RuntimeError, match="computed without gradients"):
        auxiliary_loss(model)


def test_the_bounded_square_is_the_square_up_to_the_bound_and_joins_smoothly():
    j = torch.tensor([-4.0, -3.999, 0.0, 1.5, 4.0], dtype=torch.float64, requires_grad=True)
    inside = bounded_square(j, 4.0)
    assert torch.equal(inside, j.square())
    assert torch.equal(torch.autograd.grad(inside.sum(), j)[0], 2 * j)
    past = torch.tensor([4 * (1 + 1e-9), -4 * (1 + 1e-9)], dtype=torch.float64, requires_grad=True)
    beyond = bounded_square(past, 4.0)
    torch.testing.assert_close(beyond, past.square(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(beyond.sum(), past)[0], 2 * past, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize("bound", [4.0, math.inf, torch.tensor([3.0, 5.0, 7.0])], ids=str)
def test_the_bounded_square_has_finite_gradients_up_to_the_largest_objectives(bound):
    sizes = [0.0, 10.0, 1e18] if isinstance(bound, float) and math.isinf(bound) else [0.0, 10.0, 1e36]
    j = torch.tensor(sizes, requires_grad=True)
    penalty = bounded_square(j, bound)
    (gradient,) = torch.autograd.grad(penalty.sum(), j)
    assert penalty.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[1] > 0
    assert gradient[2] > 0  # a step goes on downhill


@pytest.mark.parametrize("bound", [4.0, torch.tensor([3.0, 5.0, 7.0, 4.0], dtype=torch.float64)], ids=str)
def test_the_bounded_square_in_few_launches_is_its_formula(bound):
    j = torch.tensor([-20.0, 1.5, 7.5, 0.0], dtype=torch.float64, requires_grad=True)
    found, expected = bounded_square(j, bound), penalized._bounded_square(j, bound)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(each.sum(), j)[0] for each in (found, expected)]
    torch.testing.assert_close(*slopes)
    assert torch.autograd.gradcheck(bounded_square, (j, bound))
    assert torch.autograd.gradgradcheck(bounded_square, (j, bound))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_where_no_value_may_be_asked_for_the_layers_of_one_bound_are_squared_together(monkeypatch, reduction):
    model, x, found = layers(0.1, 0.3, 0.2, 0.4), 30 * torch.randn(3, 5, 6), []
    model[3].objective_bound = 8.0
    for can_ask in (penalized.can_ask, lambda _: False):
        monkeypatch.setattr(penalized, "can_ask", can_ask)
        monkeypatch.setattr(collecting, "can_ask", can_ask)
        model.zero_grad()
        model(x)
        loss = auxiliary_loss(model, reduction)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mechanism", ["primal", "multilinear"])
def test_without_a_bound_the_penalty_is_the_square_of_any_objective(mechanism):
    layer = create_attention(mechanism, embed_dim=6, num_heads=2, rank=2, eta=0.1, objective_bound=None)
    large = Objective(torch.tensor(1e3))
    torch.testing.assert_close(layer.penalty(large), torch.tensor(1e5))
    layer.objective_bound = 16.0
    assert layer.penalty(large) < 1e3


@pytest.mark.parametrize("mechanism", ["primal", "multilinear"])
@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, "16", True], ids=str)
def test_a_bound_is_a_number_above_0(mechanism, bound):
    with pytest.raises(InputError, match=r"objective_bound=.* must be a number above 0, or None"):
        create_attention(mechanism, embed_dim=6, num_heads=2, objective_bound=bound)


def test_the_penalty_points_where_the_square_points():
    model, x = layers(0.1), 30 * torch.randn(3, 5, 6)
    gradients = []
    for bound in (16.0, math.inf):
        model.zero_grad()
        model[0].objective_bound = bound
        model(x)
        assert model[0].objective > 16
        auxiliary_loss(model).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model[0].parameters() if p.grad is not None]))
    bounded, bare = gradients
    torch.testing.assert_close(bounded / bounded.norm(), bare / bare.norm())


@pytest.mark.parametrize("square_per", ["batch", "sequence"])
def test_the_sum_form_counts_its_bound_in_real_tokens(square_per):
    # sum form = N times the mean form for sequences of one length: both must leave the square at one place.
    torch.manual_seed(0)
    x, mask = 60 * torch.randn(3, 7, 6), torch.arange(7)[None] < torch.tensor([5, 5, 5])[:, None]
    squares = []
    for form in ("mean", "sum"):
        torch.manual_seed(1)
        layer = PrimalAttention(6, 2, rank=2, eta=1.0, objective_form=form, square_per=square_per)
        with torch.no_grad():
            layer.w_r.zero_()  # no trace, which is no sum over tokens
        layer(x, attention_mask=mask)
        assert (layer.objective > 16 * layer.last_objective.unit).any()
        squares.append(auxiliary_loss(layer))
    torch.testing.assert_close(squares[1], 25 * squares[0])


def test_large_objectives_are_warned_of_once(caplog):
    penalized._warn_of_large_objectives.cache_clear()
    model = layers(0.1)
    model(torch.randn(3, 5, 6))
    auxiliary_loss(model)
    assert not caplog.records
    for _ in range(3):
        model(100 * torch.randn(3, 5, 6))
        auxiliary_loss(model)
    (record,) = caplog.records
    assert "Standardise the inputs" in record.message


def test_the_loop_of_getting_started_holds_on_real_data_as_it_comes():
    # BasicMotions in its own units, eta 0.1, RAdam 1e-3, no clipping. With the bare J^2 the penalty was 2e3,
    # 6e7, infinite.
    series, labels = pytest.importorskip("aeon.datasets").load_basic_motions(split="train")
    x = torch.from_numpy(series.swapaxes(1, 2)).float()
    target = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
    model = SequenceClassifier(
        in_features=6, num_outputs=4, max_len=100,
        attention={"primal": {"rank": 10, "eta": 0.1}}, embed_dim=32, num_heads=2, feedforward_dim=64,
    )  # fmt: skip
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    model.train()
    task, objectives = [], []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), target)
        objectives.append(max(layer.attention.objective.item() for layer in model.encoder.layers))
        (loss + auxiliary_loss(model)).backward()
        optimizer.step()
        task.append(loss.item())
        assert all(p.grad.isfinite().all() for p in model.parameters())
    assert objectives[0] > 50  # past the bound, so that the bound is what is tested
    assert objectives[-1] < objectives[0] / 2
    assert task[-1] < task[0] / 2


def test_the_identity_map_has_finite_penalties_and_gradients_at_large_inputs():
    layer = PrimalAttention(32, 4, eta=0.1, feature_map="identity")
    x = (1e5 * torch.randn(2, 1, 32)).expand(2, 512, 32).clone().requires_grad_()
    layer(x)
    penalty = auxiliary_loss(layer)
    penalty.backward()
    assert layer.objective > 1e19  # its square is past float32
    assert penalty.isfinite()
    assert x.grad.isfinite().all()
    for parameter in (layer.w_e, layer.w_r, layer.sqrt_lambda, layer.q_proj.weight):
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0
