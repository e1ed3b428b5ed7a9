"""A forecast of a conversion without training: the least that attention of rank s must lose.

A = softmax(q k^T) of a sequence has singular values; no kernel with s features comes nearer than its
truncated SVD A_s. What is lost of a head's output is ||(A - A_s) v||. A new layer shares its features between
sequences, so it loses more. The forecast ranks layers and ranks; it is no bound of the trained error.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.analysis.capture import LayerChoice, capture_chosen, choose_layers
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.analysis.conversion.recording import first_tensor, run
from kernel_attention.analysis.conversion.transfer import evaluating
from kernel_attention.errors import InputError, require_positive

_PLACES = ("previous", "itself", "next", "first", "last")
_LOOKS = 0.5  # mean weight from which a head is said to look at one place


@dataclass(frozen=True)
class LayerForecast:
    """The forecast of one layer.

    Attributes:
        path: dotted name.
        matrix_errors: ||A - A_s|| / ||A||, root mean square over the sequences, (ranks, h).
        output_errors: the share of the variance over the tokens of A v that A_s v misses, (ranks, h).
        losses: the same of all heads together, (ranks,).
        looks_at: of each head, the one place with half of the weight or more: "previous", "itself", "next",
            "first" or "last" token; None where there is none.
        constant_loss: the share of the variance of the model's own outputs that is lost where this layer
            gives every token the same, the mean.
    """

    path: str
    matrix_errors: Tensor
    output_errors: Tensor
    losses: Tensor
    looks_at: tuple[str | None, ...]
    constant_loss: float


@dataclass(frozen=True)
class ConversionForecast:
    """The forecast of a model; ``str`` gives a table.

    Attributes:
        layers: first to last.
        ranks: s, ascending.
        num_sequences: that were read.
        num_tokens: real tokens of them.
    """

    layers: tuple[LayerForecast, ...]
    ranks: tuple[int, ...]
    num_sequences: int
    num_tokens: int

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        lines = [
            f"{'layer':{width}} "
            + " ".join(f"rank {rank:<3}" for rank in self.ranks)
            + " constant  one place"
        ]
        for layer in self.layers:
            losses = " ".join(f"{loss:8.4f}" for loss in layer.losses.tolist())
            looks = ", ".join(f"head {i} {place}" for i, place in enumerate(layer.looks_at) if place)
            lines.append(f"{layer.path:{width}} {losses} {layer.constant_loss:8.4f}  {looks or '-'}")
        lines.append(
            "share of the heads' variance that the best kernel of this rank misses, and of the variance of "
            "the model's outputs that is lost where the layer's output is constant; "
            f"{self.num_sequences} sequences, {self.num_tokens} tokens"
        )
        return "\n".join(lines)

    def picture(self) -> Tensor:
        """``output_errors`` of all layers, (layers, ranks, h), for a picture of rows of heads."""
        return torch.stack([layer.output_errors for layer in self.layers])


@torch.no_grad()
def forecast_conversion(
    model: nn.Module,
    data: Iterable[Any],
    *,
    layers: LayerChoice = "all",
    ranks: Sequence[int] = (4, 8, 16, 32),
    max_sequences: int = 64,
) -> ConversionForecast:
    """How well attention of rank s can do what each layer and head of a trained model does on data.

    Nothing is trained and nothing changes. The attention of a sequence is formed and decomposed: O(N^3) time.

    Args:
        model: any whose attention ``kernel_attention.analysis.capture`` finds.
        data: batches that the model takes; the reading ends after ``max_sequences``.
        layers: which, as in ``capture``.
        ranks: s.
        max_sequences: that are read.

    Raises:
        InputError: where there are no batches, no attention, or a layer has no attention matrix.
    """
    require_positive(max_sequences=max_sequences)
    ranks = tuple(sorted(ranks))
    for rank in ranks:
        require_positive(ranks=rank)
    if isinstance(data, Tensor | str | dict):
        raise InputError(f"data is a {type(data).__name__}, expected an iterable of batches: [batch] for one")
    found: dict[str, _Sums] = {}
    names: list[str] | None = None
    losses = _ConstantLosses(model)
    sequences = tokens = 0
    for batch in data:
        if names is None:
            names = choose_layers(model, batch, layers)
            found = {name: _Sums(ranks) for name in names}
        captured = capture_chosen(model, batch, names)
        first = next(iter(captured.values()))
        read = range(min(first.num_sequences, max_sequences - sequences))
        for name, case in itertools.product(names, read):
            found[name].add(captured[name], case)
        losses.add(batch, names)
        sequences, tokens = sequences + len(read), tokens + int(first.real_keys[: len(read)].sum())
        if sequences >= max_sequences:
            break
    if names is None:
        raise InputError("data holds no batch; expected batches that the model takes")
    parts = tuple(found[name].forecast(name, losses.of(name)) for name in names)
    return ConversionForecast(parts, ranks, sequences, tokens)


class _Sums:
    """Sums over the sequences of one layer."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.count = 0
        self.missed: Any = 0  # ||A - A_s||^2 / ||A||^2, (ranks, h)
        self.lost: Any = 0  # ||(A - A_s) v||^2, (ranks, h)
        self.outputs: Any = 0  # sums of A v, (h, p)
        self.squares: Any = 0  # and of its squares, (h,)
        self.tokens = 0
        self.places: Any = 0  # mean weights of _PLACES, (h, places)

    def add(self, attention: CapturedAttention, case: int) -> None:
        matrix, parts = attention.matrix(case), attention.parts(case)
        if matrix is None or parts is None or parts[2] is None:
            raise InputError(
                f"layers: {attention.name} ({attention.mechanism}) has no attention matrix that weighs values"
            )
        a, v = matrix.double(), parts[2].double()
        _, values, right = torch.linalg.svd(a, full_matrices=False)
        energy = values.square()
        coefficients = values[..., None] * (right @ v)  # of A v in the left singular vectors
        y = a @ v
        for_rank = [
            (energy[:, rank:].sum(-1), coefficients[:, rank:].square().sum((-2, -1))) for rank in self.ranks
        ]
        self.missed = self.missed + torch.stack([m for m, _ in for_rank]) / energy.sum(-1)
        self.lost = self.lost + torch.stack([lost for _, lost in for_rank])
        self.outputs, self.squares = self.outputs + y.sum(1), self.squares + y.square().sum((-2, -1))
        self.tokens, self.count = self.tokens + y.size(1), self.count + 1
        self.places = self.places + _weights_at_places(a)

    def forecast(self, name: str, constant_loss: float) -> LayerForecast:
        variance = (self.squares - self.outputs.square().sum(-1) / self.tokens).clamp_min(1e-300)
        looks = [
            _PLACES[int(weights.argmax())] if weights.max() >= _LOOKS else None
            for weights in self.places / self.count
        ]
        return LayerForecast(
            name,
            (self.missed / self.count).sqrt(),
            self.lost / variance,
            self.lost.sum(-1) / variance.sum(),
            tuple(looks),
            constant_loss,
        )


class _ConstantLosses:
    """Losses of a model where one layer gives every token the mean of its outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.lost: dict[str, float] = {}
        self.count = 0
        self.sums: Any = 0
        self.squares = 0.0

    def add(self, batch: Any, names: Sequence[str]) -> None:
        with evaluating(self.model):
            y = self._outputs(batch)
            self.count, self.sums = self.count + len(y), self.sums + y.sum(0)
            self.squares += float(y.square().sum())
            for name in names:
                handle = self.model.get_submodule(name).register_forward_hook(_constant)
                try:
                    lost = float((self._outputs(batch) - y).square().sum())
                finally:
                    handle.remove()
                self.lost[name] = self.lost.get(name, 0.0) + lost

    def _outputs(self, batch: Any) -> Tensor:
        y = first_tensor(run(self.model, batch))
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if mask is not None and mask.shape == y.shape[:-1]:
            return y[mask > 0].double()
        return y.flatten(0, -2).double()

    def of(self, name: str) -> float:
        variance = self.squares - float(self.sums.square().sum()) / self.count
        return self.lost[name] / max(variance, 1e-300)


def _constant(module: nn.Module, given: Any, output: Any) -> Any:
    y = first_tensor(output)
    mean = y.flatten(0, -2).mean(0).expand_as(y)
    return mean if isinstance(output, Tensor) else (mean, *output[1:])


def _weights_at_places(a: Tensor) -> Tensor:
    """Mean weight of the previous token, the token itself, the next, the first and the last, (h, 5)."""
    diagonals = [
        a.diagonal(offset, -2, -1).sum(-1) / max(1, a.size(-1) - abs(offset)) for offset in (-1, 0, 1)
    ]
    return torch.stack([*diagonals, a[..., 0].mean(-1), a[..., -1].mean(-1)], dim=-1)
