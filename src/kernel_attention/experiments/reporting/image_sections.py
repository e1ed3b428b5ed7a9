"""The section of an image run: example images with predictions, and the first layer's attention over them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernel_attention.experiments.reporting import html
from kernel_attention.experiments.reporting.figures import data_uri
from kernel_attention.experiments.reporting.formats import format_metric, sentence
from kernel_attention.experiments.reporting.image_plots import (
    HEAD_LIMIT,
    ROW_LIMIT,
    attention_over_images,
    example_grid,
)
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord


def examples_section(run: RunRecord) -> html.Section | None:
    """Images of ``seed-K/examples.npz``, the seeds after the first folded; None for runs of other tasks."""
    records = [record for record in run.seeds if record.examples is not None]
    if run.task != "classification" or not records:
        return None
    first, *others = records
    pieces = _pieces(run, first)
    pieces += [html.Folded(f"Seed {record.seed}", _pieces(run, record)) for record in others]
    return html.Section("examples", "Examples", pieces)


def _pieces(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    examples = record.examples or {}
    images, targets, predictions = (examples[key] for key in ("images", "targets", "predictions"))
    is_right = targets == predictions
    grid = html.Picture(
        data_uri(example_grid(images, _titles(run, examples), is_right.tolist())),
        f"{len(images)} test images with predictions, {int(is_right.sum())} of them right.",
        "Evenly spaced test images: the predicted class with its probability, and, in orange, the true one "
        f"where that is another. Seed {record.seed}.",
        wide=True,
    )
    text = str(examples["attention_text"])
    maps = examples.get("attention")
    if maps is None:
        return [html.Pictures([grid]), html.Paragraph(sentence(text), muted=True)]
    rest = f" The first {HEAD_LIMIT} of {maps.shape[1]} heads." if maps.shape[1] > HEAD_LIMIT else ""
    attention = html.Picture(
        data_uri(attention_over_images(images, maps)),
        f"First layer's attention over {min(len(images), ROW_LIMIT)} images, by head.",
        f"First layer, {text}. Weights, or the kernel of a mechanism that has none. Bright is much; each map "
        f"has its own scale.{rest}",
        wide=maps.shape[1] > 3,
    )
    return [html.Pictures([grid]), html.Pictures([attention])]


def _titles(run: RunRecord, examples: Mapping[str, np.ndarray]) -> list[str]:
    names = run.class_names

    def name(number: int) -> str:
        text = names[number] if 0 <= number < len(names) else str(number)
        return text if len(text) <= 18 else f"{text[:17]}…"

    titles = []
    for target, predicted, probability in zip(
        *(examples[key] for key in ("targets", "predictions", "probabilities")), strict=True
    ):
        share = format_metric("accuracy", float(round(float(probability), 2))).replace(".00", "")
        said = f"{name(int(predicted))}, {share}"
        titles.append(said if target == predicted else f"{said}\n(is {name(int(target))})")
    return titles
