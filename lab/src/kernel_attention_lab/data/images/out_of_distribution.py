"""Images of classes that a model has not seen in training, without those that look like one it has seen."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.images.cache import cached_parts
from kernel_attention_lab.data.images.sets import locate_images
from kernel_attention_lab.data.images.splits import ImageSplit

LOOKS_LIKE_CIFAR10 = {
    "n01644900": ("tailed frog", "a frog"),
    "n01855672": ("goose", "a bird"),
    "n02056570": ("king penguin", "a bird"),
    "n02094433": ("Yorkshire terrier", "a dog"),
    "n02099712": ("Labrador retriever", "a dog"),
    "n02113799": ("standard poodle", "a dog"),
    "n02123394": ("Persian cat", "a cat"),
    "n02125311": ("cougar", "a cat, of another size"),
    "n02403003": ("ox", "four hooves, as deer and horse"),
    "n02415577": ("bighorn", "four hooves and horns, as deer"),
    "n02437312": ("Arabian camel", "four hooves, as deer and horse"),
    "n02917067": ("bullet train", "a streamlined body on wheels, as automobile"),
    "n03393912": ("freight car", "a loading space on wheels, as truck"),
    "n03444034": ("go-kart", "an automobile"),
    "n03662601": ("lifeboat", "a ship"),
    "n03796401": ("moving van", "a truck"),
    "n03977966": ("police van", "an automobile or a truck"),
    "n04008634": ("projectile, missile", "a body with fins in the sky, as airplane"),
    "n04146614": ("school bus", "a body on wheels, as truck"),
    "n04285008": ("sports car", "an automobile"),
}
"""Classes of Tiny-ImageNet that are left out beside CIFAR-10: WordNet number, name, and what it is there."""


class OutOfDistribution(NamedTuple):
    """Images of unseen classes.

    split: the images; targets are places in ``class_names``.
    class_names: WordNet numbers of the classes that are kept.
    left_out: (number, name, reason) of the classes that are not.
    """

    split: ImageSplit
    class_names: tuple[str, ...]
    left_out: tuple[tuple[str, str, str], ...]


def load_ood(
    name: str = "tiny_imagenet100",
    data_root: str | os.PathLike[str] | None = None,
    *,
    image_size: int = 32,
    left_out: dict[str, tuple[str, str]] = LOOKS_LIKE_CIFAR10,
    part: str = "ood_val",
    workers: int | None = None,
) -> OutOfDistribution:
    """The out-of-distribution part of an image set, resized.

    Args:
        name: of ``load_images``.
        data_root: of ``load_images``.
        image_size: height and width; the side of the images that the model was trained on.
        left_out: {class: (name, reason)}; ``{}`` keeps all, as beside the set's own training classes.
        part: the folder of these images.
        workers: of ``load_images``.

    Raises:
        InputError: where the set has no such part, or nothing of it is left.
    """
    place = locate_images(name, data_root)
    parts = cached_parts(place, image_size, workers)
    found = {folder.rpartition("/")[2]: held for folder, held in parts.items()}
    if part not in found:
        raise InputError(f"{place}: has no folder {part} (it has: {', '.join(sorted(parts))})")
    images, targets, names = found[part]
    kept = [number for number, label in enumerate(names) if label not in left_out]
    chosen = np.flatnonzero(np.isin(targets, kept))
    if not len(chosen):
        raise InputError(f"{place}: all classes of {part} are left out")
    split = ImageSplit(images, np.searchsorted(kept, targets)).subset(chosen)
    omitted = tuple((label, *left_out[label]) for label in names if label in left_out)
    return OutOfDistribution(split, tuple(names[number] for number in kept), omitted)
