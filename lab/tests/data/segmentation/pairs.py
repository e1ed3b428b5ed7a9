"""Small made sets of images and label maps."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ground", "wall", "void", "sky")


def blocks(seed: int, size: tuple[int, int] = (11, 13), values: tuple[int, ...] = (0, 1, 3)) -> np.ndarray:
    """A label map of three stripes of random widths, the first column void."""
    generator = np.random.default_rng(seed)
    edges = np.sort(generator.integers(2, size[1] - 1, 2))
    labels = np.full(size, values[0], dtype=np.uint8)
    labels[:, edges[0] : edges[1]] = values[1]
    labels[:, edges[1] :] = values[2]
    labels[:, 0] = 2
    return labels


def colours(labels: np.ndarray, seed: int) -> np.ndarray:
    """An image from which the labels can be learnt: a colour for every class, and noise."""
    table = np.array([[200, 60, 60], [60, 200, 60], [128, 128, 128], [60, 60, 200]], dtype=np.float64)
    noise = np.random.default_rng([seed, 1]).normal(0, 8, (*labels.shape, 3))
    return np.clip(table[labels] + noise, 0, 255).astype(np.uint8)


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def jpeg(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "JPEG")
    return buffer.getvalue()


def pair_files(counts: Mapping[str, int], form: str = "{split}/{kind}/{name}") -> dict[str, bytes]:
    """{path: content} of made pairs and of ``classes.txt``; equal numbers give equal cases."""
    files: dict[str, bytes] = {"classes.txt": "\n".join(CLASSES).encode()}
    number = 0
    for split, count in counts.items():
        for index in range(count):
            labels = blocks(number)
            image = colours(labels, number)
            for kind, content in (("images", png(image)), ("labels", png(labels))):
                files[form.format(split=split, kind=kind, name=f"{index:03}.png")] = content
            number += 1
    return files


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
