"""Accuracies on corrupted images, and the mean corruption error (Hendrycks & Dietterich 2019)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.packing import pack_bits
from kernel_attention_lab.robustness.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    corrupted_images,
    library_versions,
)
from kernel_attention_lab.robustness.pixel_logits import pixel_logits

ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816,
    "frost": 0.826572, "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204,
    "elastic_transform": 0.646056, "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip
"""AlexNet's mean error over the five severities of ImageNet-C, the divisors of the mean corruption error."""


def mean_corruption_error(
    errors: Mapping[str, float], reference: Mapping[str, float] = ALEXNET_ERRORS
) -> float:
    """Mean over the corruptions of a model's error divided by a reference's error.

    With AlexNet's errors it is the mCE of ImageNet-C as a fraction: 1 is AlexNet. They are errors on
    ImageNet. For other data the reference is another model on the same corrupted images, such as the softmax
    twin: 1 is the twin. (That is not the "relative mCE" of the paper, which subtracts clean errors first.)

    Args:
        errors: the model's mean error over the severities, by corruption.
        reference: the same of the reference, for the same corruptions at least.

    Raises:
        InputError: for no errors, a corruption that the reference lacks, or a reference without error.
    """
    if not errors:
        raise InputError("errors is empty: the mean corruption error needs at least one corruption")
    for corruption in errors:
        if corruption not in reference:
            raise unknown("corruption of the reference", corruption, reference)
        if not reference[corruption] > 0:
            raise InputError(f"the reference's error under {corruption} is 0: nothing can be divided by it")
    return float(np.mean([errors[corruption] / reference[corruption] for corruption in errors]))


def corruption_errors(record: Mapping[str, Any]) -> dict[str, float]:
    """Mean error over the severities by corruption, from a record of ``corruption_accuracies``."""
    return {name: 1.0 - float(np.mean(values)) for name, values in record["accuracies"].items()}


def corruption_accuracies(
    model: nn.Module,
    images: np.ndarray,
    targets: np.ndarray,
    *,
    indices: Sequence[int] | None = None,
    seed: int = 0,
    classes: Sequence[int] | None = None,
    corruptions: Sequence[str] = CORRUPTIONS,
    batch_size: int = 256,
    cache: str | Path | None = None,
    workers: int = 1,
    on_progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Measure a classifier on the corruptions of a set of images, at all five severities.

    Args:
        model: (B, 3, H, W) in [0, 1] -> (B, outputs) logits.
        images: (n, H, W, 3) uint8, both sides at least 32 pixels.
        targets: (n,) the true classes, as outputs of the model.
        indices: the numbers of the images in their data set, by default 0 to n - 1. An image gets the same
            corruptions in every subset in which it has the same number.
        seed: of the corruptions.
        classes: the outputs that count, for a set with fewer classes than the model; by default all.
        corruptions: names of ``CORRUPTIONS``.
        batch_size: images at a time.
        cache: the folder of ``corrupted_images``.
        workers: the processes of ``corrupted_images``.
        on_progress: called with a line of progress before a corruption is made.

    Returns:
        A record of JSON's types: ``accuracies`` by corruption, five each; their mean ``accuracy``;
        ``mean_corruption_error`` against AlexNet's constants; ``bits`` by corruption, which images are right
        at each severity (``statistics.pack_bits``); ``cases``, ``seed``, ``libraries``, ``seconds``.

    Raises:
        InputError: for images, indices, targets or classes that do not fit together.
    """
    targets = np.asarray(targets)
    if targets.shape != (len(images),):
        raise InputError(
            f"targets of shape {targets.shape} must have one class for each of {len(images)} images"
        )
    kept = None if classes is None else np.asarray(classes)
    if kept is not None and not np.isin(targets, kept).all():
        raise InputError(
            f"targets {sorted(set(targets.tolist()) - set(kept.tolist()))} are not among classes"
        )
    start = time.perf_counter()
    accuracies: dict[str, list[float]] = {}
    bits: dict[str, list[str]] = {}
    versions = corrupted_images(
        images,
        indices=indices,
        seed=seed,
        corruptions=corruptions,
        cache=cache,
        workers=workers,
        on_progress=on_progress,
    )
    for corruption, by_severity in versions:
        accuracies[corruption], bits[corruption] = [], []
        for corrupted in by_severity:
            best = (
                pixel_logits(model, corrupted, classes=classes, batch_size=batch_size).argmax(dim=1).numpy()
            )
            correct = (best if kept is None else kept[best]) == targets
            accuracies[corruption].append(float(correct.mean()))
            bits[corruption].append(pack_bits(correct))
    record = {
        "cases": len(images),
        "seed": seed,
        "severities": list(SEVERITIES),
        "accuracy": float(np.mean(list(accuracies.values()))),
        "accuracies": accuracies,
        "bits": bits,
        "libraries": library_versions(),
    }
    record["mean_corruption_error"] = mean_corruption_error(corruption_errors(record))
    return record | {"seconds": round(time.perf_counter() - start, 1)}
