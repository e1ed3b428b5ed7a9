"""Perplexity of a causal model by sliding window.

Legend: T tokens of a text, L context, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError, require_positive


class Perplexity(NamedTuple):
    """exp of the mean negative log-likelihood of ``tokens`` predictions; ``loss`` is that mean, in nats."""

    perplexity: float
    loss: float
    tokens: int


class Window(NamedTuple):
    """Positions ``start`` to ``stop - 1`` are read; the predictions made at the last ``counted`` count."""

    start: int
    stop: int
    counted: int


def sliding_windows(predictions: int, context: int, stride: int) -> Iterator[Window]:
    """Windows whose counted positions are 0 to ``predictions - 1``, each once.

    All positions of the first window count, then the last ``stride`` of every next one: the kernel-PCA
    paper's evaluation at stride 1 (appendix A.4), side by side at ``stride=context``. The last window counts
    what is left over.
    """
    stop = min(context, predictions)
    yield Window(0, stop, stop)
    while stop < predictions:
        counted = min(stride, predictions - stop)
        stop += counted
        yield Window(stop - context, stop, counted)


@torch.inference_mode()
def perplexity(
    model: nn.Module,
    tokens: Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int = 16,
    targets: Tensor | None = None,
    precision: str = "32-true",
) -> Perplexity:
    """Perplexity of a text, every token but the first predicted once.

    Args:
        model: tokens (B, N) and ``last`` -> logits (B, last, V); it is put into evaluation mode.
        tokens: (T,), T at least 2.
        context: L, the window's length.
        stride: how far the window moves, 1 to ``context`` (default). A smaller one gives every token a longer
            past and costs ``context / stride`` times as much.
        batch_size: windows at once.
        targets: (T - 1,), what to predict instead of ``tokens[1:]``: the clean text of an attacked input.
        precision: of the run: "32-true", "bf16-mixed" or "16-mixed".

    Raises:
        InputError: for a text, context or stride out of range.
    """
    stride = context if stride is None else stride
    require_positive(context=context, stride=stride, batch_size=batch_size)
    if stride > context:
        raise InputError(
            f"stride={stride} exceeds context={context}: tokens between windows would be left out"
        )
    if tokens.dim() != 1 or len(tokens) < 2:
        raise InputError(f"tokens has shape {tuple(tokens.shape)}, expected (T,) with T at least 2")
    targets = tokens[1:] if targets is None else targets
    if targets.shape != (len(tokens) - 1,):
        raise InputError(f"targets has shape {tuple(targets.shape)}, expected ({len(tokens) - 1},)")
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    model.eval()
    total = 0.0
    with torch.autocast(device.type, dtype=dtype, enabled=precision.endswith("-mixed")):
        for group in _groups(len(targets), context, stride, batch_size):
            total += _loss(model, tokens, targets, group, device)
    mean = total / len(targets)
    return Perplexity(math.exp(mean) if mean < 700.0 else math.inf, mean, len(targets))


def _groups(predictions: int, context: int, stride: int, batch_size: int) -> Iterator[list[Window]]:
    """Windows of one shape, at most ``batch_size`` at once."""
    group: list[Window] = []
    for window in sliding_windows(predictions, context, stride):
        if group and (len(group) == batch_size or window.counted != group[0].counted):
            yield group
            group = []
        group.append(window)
    yield group


def _loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, windows: list[Window], device: torch.device
) -> float:
    """Sum of the negative log-likelihoods that count."""
    counted = windows[0].counted
    inputs = torch.stack([tokens[window.start : window.stop] for window in windows])
    wanted = torch.stack([targets[window.stop - counted : window.stop] for window in windows])
    logits = model(inputs.to(device), last=counted)
    loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten().to(device), reduction="none")
    return loss.double().sum().item()
