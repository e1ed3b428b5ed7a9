"""Diagnostics of the attention layers of any model, as data; the pictures are drawn in reporting."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.analysis.capture import Batch, LayerChoice, capture_chosen, choose_layers
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.analysis.layer_measures import QUANTITIES, CaseSettings, above_diagonal, measure_case
from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.files import write_atomically

if TYPE_CHECKING:
    from kernel_attention.solvers import ProjectionLoss


_EXPLAINED = 0.9
_MEANS_OF_ALL = (
    *("effective_rank", "head_distance", "output_distance"),
    *("projection_error", "projection_output", "objective", "mode_rank"),
)


@dataclass(frozen=True)
class LayerDiagnostics:
    """The measurements of one layer on C sequences with h heads; every array is also an attribute.

    Arrays, where the layer has them and they were asked for:

    * ``singular_values`` (h, K): over the largest of their matrix, mean over the sequences, zero past N;
    * ``explained_variance`` (h, K): cumulative share of the squared singular values, mean over the sequences;
    * ``effective_rank`` (C, h): exp of the spectrum's entropy;
    * ``mode_singular_values``, ``mode_explained_variance`` (D, h, K) and ``mode_rank`` (C, D, h): the same of
      each unfolding of a kernel tensor of order D;
    * ``head_distances`` (h, h): L2 distance between rows of the heads' matrices, mean over rows and
      sequences; ``head_distance`` (C,) its mean over pairs, ``output_distance`` (C,) the same of the heads'
      outputs A V;
    * ``matrix_distances`` (C, h, h): L2 (Frobenius) distance between the heads' whole matrices;
      ``output_matrix_distances`` (C, h, h) the same of A V;
    * ``projection_error`` (C, h): J_proj, equation 13; ``projection_log_length`` and ``projection_output``
      (C, h) its parts, ``released_log_length`` and ``released_output`` (C, h) those of the released form:
      see ``kernel_attention.solvers.ProjectionLoss``;
    * ``gamma_spread``, ``gamma_deviation``, ``gamma_eigenvalue``, ``gamma_cosine`` (C, h, p): see
      ``kernel_attention.solvers.EigenvalueRatios``;
    * ``objective`` (C,): J;
    * ``attention_map`` (h, n, n) of the first sequence, and its scores ``scores_e``, ``scores_r`` (primal) or
      ``scores_1`` .. (multilinear), (h, n, rank).

    Attributes:
        name: dotted name of the module.
        index: place among the layers measured.
        mechanism: name of the mechanism, of other libraries' modules the class.
        lengths: real tokens of every sequence.
        values: the arrays by name, float32 on the CPU.
        notes: what was sampled or left out, and why.
    """

    MEANS: ClassVar[frozenset[str]] = frozenset(
        (
            *("singular_values", "explained_variance", "head_distances"),
            *("mode_singular_values", "mode_explained_variance"),
        )
    )
    PER_CASE: ClassVar[frozenset[str]] = frozenset(
        (
            *("effective_rank", "mode_rank", "head_distance", "output_distance", "objective"),
            *("matrix_distances", "output_matrix_distances"),
            *("projection_error", "projection_log_length", "projection_output"),
            *("released_log_length", "released_output"),
            *("gamma_spread", "gamma_deviation", "gamma_eigenvalue", "gamma_cosine"),
        )
    )

    name: str
    index: int
    mechanism: str
    lengths: tuple[int, ...]
    values: Mapping[str, Tensor] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Tensor:
        values: Mapping[str, Tensor] = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"layer {self.__dict__.get('name')} has no {name} (it has: {', '.join(values)})")

    def summary(self) -> dict[str, float]:
        """One number per quantity: means over sequences, heads and modes; for gamma medians over columns too.

        The deviations of distances are over the sequences and the pairs of heads.
        ``projection_log_length`` is the logarithm of the mean length, and ``released_projection_error`` that
        of the mean loss in the released form, which is left out where it has none.
        """
        values = self.values
        found: dict[str, float] = {}
        for kind in ("", "mode_"):
            if f"{kind}explained_variance" in values:
                reached = (values[f"{kind}explained_variance"] < _EXPLAINED).sum(-1) + 1
                found[f"{kind}values_for_90_percent"] = float(reached.float().mean())
        for key in _MEANS_OF_ALL:
            if key in values:
                found[key] = float(values[key].nanmean())
        for key in ("matrix_distance", "output_matrix_distance"):
            pairs = above_diagonal(values[f"{key}s"]) if f"{key}s" in values else torch.empty(0)
            if pairs.numel():
                found[key] = float(pairs.mean())
                found[f"{key}_deviation"] = float(pairs.std(correction=0))
        if "projection_error" in values:  # the exponential of one query far from all keys outweighs the rest
            found["projection_error_median"] = float(values["projection_error"].median())
            found["projection_log_length"] = float(self._pooled("projection").log_length)
            if "released_output" in values:
                found["released_projection_error"] = float(self._pooled("released").log_error)
        for key in ("gamma_spread", "gamma_deviation", "gamma_eigenvalue", "gamma_cosine"):
            if key in values:
                found[key] = float(values[key].abs().nanmedian())
        if "gamma_spread" in values:
            ratio = values["gamma_spread"] / values["gamma_eigenvalue"].abs()
            found["gamma_relative_spread"] = float(ratio.nanmedian())
        return {key: value for key, value in found.items() if math.isfinite(value)}

    def record(self) -> dict[str, Any]:
        """The figures for tables and pictures, in JSON's types; a number that is not finite is None.

        ``by_head`` has the mean (J_proj and gamma: median) over the sequences for every head, or pair of
        heads; ``explained_variance`` (K,) and ``mode_explained_variance`` (D, K) are means over the heads.
        ``gamma`` has the median over sequences and heads of every column's spread, deviation and eigenvalue.
        """
        values = self.values
        found: dict[str, Any] = {"name": self.name, "layer": self.index, "mechanism": self.mechanism}
        found["sequences"] = len(self.lengths)
        found["tokens"] = sorted({min(self.lengths, default=0), max(self.lengths, default=0)})
        found |= {"summary": self.summary(), "by_head": self._by_head(), "notes": list(self.notes)}
        if "gamma_spread" in values:
            parts = ("spread", "deviation", "eigenvalue")
            columns = {part: values[f"gamma_{part}"].abs().flatten(0, 1) for part in parts}
            found["gamma"] = {part: _plain(each.nanmedian(0).values) for part, each in columns.items()}
        for key in ("explained_variance", "mode_explained_variance"):
            if key in values:
                found[key] = values[key].mean(-2).tolist()
        return found

    def _by_head(self) -> dict[str, list[float | None]]:
        values = self.values
        found: dict[str, list[float | None]] = {}
        if "effective_rank" in values:
            found["effective_rank"] = _plain(values["effective_rank"].mean(0))
        if "head_distances" in values and values["head_distances"].size(0) > 1:
            found["head_distance"] = _plain(above_diagonal(values["head_distances"]))
            found["matrix_distance"] = _plain(above_diagonal(values["matrix_distances"]).mean(0))
        if "projection_error" in values:
            found["projection_error"] = _plain(values["projection_error"].median(0).values)
        if "released_output" in values:
            heads = values["released_output"].size(1)
            errors = [self._pooled("released", head).log_error for head in range(heads)]
            found["released_projection_error"] = _plain(torch.stack(errors))
        if "gamma_spread" in values:
            ratio = values["gamma_spread"] / values["gamma_eigenvalue"].abs()
            found["gamma_relative_spread"] = _plain(ratio.transpose(0, 1).flatten(1).nanmedian(-1).values)
        if "objective" in values:
            found["objective"] = _plain(values["objective"].mean(0, keepdim=True))
        return found

    def _pooled(self, form: str, heads: int | slice = slice(None)) -> ProjectionLoss:
        """The parts of J_proj's mean over the sequences and these heads; ``form`` begins their names."""
        from kernel_attention.solvers import ProjectionLoss  # scikit-learn takes a second, and is an extra

        parts = (self.values[f"{form}_{part}"][:, heads] for part in ("log_length", "output"))
        return ProjectionLoss(*parts).pooled()


def _plain(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


class DiagnosticsReport(Mapping[str, LayerDiagnostics]):
    """The layers measured, first to last, by dotted name, by the one module around them, or by place."""

    def __init__(self, layers: tuple[LayerDiagnostics, ...]) -> None:
        self.layers = layers

    def __getitem__(self, key: str | int) -> LayerDiagnostics:
        if isinstance(key, int):
            if not -len(self.layers) <= key < len(self.layers):
                raise InputError(f"layer {key} is out of range; the report has {len(self.layers)} layers")
            return self.layers[key]
        exact = [layer for layer in self.layers if layer.name == key]
        inside = exact or [layer for layer in self.layers if layer.name.startswith(f"{key}.")]
        if len(inside) > 1:
            raise InputError(f"layer {key!r} means {', '.join(layer.name for layer in inside)}")
        if not inside:
            raise unknown("layer", key, [layer.name for layer in self.layers])
        return inside[0]

    def __iter__(self) -> Iterator[str]:
        return (layer.name for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by ``layer/quantity``."""
        return {
            f"{layer.name}/{key}": value.numpy()
            for layer in self.layers
            for key, value in layer.values.items()
        }

    def save(self, path: str | Path) -> None:
        """Write the arrays to an ``.npz`` file, which ``numpy.load`` reads without pickles."""
        if Path(path).suffix != ".npz":
            raise InputError(f"path {str(path)!r} must end in .npz")
        write_atomically(Path(path), self.write)

    def write(self, file: IO[bytes]) -> None:
        """Write the arrays to an open binary file, in the format of ``save``."""
        np.savez_compressed(file, **self.arrays())  # type: ignore[arg-type]

    def records(self) -> list[dict[str, Any]]:
        """The record of every layer, for tables and pictures."""
        return [layer.record() for layer in self.layers]

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer: name, mechanism, and the numbers of its summary."""
        return [
            {"layer": layer.name, "mechanism": layer.mechanism, **layer.summary()} for layer in self.layers
        ]

    def __str__(self) -> str:
        lines = []
        for row in self.rows():
            figures = ", ".join(f"{key} {value:.4g}" for key, value in list(row.items())[2:])
            lines.append(f"{row['layer']} ({row['mechanism']}): {figures}")
        return "\n".join(lines)


@torch.no_grad()
def diagnose(
    model: nn.Module,
    batches: Batch | Iterable[Batch],
    layers: LayerChoice = "all",
    *,
    cases: int = 16,
    quantities: Iterable[str] = QUANTITIES,
    num_values: int = 64,
    max_tokens: int = 1024,
    memory_limit: float = 1.0,
) -> DiagnosticsReport:
    """Measure the attention of a model on some sequences. The model is left as it was.

    Works for models of kernel-attention, torch, timm and Hugging Face, encoders and decoders; see
    ``kernel_attention.analysis.capture``. Padded tokens are left out, each sequence counts for itself,
    and everything is computed in float32 or better on the CPU.

    Args:
        model: any module with attention layers.
        batches: what the model is called with, one batch or an iterable of them; a batch is a tensor, a tuple
            of arguments, or a mapping of named ones. A list is an iterable of batches.
        layers: which layers, as for ``kernel_attention.analysis.capture``.
        cases: how many sequences to measure; each costs a decomposition of N x N numbers per head.
        quantities: of "spectrum" (singular values, explained variance, effective rank; mode-n spectra of
            kernel tensors), "distance" (between heads), "projection" (J_proj and gamma of the kernel-PCA
            reading, for layers of softmax and RPC-Attention; needs the extra ``solvers``), "objective" (J of
            layers that have one), "maps" (attention and scores of the first sequence).
        num_values: how many singular values to keep.
        max_tokens: of a longer sequence only evenly spaced queries are measured; ``notes`` says so.
        memory_limit: GiB that the matrix of a layer and sequence may take.

    Returns:
        The measurements, by layer.

    Raises:
        InputError: for a layer that does not exist or never ran, an unknown quantity, no batch, or a matrix
            above the memory limit.
    """
    require_positive(cases=cases, num_values=num_values, max_tokens=max_tokens)
    wanted = tuple(quantities)
    for quantity in wanted:
        if quantity not in QUANTITIES:
            raise unknown("quantity", quantity, QUANTITIES)
    settings = CaseSettings(frozenset(wanted), num_values, max_tokens, memory_limit)
    names: list[str] | None = None
    found: dict[str, _Layer] = {}
    left = cases
    for batch in _batches(batches):
        names = choose_layers(model, batch, layers) if names is None else names
        captured = capture_chosen(model, batch, names)
        for name, attention in captured.items():
            found.setdefault(name, _Layer(attention.mechanism)).measure(attention, left, settings)
        left -= max(attention.num_sequences for attention in captured.values())
        if left <= 0:
            break
    if names is None:
        raise InputError("batches: there is none to call the model with")
    return DiagnosticsReport(tuple(found[name].summarised(name, index) for index, name in enumerate(names)))


@dataclass
class _Layer:
    """The measurements of a layer so far, one list entry per sequence."""

    mechanism: str
    cases: list[dict[str, Tensor]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)

    def measure(self, attention: CapturedAttention, limit: int, settings: CaseSettings) -> None:
        """Measure the batch's first ``limit`` sequences; a sequence without a real token is skipped."""
        for case in range(min(limit, attention.num_sequences)):
            if attention.real_queries[case].any() and attention.real_keys[case].any():
                values, notes = measure_case(attention, case, settings, with_maps=not self.cases)
                self.cases.append(values)
                self.lengths.append(int(attention.real_queries[case].sum()))
                self.notes.update(dict.fromkeys(notes))

    def summarised(self, name: str, index: int) -> LayerDiagnostics:
        """Means of curves and of head pairs over the sequences; everything else has one row per sequence."""
        collected: dict[str, list[Tensor]] = {}
        for key, value in itertools.chain.from_iterable(values.items() for values in self.cases):
            collected.setdefault(key, []).append(value)
        arrays: dict[str, Tensor] = {}
        for key, values in collected.items():
            if key in LayerDiagnostics.MEANS:
                arrays[key] = torch.stack(values).mean(dim=0)
            elif key in LayerDiagnostics.PER_CASE:
                arrays[key] = torch.stack(values)
            else:
                arrays[key] = values[0]
        return LayerDiagnostics(name, index, self.mechanism, tuple(self.lengths), arrays, tuple(self.notes))


def _batches(batches: Batch | Iterable[Batch]) -> Iterable[Batch]:
    if isinstance(batches, Tensor | Mapping) or (isinstance(batches, tuple) and _is_one_batch(batches)):
        return [batches]
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise InputError(
            f"batches is a {type(batches).__name__}, expected a batch (tensor, tuple or mapping) or several"
        )
    return batches


def _is_one_batch(batches: tuple[object, ...]) -> bool:
    return bool(batches) and all(part is None or isinstance(part, Tensor) for part in batches)
