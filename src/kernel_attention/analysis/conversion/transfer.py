"""Attention transfer: the start of a new layer, and its training on recorded calls of the old one.

Beside it: the agreement of a converted model with the old one, and the choice of layers by its loss. The old
model stays as it is: hooks give the new layer what the old one is given, and put its output in its place.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import (
    AttentionCall,
    Recording,
    first_tensor,
    projection_beside,
    run,
)
from kernel_attention.analysis.distillation import primal_values_from_softmax
from kernel_attention.analysis.initialization import ridge_solution
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.projections import carry
from kernel_attention.hosts.replace import PlannedLayer
from kernel_attention.hosts.sites import Site
from kernel_attention.mechanisms import create_attention

_RIDGE = 1e-3
_MOST_ATTENTION = 2**22  # numbers of the attention matrices that a fit forms


@torch.no_grad()
def start_layer(
    start: str, plan: PlannedLayer, layer: nn.Module, calls: Sequence[AttentionCall], seed: int
) -> None:
    """Set the weights of a replaced layer, which holds the carried ones; see ``convert_attention``."""
    if start == "random":
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            plan.layer.reset_parameters()
    if start != "fitted" or plan.site.host_class is InterfaceAttention:
        return
    if plan.name == "primal_values":
        _fit_scores(plan, calls, seed)
    _fit_output(plan, layer, calls)


def _fit_scores(plan: PlannedLayer, calls: Sequence[AttentionCall], seed: int) -> None:
    """The old attention's truncated SVD between the features' spans, by the mean Gram matrices of sequences.

    There are as many sequences as ``_MOST_ATTENTION`` allows. A descent of each sequence's own objective
    from there takes minutes, and the transfer after it ends no lower.
    """
    x, real = _sequences(plan, calls)
    like = plan.host
    teacher = create_attention("softmax", like.embed_dim, like.num_heads, bias=like.bias)
    carry(teacher.to(x.device, x.dtype), like.sources)
    names = ("rank", "feature_map", "normalize")
    options: dict[str, Any] = {name: plan.layer.option_value(name) for name in names}
    fitted = primal_values_from_softmax(teacher, x, attention_mask=real, steps=0, seed=seed, **options)
    plan.layer.load_state_dict(fitted.layer.state_dict())


def _sequences(plan: PlannedLayer, calls: Sequence[AttentionCall]) -> tuple[Tensor, Tensor]:
    """The layer's inputs, padded to one length, (B, N, d) and (B, N)."""
    length = max(_batch_first(plan, call.real).size(1) for call in calls)
    most = max(1, _MOST_ATTENTION // (plan.host.num_heads * length**2))
    inputs, masks = [], []
    for call in calls:
        x = _batch_first(plan, next(iter((*call.arguments, *call.named.values()))))
        real = _batch_first(plan, call.real)
        more = length - x.size(1)
        inputs.append(nn.functional.pad(x, (0, 0, 0, more)))
        masks.append(nn.functional.pad(real, (0, more)))
    chosen = slice(0, None, max(1, sum(map(len, inputs)) // most))
    return torch.cat(inputs)[chosen], torch.cat(masks)[chosen]


def _batch_first(plan: PlannedLayer, x: Tensor) -> Tensor:
    """A tensor (B, N, ...) of a host that may have (N, B, ...)."""
    return x.transpose(0, 1) if getattr(plan.site.module, "batch_first", True) is False else x


def _fit_output(plan: PlannedLayer, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """``out_proj`` by ridge regression of the old outputs on what reaches it."""
    out = getattr(plan.layer, "out_proj", None)
    if not isinstance(out, nn.Linear):
        return
    seen: list[Tensor] = []
    rows = out.in_features + (out.bias is not None)
    gram = out.weight.new_zeros(rows, rows, dtype=torch.float64)
    cross = gram.new_zeros(rows, out.out_features)
    handle = out.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        for call in calls:
            seen.clear()
            layer(*call.arguments, **call.named)
            real, wanted = _batch_first(plan, call.real), _batch_first(plan, call.output)
            z, y = seen[0][real].double(), wanted[real].double()
            if out.bias is not None:
                z = nn.functional.pad(z, (0, 1), value=1.0)
            gram, cross = gram + z.mT @ z, cross + z.mT @ y
    finally:
        handle.remove()
    weight = ridge_solution(gram, cross, _RIDGE).to(out.weight.dtype)
    if out.bias is not None:
        out.bias.copy_(weight[-1])
        weight = weight[:-1]
    out.weight.copy_(weight.mT)


_WARM_UP = 0.1  # of the steps
_LARGEST_GRADIENT = 1.0  # norm, of a loss whose size is about 1


@dataclass(frozen=True)
class Descent:
    """At most ``steps`` of Adam, a batch each, with a linear warm-up and a cosine to zero.

    ``deadline`` is a time of ``time.monotonic`` after which no step begins; ``seed`` gives the order of the
    batches.
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


class Agreement(NamedTuple):
    """The agreement of a model with the old one on batches: see ``ConversionReport``."""

    error: float
    cosine: float
    neighbours: float | None


@torch.no_grad()
def measure_agreement(model: nn.Module, recording: Recording, held_out: range) -> Agreement:
    """The share of the old outputs' variance that is missed, mean cosine similarity, neighbours kept."""
    pairs, means = [], []
    for index in held_out:
        y, wanted = first_tensor(run(model, recording.batches[index])), recording.outputs[index]
        real = recording.real_outputs(index)
        pairs.append((y[real], wanted[real]) if real is not None else (y, wanted))
        if (layout := recording.sequences(index)) is not None:
            means.append([layout(z) for z in (y, wanted)])
    found, wanted = (torch.cat([p[side].flatten(0, -2) for p in pairs]).double() for side in (0, 1))
    size = (wanted - wanted.mean(dim=0)).square().sum().clamp_min(1e-300)
    cosine = nn.functional.cosine_similarity(found, wanted, dim=-1).mean()
    kept = None
    if means:
        after, before = (torch.cat([mean[side] for mean in means]) for side in (0, 1))
        kept = neighbours_kept(before, after)
    return Agreement(float((found - wanted).square().sum() / size), float(cosine), kept)


def neighbours_kept(before: Tensor, after: Tensor, most: int = 10) -> float | None:
    """The share of every row's nearest rows by the cosine before, (B, d), that are nearest after, too."""
    count = min(most, (len(before) - 1) // 2)
    if count < 1:
        return None
    near = []
    for rows in (before, after):
        x = nn.functional.normalize(rows.double(), dim=-1)
        near.append((x @ x.mT).fill_diagonal_(-2).topk(count).indices)
    return float((near[0][:, :, None] == near[1][:, None, :]).any(-1).double().mean())


@contextmanager
def converted_meanwhile(old: Sequence[Site], new: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block these layers of a model do what the new ones do."""
    with ExitStack() as stack:
        for site, layer in zip(old, new, strict=True):
            projection = projection_beside(site)
            stack.callback(site.module.register_forward_hook(_Instead(layer), with_kwargs=True).remove)
            if projection is not None:  # the new layer holds a copy of it
                stack.callback(projection.register_forward_hook(lambda module, given, y: given[0]).remove)
        yield


class _Instead:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, arguments: Any, named: Any, output: Any) -> Any:
        y = first_tensor(self.layer(*arguments, **named))
        return y if isinstance(output, Tensor) else (y, *output[1:])


def choose_greedily(
    count: int, loss: Callable[[Sequence[int]], float], tolerance: float, is_late: Callable[[], bool]
) -> tuple[list[int], list[float]]:
    """Add the layer whose conversion costs least, as long as the loss with these layers converted is within
    ``tolerance``.

    ``is_late`` ends the choice. Returns the layers in the order of the choice, and the loss with each layer
    alone.
    """
    alone = [loss([index]) for index in range(count)]
    chosen: list[int] = []
    while len(chosen) < count and not is_late():
        rest = [index for index in range(count) if index not in chosen]
        losses = {index: loss([*chosen, index]) if chosen else alone[index] for index in rest}
        best = min(rest, key=lambda index: losses[index])
        if not losses[best] <= tolerance:
            break
        chosen.append(best)
    return chosen, alone
