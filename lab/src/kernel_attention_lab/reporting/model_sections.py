"""The sections about the trained model: the classes that it confuses, and the spectrum of its kernel."""

from __future__ import annotations

import numpy as np

from kernel_attention_lab.reporting import html, plots
from kernel_attention_lab.reporting.figures import data_uri
from kernel_attention_lab.reporting.formats import (
    MISSING,
    format_metric,
    format_number,
    format_seeds,
    sentence,
)
from kernel_attention_lab.reporting.records import RunRecord
from kernel_attention_lab.reporting.spectrum_plots import (
    REACHED,
    cumulative_share,
    explained_variance_curves,
    singular_value_curves,
)

Spectra = dict[int, dict[int, list[np.ndarray]]]  # layer -> seed -> singular values of each head

SHARES = (0.9, 0.95, 0.99)


def confusion_section(run: RunRecord) -> html.Section | None:
    """The confusion matrix on the test split, summed over seeds, and precision and recall by class.

    None for tasks without classes.
    """
    title = "Confusion matrix"
    if run.task != "classification":
        return None
    counts = run.confusion_counts
    if counts is None:
        reason = (
            "those of the seeds do not fit together"
            if run.evaluated
            else "the test split has not been evaluated"
        )
        return html.Section("confusion", title, [html.Paragraph(f"No confusion matrix: {reason}.")])
    classes = len(counts)
    names = run.class_names if len(run.class_names) == classes else [str(index) for index in range(classes)]
    seeds = [record.seed for record in run.evaluated]
    added = f", summed over {format_seeds(seeds)}" if len(seeds) > 1 else ""
    written = "; empty cells are 0" if classes <= plots.COUNT_LIMIT else ""
    hits, worst = f"{int(np.trace(counts))} of {int(counts.sum())}", _worst_confusion(counts, names)
    picture = html.Picture(
        data_uri(plots.confusion_matrix(counts, names)),
        f"Confusion matrix of {classes} classes: {hits} test cases on the diagonal. {worst}",
        f"Test cases by true (row) and predicted (column) class{added}. "
        f"Colours are shares of the row{written}. {worst}",
    )
    return html.Section("confusion", title, [html.Pictures([picture]), _class_table(counts, names)])


def _worst_confusion(counts: np.ndarray, names: list[str]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if not wrong.any():
        return "No test case was confused."
    row, column = np.unravel_index(int(wrong.argmax()), wrong.shape)
    times = int(wrong[row, column])
    if times == 1:
        return "No two classes were confused more than once."
    return f"The most frequent error: class {names[row]} predicted as {names[column]}, {times} times."


def _class_table(counts: np.ndarray, names: list[str]) -> html.Piece:
    hits, true, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)

    def share(part: int, whole: int) -> str:
        return format_metric("accuracy", part / whole) if whole else MISSING

    rows = [
        [
            name,
            str(true[index]),
            str(predicted[index]),
            share(hits[index], true[index]),
            share(hits[index], predicted[index]),
        ]
        for index, name in enumerate(names)
    ]
    head = ["class", "true cases", "predicted", "recall", "precision"]
    return html.Folded("Recall and precision by class", [html.Table(head, rows, numbers=True)])


def spectrum_section(run: RunRecord) -> html.Section | None:
    """The singular values of the learnt kernel by layer and head, and the number that carries its energy.

    None for a run without recorded spectra, such as that of a language model.
    """
    title = "Spectrum of the learnt kernel"
    layers = spectra(run)
    recorded = [str((record.spectra or {}).get("note") or "") for record in run.seeds]
    notes = [html.Paragraph(sentence(note), muted=True) for note in dict.fromkeys(recorded) if note]
    if not any(record.spectra for record in run.seeds):
        return None
    if not layers:
        text = "No layer of this run has a kernel whose spectrum could be computed."
        return html.Section("spectrum", title, [html.Paragraph(text), *notes])
    names = _mechanisms(run)
    rows = [
        [names.get(layer, f"layer {layer}"), *(_needed(by_seed, share) for share in SHARES)]
        for layer, by_seed in layers.items()
    ]
    head = ["layer", *(f"{100 * share:.0f} %" for share in SHARES)]
    caption = "Singular values that explain a share of the variance: mean over heads and seeds, and range."
    table = html.Table(head, rows, caption, numbers=True)
    return html.Section("spectrum", title, [html.Pictures(_spectrum_pictures(layers, names)), table, *notes])


def _spectrum_pictures(layers: Spectra, names: dict[int, str]) -> list[html.Picture]:
    seeds = {seed for by_seed in layers.values() for seed in by_seed}
    lines = "One line per head."
    if len(seeds) > 1:
        lines = "A line is a seed's mean over its heads; the band around it spans the heads."
    needed = [f"{names.get(layer, f'Layer {layer}')}: {_needed(layers[layer], 0.9)}." for layer in layers]
    return [
        html.Picture(
            data_uri(singular_value_curves(layers, names)),
            f"Line chart of the singular values of the kernel, relative to the largest, on a logarithmic "
            f"axis, for {len(layers)} {'layer' if len(layers) == 1 else 'layers'}.",
            f"Singular values relative to the largest, cut off where float32 has no digits left. {lines}",
            wide=len(layers) > 1,
        ),
        html.Picture(
            data_uri(explained_variance_curves(layers, names)),
            "Line chart of the cumulative explained variance of the same kernels. "
            f"Singular values needed for 90 %: {' '.join(needed)}",
            "Cumulative explained variance: the share of the first i values in the sum of all squares, up to "
            f"{100 * REACHED:.1f} %. The dashed line is 90 %. The earlier a curve is flat, the lower is the "
            "effective rank of the kernel.",
            wide=len(layers) > 1,
        ),
    ]


def spectra(run: RunRecord) -> Spectra:
    """Layer -> seed -> singular values of each head, without heads whose kernel is zero."""
    numbers = sorted({layer for record in run.seeds for layer in record.spectrum_layers})
    found = {
        layer: {
            record.seed: heads
            for record in run.seeds
            if (heads := [head for head in record.spectrum(layer) if head[0] > 0])
        }
        for layer in numbers
    }
    return {layer: by_seed for layer, by_seed in found.items() if by_seed}


def _needed(by_seed: dict[int, list[np.ndarray]], share: float) -> str:
    """The singular values needed for ``share`` of the variance: mean over heads and seeds, and range."""
    counts = [
        int(np.searchsorted(cumulative_share(head), share) + 1)
        for heads in by_seed.values()
        for head in heads
    ]
    low, high = min(counts), max(counts)
    return format_number(low) if low == high else f"{np.mean(counts):.1f} ({low} to {high})"


def _mechanisms(run: RunRecord) -> dict[int, str]:
    """The name of a layer: its number and its mechanism."""
    entries = [entry for record in run.seeds for entry in (record.spectra or {}).get("layers", [])]
    return {
        int(entry["layer"]): f"layer {entry['layer']}: {entry['mechanism']}"
        for entry in entries
        if "mechanism" in entry
    }
