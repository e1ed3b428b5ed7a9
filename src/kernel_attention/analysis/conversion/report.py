"""The findings of a conversion, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        lines = [f"{'layer':{width}}  {'attention':16} carried   start   after  steps  seconds"]
        for layer in self.layers:
            errors = (layer.carried_error, layer.start_error, layer.error)
            numbers = " ".join(f"{_short(error):>7}" for error in errors)
            lines.append(
                f"{layer.path:{width}}  {layer.attention:16} {numbers}  {layer.steps:5}  {layer.seconds:7.1f}"
            )
        lines.append(
            f"the model's own output: error {_short(self.carried_error)} before any training, "
            f"{_short(self.error)} after it; cosine {self.cosine:.3f} to the old model's"
        )
        lines.append(
            f"{self.num_batches} batches, {self.recorded_bytes / 2**20:.0f} MiB recorded, "
            f"{self.seconds:.0f} s" + ("" if self.finished else "; time_limit ended the training early")
        )
        return "\n".join(lines)


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"
