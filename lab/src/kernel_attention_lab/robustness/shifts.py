"""Measurements of image models on other images than their own: corrupted ones, and ones of no known class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.files import cache_folder
from kernel_attention_lab.data.images.batches import central
from kernel_attention_lab.data.images.out_of_distribution import LOOKS_LIKE_CIFAR10, load_ood
from kernel_attention_lab.data.images.splits import ImageSplit
from kernel_attention_lab.robustness.corruption_error import corruption_accuracies
from kernel_attention_lab.robustness.corruptions import corrupted_images
from kernel_attention_lab.robustness.image_attack import attacked_cases
from kernel_attention_lab.robustness.out_of_distribution import out_of_distribution_scores
from kernel_attention_lab.robustness.pixel_logits import PixelBatches
from kernel_attention_lab.robustness.uncertainty import LabelledInputs, UncertainCases

CORRUPTED_CASES = 500  # times 15 corruptions and 5 severities
UNCERTAIN_CASES = {"known": 5000, "corrupted": 100, "unseen": 2500}
UNSEEN = "tiny_imagenet100"
"""The image set whose part ``ood_val`` has the images of no known class."""

OF_MODELS = ("uncertainty", "ensemble")
"""The shifts of ``measure_uncertainty``: those of one model, and those of the ensemble of several."""
SHIFTS = ("corruptions", "out_of_distribution", *OF_MODELS)
"""The plans that are no attacks."""

OnProgress = Callable[[str], object]


def split_plans(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """(plans of attacks, shifts), each in the order of ``names``."""
    names = list(names)
    return [name for name in names if name not in SHIFTS], [name for name in names if name in SHIFTS]


def measure_shift(
    name: str,
    model: nn.Module,
    split: ImageSplit,
    *,
    cases: int | None = None,
    kept_size: int = 0,
    data_root: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """The record of one of the first two ``SHIFTS``, in JSON's types.

    Args:
        name: ``corruptions``: accuracies on the first ``CORRUPTED_CASES`` of ``attacked_cases``, under 15
            corruptions at 5 severities; ``out_of_distribution``: how well confidence tells all images of the
            split from those of ``UNSEEN`` that do not look like a class of CIFAR-10.
        model: (B, C, H, W) in [0, 1] -> (B, classes).
        split: the test split, of the model's size.
        cases: number of images, by default as above.
        kept_size: side to which images of no known class are resized before the middle of the split's size is
            cut out; by default the split's.
        data_root: the folder that is searched first for data sets.
        on_progress: called with a line of progress.

    Raises:
        InputError: for missing data, and for images that the measurement cannot take.
    """
    if name == "corruptions":
        indices = attacked_cases(len(split), cases or CORRUPTED_CASES)
        chosen = split.subset(indices)
        return corruption_accuracies(
            model,
            chosen.images,
            chosen.targets,
            indices=indices,
            cache=cache_folder() / "corruptions",
            on_progress=on_progress,
        )
    if on_progress is not None:
        on_progress("images of no known class")
    out, left_out = unseen_images(split, cases or 0, kept_size, data_root)
    known = split if cases is None else split.subset(attacked_cases(len(split), cases))
    figures = out_of_distribution_scores(model, known.images, out.images)
    return figures | {"unseen": UNSEEN, "left_out": left_out}


def unseen_images(
    split: ImageSplit, cases: int, kept_size: int = 0, data_root: str | os.PathLike[str] | None = None
) -> tuple[ImageSplit, list[str]]:
    """Images of no known class, of the size of a split, and the classes that are left out.

    Args:
        split: of square images.
        cases: their number; 0: all.
        kept_size: as in ``measure_shift``.
        data_root: the folder that is searched first for data sets.

    Raises:
        InputError: for missing data, and for images that are not square.
    """
    height, width = split.images.shape[1:3]
    if height != width:
        raise InputError(f"images of {height} x {width} pixels: the unseen images are square")
    unseen = load_ood(UNSEEN, data_root, image_size=kept_size or height, left_out=LOOKS_LIKE_CIFAR10)
    return central(unseen.split.evenly(cases), (height, width)), [label for label, *_ in unseen.left_out]


def uncertain_images(
    split: ImageSplit,
    validation: ImageSplit | None = None,
    *,
    cases: int | None = None,
    kept_size: int = 0,
    data_root: str | os.PathLike[str] | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[UncertainCases, dict[str, str]]:
    """Images of a split, corrupted ones, and ones of no known class, and why a set is absent, by its name.

    Corrupted images need a library and unseen images a data set.

    Args:
        split: the test split, of the models' size. The first of ``attacked_cases`` are taken.
        validation: images of the models' size that choose the temperature; None: there is no temperature.
        cases: number of images of each set, by default ``UNCERTAIN_CASES``.
        kept_size: as in ``measure_shift``.
        data_root: the folder that is searched first for data sets.
        on_progress: called with a line of progress.
    """
    counts = UNCERTAIN_CASES if cases is None else dict.fromkeys(UNCERTAIN_CASES, cases)
    known = _labelled(split.subset(attacked_cases(len(split), counts["known"])))
    found = UncertainCases(known, validation=None if validation is None else _labelled(validation))
    absent: dict[str, str] = {}
    try:
        corrupted, distinct = _corrupted_split(split, counts["corrupted"], on_progress)
        found = found._replace(corrupted=_labelled(corrupted), distinct=distinct)
    except (InputError, ModuleNotFoundError) as error:
        absent["corrupted"] = str(error)
    try:
        unseen, _ = unseen_images(split, counts["unseen"], kept_size, data_root)
        found = found._replace(unseen=PixelBatches(unseen.images))
    except InputError as error:
        absent["unseen"] = str(error)
    return found, absent


def _labelled(split: ImageSplit) -> LabelledInputs:
    return LabelledInputs(PixelBatches(split.images), split.targets)


def _corrupted_split(split: ImageSplit, cases: int, on_progress: OnProgress | None) -> tuple[ImageSplit, int]:
    """All corruptions and severities of the first ``attacked_cases``, and the number of these."""
    indices = attacked_cases(len(split), cases)
    chosen = split.subset(indices)
    versions = [
        np.asarray(each).reshape(-1, *chosen.images.shape[1:])
        for _, each in corrupted_images(
            chosen.images, indices=indices, cache=cache_folder() / "corruptions", on_progress=on_progress
        )
    ]
    pixels = np.concatenate(versions)
    return ImageSplit(pixels, np.tile(chosen.targets, len(pixels) // len(chosen))), len(chosen)
