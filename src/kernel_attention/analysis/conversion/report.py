"""The findings of a conversion, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_attention.analysis.conversion.cost import LayerPrice
from kernel_attention.hosts.replace import ReplacementReport


@dataclass(frozen=True)
class ConvertedLayer:
    """The conversion of one layer.

    Errors are the share of the variance of the old layer's outputs that the new layer misses, on batches that
    are not trained on: 0 = the same outputs, 1 = as good as the best constant.

    Attributes:
        path: dotted name of the module.
        old: class of the module that was replaced.
        attention: name of the new mechanism.
        options: its options, including those taken from the host.
        carried_error: with the weights that ``replace_attention`` carries over.
        start_error: at the start of the training.
        error: after attention transfer.
        steps: of the transfer.
        seconds: of start and transfer.
        is_converted: False where ``layers="auto"`` left the old layer.
        cost: the model's ``error`` with this layer alone converted; known with "auto".
    """

    path: str
    old: str
    attention: str
    options: Mapping[str, Any]
    carried_error: float
    start_error: float
    error: float
    steps: int
    seconds: float
    is_converted: bool = True
    cost: float | None = None


@dataclass(frozen=True)
class LayerPrices:
    """The price of a kind of layer before and after, measured on the first layer of the kind.

    Attributes:
        path: of that layer.
        attention: name of the new mechanism.
        before: the price of the old layer by number of tokens; lengths that it cannot read are absent.
        after: of the new layer.
    """

    path: str
    attention: str
    before: Mapping[int, LayerPrice]
    after: Mapping[int, LayerPrice]

    @property
    def pays_from(self) -> int | None:
        """The least measured number of tokens from which on the new layer is faster; None: nowhere."""
        found = None
        for length in sorted(self.before.keys() & self.after.keys(), reverse=True):
            if self.after[length].milliseconds >= self.before[length].milliseconds:
                break
            found = length
        return found

    def __str__(self) -> str:
        lines = []
        for length in sorted(self.before.keys() | self.after.keys()):
            sides = [side.get(length) for side in (self.before, self.after)]
            times = " -> ".join("-" if x is None else f"{x.milliseconds:.2f}" for x in sides)
            sizes = " -> ".join("-" if x is None else f"{x.peak_bytes / 2**20:.1f}" for x in sides)
            lines.append(f"{length:6} tokens: {times} ms, {sizes} MiB")
        pays = "is slower at every length measured"
        if self.pays_from is not None:
            pays = f"is faster from {self.pays_from} tokens on"
        return "\n".join([f"one sequence in {self.path}, {self.attention} {pays}", *lines])


@dataclass(frozen=True)
class ConversionReport:
    """The conversion of a model; ``str`` gives a table.

    Attributes:
        layers: first to last.
        replaced: the report of ``replace_attention``.
        carried_error: share of the variance of the model's own outputs that the converted model missed
            before any training, on batches that are not trained on.
        error: the same after the conversion.
        cosine: mean cosine similarity of the outputs of both models, token by token.
        num_batches: of the data that were read; the last eighth of them is held out.
        recorded_bytes: of the recordings.
        end_to_end_steps: made on the whole model.
        seconds: of everything.
        finished: False where ``time_limit`` ended a training before its last step.
        neighbours: the share of the nearest neighbours among the held-out sequences, by the cosine of their
            mean outputs, that are nearest in the old model too: of 10, or of half of the others where they
            are few. None for less than three sequences.
        prices: time and memory of one layer of every kind.
    """

    layers: tuple[ConvertedLayer, ...]
    replaced: ReplacementReport
    carried_error: float
    error: float
    cosine: float
    num_batches: int
    recorded_bytes: int
    end_to_end_steps: int
    seconds: float
    finished: bool
    neighbours: float | None = None
    prices: tuple[LayerPrices, ...] = ()

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        is_auto = any(layer.cost is not None for layer in self.layers)
        head = f"{'layer':{width}}  {'attention':16} carried   start   after  steps  seconds"
        lines = [head + ("   cost" if is_auto else "")]
        for layer in self.layers:
            errors = (layer.carried_error, layer.start_error, layer.error)
            numbers = " ".join(f"{_short(error):>7}" for error in errors)
            lines.append(
                f"{layer.path:{width}}  {layer.attention:16} {numbers}  {layer.steps:5}  {layer.seconds:7.1f}"
                + (f"{'':2}{_short(layer.cost):>5}" if layer.cost is not None else "")
                + ("" if layer.is_converted else "  left as it was")
            )
        lines.append(
            f"the model's own output: error {_short(self.carried_error)} before any training, "
            f"{_short(self.error)} after it; cosine {self.cosine:.3f} to the old model's"
            + ("" if self.neighbours is None else f", {self.neighbours:.2f} of the nearest neighbours kept")
        )
        lines += [str(prices) for prices in self.prices]
        lines.append(
            f"{self.num_batches} batches, {self.recorded_bytes / 2**20:.0f} MiB recorded, "
            f"{self.seconds:.0f} s" + ("" if self.finished else "; time_limit ended the training early")
        )
        return "\n".join(lines)


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"
