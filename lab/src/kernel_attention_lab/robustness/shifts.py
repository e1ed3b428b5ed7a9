"""Measurements of an image model on other images than its own: corrupted ones, and ones of no known class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.user_cache import cache_folder
from kernel_attention_lab.data.images.batches import central
from kernel_attention_lab.data.images.out_of_distribution import LOOKS_LIKE_CIFAR10, load_ood
from kernel_attention_lab.data.images.splits import ImageSplit
from kernel_attention_lab.robustness.corruption_error import corruption_accuracies
from kernel_attention_lab.robustness.image_attack import attacked_cases
from kernel_attention_lab.robustness.out_of_distribution import out_of_distribution_scores

CORRUPTED_CASES = 500  # times 15 corruptions and 5 severities
UNSEEN = "tiny_imagenet100"
"""The image set whose part ``ood_val`` has the images of no known class."""

SHIFTS = ("corruptions", "out_of_distribution")
"""The shifts of ``measure_shift``."""

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
    """The record of one of ``SHIFTS``, in JSON's types.

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
    height, width = split.images.shape[1:3]
    if height != width:
        raise InputError(f"images of {height} x {width} pixels: the unseen images are square")
    unseen = load_ood(UNSEEN, data_root, image_size=kept_size or height, left_out=LOOKS_LIKE_CIFAR10)
    if on_progress is not None:
        on_progress("images of no known class")
    known = split if cases is None else split.subset(attacked_cases(len(split), cases))
    out = central(unseen.split.evenly(cases or 0), (height, width))
    figures = out_of_distribution_scores(model, known.images, out.images)
    return figures | {"unseen": UNSEEN, "left_out": [label for label, *_ in unseen.left_out]}
