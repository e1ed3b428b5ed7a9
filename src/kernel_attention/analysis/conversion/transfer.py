"""Attention transfer: a new layer trained to return what the old one returned, on recorded calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import AttentionCall, Recording, first_tensor, run

_WARM_UP = 0.1  # of the steps
_LARGEST_GRADIENT = 1.0  # norm, of a loss whose size is about 1


@dataclass(frozen=True)
class Descent:
    """Settings of one descent by Adam, with a linear warm-up and a cosine to zero.

    Attributes:
        steps: at most; one batch each.
        learning_rate: the highest.
        deadline: a time of ``time.monotonic`` after which no step begins.
        seed: of the order of the batches.
    """

    steps: int
    learning_rate: float
    deadline: float = float("inf")
    seed: int = 0

    def run(self, weights: Sequence[nn.Parameter], count: int, loss: Callable[[int], Tensor]) -> int:
        """Minimise the mean of ``loss(i)`` over i < count; return the number of steps made."""
        if not self.steps or not weights:
            return 0
        optimizer = torch.optim.Adam(weights, lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
        order = self._order(count)
        for step in range(self.steps):
            if time.monotonic() >= self.deadline:
                return step
            optimizer.zero_grad(set_to_none=True)
            loss(next(order)).backward()
            nn.utils.clip_grad_norm_(weights, _LARGEST_GRADIENT)
            optimizer.step()
            schedule.step()
        optimizer.zero_grad(set_to_none=True)
        return self.steps

    def _factor(self, step: int) -> float:
        warm = max(1, round(_WARM_UP * self.steps))
        if step < warm:
            return (step + 1) / warm
        done = torch.tensor((step - warm) / max(1, self.steps - warm))
        return float(0.5 * (1 + torch.cos(torch.pi * done)))

    def _order(self, count: int) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(count, generator=generator).tolist()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode; every module, new ones too, then has its old mode."""
    modes = [(path, module.training) for path, module in model.named_modules()]
    try:
        model.eval()
        yield
    finally:
        training = dict(modes)
        for path, module in model.named_modules():
            while path not in training:
                path = path.rpartition(".")[0]
            module.training = training[path]


@contextmanager
def only_trainable(model: nn.Module, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside the block these weights alone have gradients; ``requires_grad`` and ``grad`` return after it."""
    before = [(weight, weight.requires_grad, weight.grad) for weight in model.parameters()]
    chosen = {id(weight) for weight in weights}
    try:
        for weight, _, _ in before:
            weight.requires_grad_(id(weight) in chosen)
        with torch.enable_grad():
            yield
    finally:
        for weight, required, gradient in before:
            weight.requires_grad_(required)
            weight.grad = gradient


def output_variance(calls: Sequence[AttentionCall]) -> Tensor:
    """Mean square of the old outputs' distance from their mean, over real tokens and features."""
    wanted = torch.cat([call.output[call.real] for call in calls]).double()
    return (wanted - wanted.mean(dim=0)).square().mean().clamp_min(torch.finfo(torch.float64).tiny)


def squared_error(layer: nn.Module, call: AttentionCall) -> Tensor:
    """Mean square of the layer's distance from the old output, over real tokens and features."""
    y = first_tensor(layer(*call.arguments, **call.named))
    return (y - call.output)[call.real].square().mean()


@torch.no_grad()
def relative_error(layer: nn.Module, calls: Sequence[AttentionCall]) -> float:
    """The share of the old outputs' variance that the layer misses: 0 = the same, 1 = the best constant."""
    total = sum(float(squared_error(layer, call)) * call.num_tokens for call in calls)
    return total / sum(call.num_tokens for call in calls) / float(output_variance(calls))


def transfer_attention(layer: nn.Module, calls: Sequence[AttentionCall], descent: Descent) -> int:
    """Train all weights of a layer on the old one's calls; return the number of steps made."""
    size = float(output_variance(calls))
    weights = list(layer.parameters())
    with only_trainable(layer, weights):
        return descent.run(weights, len(calls), lambda i: squared_error(layer, calls[i]) / size)


def train_whole(
    model: nn.Module,
    weights: Sequence[nn.Parameter],
    recording: Recording,
    trained_on: range,
    descent: Descent,
) -> int:
    """Train weights of a converted model on the old model's own outputs; return the number of steps made."""
    size = float(torch.cat([y.flatten() for y in recording.outputs]).double().var().clamp_min(1e-300))

    def loss(place: int) -> Tensor:
        index = trained_on[place]
        y = first_tensor(run(model, recording.batches[index]))
        squares = (y - recording.outputs[index]).square()
        real = recording.real_outputs(index)
        return (squares if real is None else squares[real]).mean() / size

    with only_trainable(model, weights):
        return descent.run(weights, len(trained_on), loss)
