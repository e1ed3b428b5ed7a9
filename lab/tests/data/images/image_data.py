"""Small image sets, written in every layout that is read. The gray of an image tells which one it is."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

SPLITS = ("train", "val", "test")
CLASSES = ("cat", "dog")


def encoded(pixels, kind="PNG", **options):
    """The bytes of an image file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def square(gray, size=4):
    """An image of one gray, as a PNG file."""
    return encoded(np.full((size, size, 3), gray, np.uint8))


def gray_of(split, label, number):
    """The gray of image ``number`` of a class of ``make_set``."""
    return 100 * SPLITS.index(split) // 2 + 20 * CLASSES.index(label) + number


def make_set(folder, splits=SPLITS, classes=CLASSES, count=3, size=4):
    """Image files SPLIT/CLASS/NUMBER.png."""
    for split in splits:
        for label in classes:
            (folder / split / label).mkdir(parents=True)
            for number in range(count):
                path = folder / split / label / f"{number}.png"
                path.write_bytes(square(gray_of(split, label, number) % 256, size))
    return folder


def grays(split):
    """The gray of each image of a split."""
    return split.images[:, 0, 0, 0].tolist()


def pack(folder: Path, archive: Path) -> Path:
    """An archive with the files of a folder, in the kind that its suffix says."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(folder.rglob("*")):
                file.write(path, path.relative_to(folder).as_posix())
    else:
        mode = "w" if archive.suffix == ".tar" else f"w:{archive.suffix[1:]}"
        with tarfile.open(archive, mode) as file:
            file.add(folder, ".")
    return archive


def make_cifar(folder: Path, classes: int = 10) -> dict[str, tuple[np.ndarray, list[int]]]:
    """The files of torchvision's CIFAR-10 or CIFAR-100 with random images; what they hold by split."""
    generator = np.random.default_rng(classes)
    folder.mkdir(parents=True)
    ten = classes == 10
    files = {"train": [f"data_batch_{number}" for number in range(1, 6)] if ten else ["train"]}
    files["test"] = ["test_batch"] if ten else ["test"]
    held: dict[str, tuple[np.ndarray, list[int]]] = {}
    for split, names in files.items():
        images = generator.integers(0, 256, (len(names), 4, 3, 32, 32), dtype=np.uint8)
        labels = generator.integers(0, classes, (len(names), 4))
        for name, pixels, numbers in zip(names, images, labels, strict=True):
            key = b"labels" if ten else b"fine_labels"
            content = {b"data": pixels.reshape(4, -1), key: numbers.tolist()}
            (folder / name).write_bytes(pickle.dumps(content))
        held[split] = (images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.reshape(-1).tolist())
    names = [f"class{number}".encode() for number in range(classes)]
    meta = ("batches.meta", b"label_names") if ten else ("meta", b"fine_label_names")
    (folder / meta[0]).write_bytes(pickle.dumps({meta[1]: names}))
    return held
