"""Who is timed when, and what is done in a pass. How long it takes is not asserted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernel_attention_lab.benchmarking import find_contender
from kernel_attention_lab.benchmarking.contenders import Contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.timing import layer_and_data, seconds, step, summarize, time_rounds


class Recorded(nn.Module):
    """Notes its calls, and in which mode."""

    def __init__(self, name, calls):
        super().__init__()
        self.name, self.calls = name, calls
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls.append((self.name, self.training, torch.is_grad_enabled()))
        return self.weight * x


def recorded(names):
    calls = []
    return calls, [Contender(name, lambda setting, name=name: Recorded(name, calls)) for name in names]


def test_every_contender_once_a_round_in_changing_order(tiny):
    names = ["a", "b", "c", "d"]
    calls, contenders = recorded(names)
    times, orders, failed = time_rounds(contenders, tiny, ("step",), 6, warmup=1, seed=3)
    assert not failed
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    timed = [name for name, _, _ in calls[len(names) :]]
    assert timed == [name for order in orders for name in order], "in the order that is recorded"
    assert {name: len(kinds["step"]) for name, kinds in times.items()} == dict.fromkeys(names, 6)
    _, again, _ = time_rounds(contenders, tiny, ("step",), 6, seed=3)
    assert again == orders
    _, other, _ = time_rounds(contenders, tiny, ("step",), 6, seed=4)
    assert other != orders


def test_inference_keeps_no_graph_and_a_step_trains(tiny):
    calls, contenders = recorded(["a"])
    time_rounds(contenders, tiny, ("forward", "step"), 1, warmup=0)
    assert calls == [("a", False, False), ("a", True, True)]


def test_a_failing_contender_leaves_the_others_alone(tiny):
    def fail(setting):
        raise ValueError("no\nroom")

    _, contenders = recorded(["a", "b"])
    times, _, failed = time_rounds([Contender("f", fail), *contenders], tiny, ("step",), 2)
    assert failed == {"f": "ValueError: no room"}
    assert set(times) == {"a", "b"}


def test_a_step_pulls_back_the_cotangent_and_the_objective(tiny):
    """Gradients are those of <y, g> + penalty, and every parameter has one."""
    contender = find_contender({"primal": {"rank": 3, "eta": 0.5}})
    layer, x, cotangent = layer_and_data(contender.make, tiny)
    step(layer.train(), x, cotangent)
    found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    y = layer(x)
    ((y * cotangent).sum() + penalty(layer)).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    assert found["sqrt_lambda"].abs().max() > 0, "only the objective reaches it"


def test_gradients_do_not_pile_up(tiny):
    layer, x, cotangent = layer_and_data(find_contender("sdpa").make, tiny)
    seconds("step", layer, x, cotangent)
    first = x.grad.clone()
    seconds("step", layer, x, cotangent)
    torch.testing.assert_close(x.grad, first)


def test_all_layers_meet_the_same_input(tiny):
    runs = [layer_and_data(find_contender("sdpa").make, tiny) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        if isinstance(first, torch.Tensor):
            assert torch.equal(first, second)


def test_ratios_are_taken_within_a_round():
    """A slow round leaves the ratio alone: 2 in each, though the medians' ratio is 4."""
    times = {"base": {"step": [1.0, 1.0, 8.0, 8.0, 2.0]}, "mine": {"step": [2.0, 2.0, 16.0, 16.0, 4.0]}}
    figures = summarize(times, "base")["mine"]["step"]
    assert figures["seconds"] == [2.0, 2.0, 16.0, 16.0, 4.0]
    assert (figures["lower"], figures["median"], figures["upper"]) == (2.0, 4.0, 16.0)
    assert [figures[f"ratio_{key}"] for key in ("lower", "median", "upper")] == [2.0, 2.0, 2.0]
    assert "ratio_median" not in summarize(times, "absent")["mine"]["step"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_is_the_weights_too(tiny, dtype):
    setting = tiny.__class__(**{**tiny.record(), "dtype": dtype})
    layer, x, cotangent = layer_and_data(find_contender("sdpa").make, setting)
    kinds = {tensor.dtype for tensor in (x, cotangent, *layer.parameters())}
    assert kinds == {getattr(torch, dtype)}
