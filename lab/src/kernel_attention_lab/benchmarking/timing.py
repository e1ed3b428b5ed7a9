"""Interleaved rounds: every round times each contender once, in a new random order.

So a slow minute of the machine affects all contenders, and none always follows the same one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention_lab.benchmarking.bodies import WholeModel
from kernel_attention_lab.benchmarking.contenders import Contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.plans import Setting

Times = dict[str, dict[str, list[float]]]  # contender -> pass -> seconds, one per round


def layer_and_data(
    make: Callable[[Setting], nn.Module], setting: Setting
) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer with seeded weights, its input, and a cotangent of its output.

    The input requires a gradient, as that of a layer inside a model does; that of a whole model does not.
    """
    torch.manual_seed(0)
    layer = make(setting)
    if (setting.device, setting.dtype) != ("cpu", "float32"):  # tensors without values cannot be moved
        layer = layer.to(setting.device, setting.torch_dtype)
    where: dict[str, Any] = {"device": setting.device, "dtype": setting.torch_dtype}
    if isinstance(layer, WholeModel):
        x = layer.draw_input(setting.batch_size, **where)
        return layer, x, torch.randn((setting.batch_size, *layer.output_size), **where)
    x, cotangent = (torch.randn(setting.batch_size, setting.length, setting.embed_dim, **where) for _ in "xy")
    return layer, x.requires_grad_(), cotangent


def forward(layer: nn.Module, x: Tensor) -> None:
    """One pass in inference, of a layer in evaluation mode."""
    with torch.no_grad():
        layer(x)


def step(layer: nn.Module, x: Tensor, cotangent: Tensor) -> None:
    """One forward and backward pass of a layer in training mode, including its objective.

    The output gets a fixed cotangent. A loss would add the same time to every contender, which would make the
    slow ones look better.
    """
    y = layer(x)
    own = penalty(layer)
    if own is None or not own.requires_grad:
        y.backward(cotangent)
    else:
        torch.autograd.backward([y, own], [cotangent, None])


def seconds(kind: str, layer: nn.Module, x: Tensor, cotangent: Tensor) -> float:
    """Seconds of one pass, "forward" or "step"."""
    layer.train(kind == "step")
    layer.zero_grad(set_to_none=True)
    x.grad = None
    wait = torch.cuda.synchronize if x.is_cuda else _nothing
    wait()
    start = time.perf_counter()
    if kind == "forward":
        forward(layer, x)
    else:
        step(layer, x, cotangent)
    wait()
    return time.perf_counter() - start


def time_rounds(
    contenders: Sequence[Contender],
    setting: Setting,
    passes: Sequence[str],
    rounds: int,
    *,
    warmup: int = 1,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda line: None,
) -> tuple[Times, list[list[str]], dict[str, str]]:
    """Seconds of every contender in every round, the orders of the rounds, and failures with their reasons.

    A contender that raises an error is left out afterwards. Only the input is shared. All layers stay alive,
    so that none is timed with freshly allocated memory.
    """
    torch.set_num_threads(setting.threads)
    runs: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}
    failed: dict[str, str] = {}
    for contender in contenders:
        on_progress(f"{contender.name}: warm-up")
        try:
            run = layer_and_data(contender.make, setting)
            for _ in range(warmup):
                for kind in passes:
                    seconds(kind, *run)
            runs[contender.name] = run
        except Exception as error:  # of compilers too
            failed[contender.name] = reason(error)
    shuffle = random.Random(seed).shuffle
    times: Times = {name: {kind: [] for kind in passes} for name in runs}
    orders = []
    for turn in range(rounds):
        order = list(runs)
        shuffle(order)
        orders.append(order)
        on_progress(f"round {turn + 1} of {rounds}")
        for name in order:
            for kind in passes:
                times[name][kind].append(seconds(kind, *runs[name]))
    return times, orders, failed


def summarize(times: Times, baseline: str) -> dict[str, dict[str, dict[str, object]]]:
    """Median and quartiles of the seconds, and of their ratio to the baseline's within each round."""
    return {
        name: {kind: _figures(own, times.get(baseline, {}).get(kind)) for kind, own in kinds.items()}
        for name, kinds in times.items()
    }


def _figures(own: list[float], baseline: list[float] | None) -> dict[str, object]:
    figures: dict[str, object] = {"seconds": own, **_quartiles("", own)}
    if baseline:
        ratios = [mine / theirs for mine, theirs in zip(own, baseline, strict=True)]
        figures |= _quartiles("ratio_", ratios)
    return figures


def _quartiles(prefix: str, values: list[float]) -> Mapping[str, float]:
    lower, median, upper = (float(value) for value in np.quantile(values, [0.25, 0.5, 0.75]))
    return {f"{prefix}median": median, f"{prefix}lower": lower, f"{prefix}upper": upper}


def reason(error: BaseException) -> str:
    """The error in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _nothing() -> None:
    pass
