"""Diagnostics of the attention layers of any model: data out; the pictures are drawn in reporting."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kernel_attention.analysis.capture import Batch, LayerChoice, capture_chosen, choose_layers
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.analysis.layer_measures import QUANTITIES, CaseSettings, measure_case
from kernel_attention.analysis.results import DiagnosticsReport, LayerDiagnostics
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError, unknown


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
