"""A trained model of images on a file: an image, or a folder or archive of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_attention.errors import InputError, reading
from kernel_attention.models.vision import VisionTransformer
from kernel_attention.series.outputs import collect_outputs
from kernel_attention_lab.data.images.batches import ImageBatch, central, channels_first
from kernel_attention_lab.data.images.decoding import decode_image
from kernel_attention_lab.data.images.files import IMAGE_SUFFIXES, is_image, read_images
from kernel_attention_lab.data.images.sets import ClassSubset, load_class_subset
from kernel_attention_lab.data.images.splits import ImageSplit
from kernel_attention_lab.training.image_recipe import ImageRecipe


def predict_images(
    model: VisionTransformer, file: Path, recipe: ImageRecipe, facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """One record per image: its path below ``file``, the class, and the probability of every class.

    Args:
        model: the trained model.
        file: an image, or a folder or an archive, in which every image is taken wherever it stands.
        recipe: of the run; images are resized and cropped as in its training.
        facts: of the run.

    Raises:
        InputError: for a file that is none of these, an unreadable image, or one of a size that the model
            cannot take.
    """
    names, size, kept = facts["class_names"], (facts["height"], facts["width"]), kept_size(recipe, facts)
    rows: list[dict[str, Any]] = []
    source = _files(file)
    while files := list(islice(source, recipe.batch_size)):
        pixels = [
            decode_image(content, f"{file}: {path}" if path else str(file), kept) for path, content in files
        ]
        for (path, _), image in zip(files, pixels, strict=True):
            if not kept and image.shape[:2] != size:
                raise InputError(
                    f"{file}: {path or file.name} has {image.shape[1]} x {image.shape[0]} pixels (accepted: "
                    f"{size[1]} x {size[0]}, the size of the training images)"
                )
        images = central(ImageSplit(np.stack(pixels), np.zeros(len(pixels), np.int64)), size).images
        batch = ImageBatch(channels_first(images), torch.zeros(len(pixels)))
        chances = collect_outputs(model, [batch], recipe.precision).softmax(dim=-1).tolist()
        for (path, _), row in zip(files, chances, strict=True):
            rows.append(
                {"file": path or file.name, "prediction": names[int(np.argmax(row))]}
                | {f"probability_{name}": value for name, value in zip(names, row, strict=True)}
            )
    return rows


def labelled_images(file: Path, recipe: ImageRecipe, facts: dict[str, Any]) -> ClassSubset:
    """The images of class folders, of the model's size, with the model's class numbers.

    Raises:
        InputError: as ``load_class_subset``, and for images of a size that the model cannot take.
    """
    kept, size = kept_size(recipe, facts), (facts["height"], facts["width"])
    if not file.exists():
        raise InputError(f"{file}: does not exist (accepted: a folder or an archive of class folders)")
    # An absolute path is no name of a set in the data root.
    found = load_class_subset(str(file.resolve()), tuple(facts["class_names"]), image_size=kept)
    shape = found.split.images.shape[1:3]
    if not kept and shape != size:
        raise InputError(
            f"{file}: has images of {shape[1]} x {shape[0]} pixels (accepted: {size[1]} x {size[0]}, the "
            "size of the training images)"
        )
    return found._replace(split=central(found.split, size))


def kept_size(recipe: ImageRecipe, facts: dict[str, Any]) -> int:
    """The side to which images of a file are resized and cut; 0 where they must have the model's size.

    It is that of training. Where training kept the images' own size, it is the side of these, if square.
    """
    if recipe.kept_size:
        return recipe.kept_size
    return int(facts["height"]) if facts["height"] == facts["width"] else 0


def _files(file: Path) -> Iterator[tuple[str, bytes]]:
    """(path, bytes) of the images; the path of a single image is empty."""
    if not (file.is_file() and is_image(file.name)):
        if file.is_file() or file.is_dir():
            yield from read_images(file)
            return
        raise InputError(
            f"{file}: does not exist (accepted: an image, {', '.join(IMAGE_SUFFIXES)}, or a folder or an "
            "archive of images)"
        )
    with reading(f"file {file}"):
        yield "", file.read_bytes()
