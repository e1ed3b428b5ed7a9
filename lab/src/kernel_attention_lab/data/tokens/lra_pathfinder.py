"""Pathfinder of Long Range Arena at 32 x 32: are the two discs the ends of one dashed contour?

The images of Linsley et al. (2018) and Kim et al. (2020) with the parameters that Long Range Arena
publishes: contours of 14 dashes of 2 pixels with a margin of 1 between them, 20 // (14 // 3) = 5 distractors
of 4 dashes, discs of radius 1.5, contours that begin at least 7 apart, contrast 0.75. Two long contours lie
in every image: in a positive one the discs are the ends of the same contour, in a negative one each contour
has one disc.

The generator is our own. It decides the details that the papers leave to their code. A dash turns against
the dash before by a normally distributed angle of deviation 0.4, or more where that finds no room. Pixels of
different contours, including possible discs at their ends, are at least 3 apart in the larger coordinate.
Pixels of neighbouring dashes of one contour are at most 2 apart. So a flood fill that jumps over one pixel
follows a contour and never leaves it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernel_attention.files import cache_folder
from kernel_attention_lab.child_process import process_pool
from kernel_attention_lab.data.tokens.lra_images import read_pathfinder_release
from kernel_attention_lab.data.tokens.sets import TokenData, TokenSplit, cached_arrays

SIZES = {"train": 160_000, "validation": 20_000, "test": 20_000}
TURN, MARGIN, CONTRAST = 0.4, 1, 0.75

_VERSION = 1  # of the generator; a new version keeps its output apart from an old cache
_CHUNK = 1000
_TURNS = 8  # tried for a dash before the contour is restarted
_TRIES = (100, 400)  # for a long contour, and for a distractor, before the image is restarted
_CLASSES = ("separate", "connected")

Pixel = tuple[int, int]


class ContourSizes(NamedTuple):
    """Sizes of an image, by default the benchmark's.

    Attributes:
        side: pixels.
        dashes: of a long contour.
        distractors: short contours.
        distractor_dashes: of each of them.
        seed_distance: the least distance of two contours' beginnings, in pixels.
    """

    side: int = 32
    dashes: int = 14
    distractors: int = 5
    distractor_dashes: int = 4
    seed_distance: float = 7


SMALL = ContourSizes(side=16, dashes=5, distractors=1, distractor_dashes=2, seed_distance=5)
"""Images of 256 pixels, which a small model can learn in an hour on a processor."""


def load_pathfinder(
    root: Path | None,
    train_cases: int = 0,
    evaluation_cases: int = 0,
    specification: ContourSizes | None = None,
) -> TokenData:
    """The release's folder ``pathfinder32`` under the data root where there is one, else generated images.

    Args:
        root: see above; keeps the cache of generated images where it can be written to, else the user's
            cache does.
        train_cases: size of the generated training split, by default 160,000.
        evaluation_cases: size of the generated validation and of the test split, by default 20,000.
        specification: another one than the benchmark's; its images are always generated.
    """
    wanted = specification or ContourSizes()
    name = f"pathfinder{wanted.side}"
    if wanted == ContourSizes() and root is not None and (root / "pathfinder32").is_dir():
        splits = read_pathfinder_release(root / "pathfinder32")
    else:
        sizes = [train_cases or SIZES["train"], *[evaluation_cases or SIZES["test"]] * 2]
        folder = root if root is not None and os.access(root, os.W_OK) else cache_folder()
        other = "" if wanted == ContourSizes() else "".join(f"-{value:g}" for value in wanted)
        path = folder / "generated" / f"{name}-v{_VERSION}{other}-{sum(sizes)}.npz"
        made = partial(generate_pathfinder, sum(sizes), workers=0, specification=wanted)
        arrays = cached_arrays(path, lambda: _arrays(*made()))
        bounds = np.cumsum([0, *sizes])
        splits = [
            image_split(arrays["images"][begin:end], arrays["labels"][begin:end])
            for begin, end in pairwise(bounds)
        ]
    name = name if specification else f"lra/{name}"
    return TokenData(name, splits[0], splits[1], splits[2], 256, wanted.side**2, _CLASSES)


def image_split(images: np.ndarray, labels: np.ndarray) -> TokenSplit:
    """Images (n, side, side) uint8, row by row, as sequences of gray values."""
    offsets = np.arange(len(images) + 1, dtype=np.int64) * (images.size // max(len(images), 1))
    return TokenSplit(images.reshape(-1), offsets, labels.astype(np.int64))


def generate_pathfinder(
    cases: int, seed: int = 0, workers: int = 1, specification: ContourSizes | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Images (cases, side, side) uint8 and labels (cases,): 1 where one contour connects the discs.

    Args:
        cases: the number.
        seed: the same seed gives the same images.
        workers: processes; 0 is as many as there are cores. The result does not depend on it.
        specification: another one than the benchmark's.
    """
    sizes = [min(_CHUNK, cases - begin) for begin in range(0, cases, _CHUNK)]
    workers = workers or os.cpu_count() or 1
    make = partial(_chunk, seed, specification or ContourSizes())
    chunks: Iterable[tuple[np.ndarray, np.ndarray]]
    if workers == 1 or len(sizes) < 3:  # a process takes longer to start than to draw so few
        chunks = list(map(make, range(len(sizes)), sizes))
    else:
        with process_pool(workers) as pool:
            chunks = list(pool.map(make, range(len(sizes)), sizes))
    images, labels = zip(*chunks, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _arrays(images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    return {"images": images, "labels": labels}


def _chunk(seed: int, specification: ContourSizes, number: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    generator = random.Random(f"{seed}-{number}")
    drawn = [draw_image(generator, specification) for _ in range(size)]
    return np.stack([image for image, _ in drawn]), np.array([label for _, label in drawn], dtype=np.uint8)


def draw_image(generator: random.Random, specification: ContourSizes) -> tuple[np.ndarray, int]:
    """One image (side, side) uint8 and its label."""
    label = generator.randrange(2)
    contours = None
    while contours is None:
        contours = _place(generator, specification)
    image = np.zeros((specification.side, specification.side), dtype=np.uint8)
    for contour in contours:
        for pixel in (pixel for dash in contour for pixel in dash):
            image[pixel] = round(255 * CONTRAST)
    first, second = ([contour[0][0], contour[-1][-1]] for contour in contours[:2])
    ends = first if label else [generator.choice(first), generator.choice(second)]
    for row, column in ends:
        image[row - 1 : row + 2, column - 1 : column + 2] = 255
    return image, label


def _place(generator: random.Random, specification: ContourSizes) -> list[list[list[Pixel]]] | None:
    """Two long contours and the distractors, each a list of dashes; None where one found no room."""
    taken: set[Pixel] = set()
    seeds: list[tuple[float, float]] = []
    contours = []
    side = specification.side
    for number in range(2 + specification.distractors):
        is_long = number < 2
        length = specification.dashes if is_long else specification.distractor_dashes
        edge = 2 if is_long else 1  # room for a disc
        for _ in range(_TRIES[0 if is_long else 1]):
            seed = (generator.uniform(2, side - 3), generator.uniform(2, side - 3))
            if any(math.dist(seed, other) < specification.seed_distance for other in seeds):
                continue
            contour = _contour(generator, length, seed, taken, range(edge, side - edge))
            if contour is not None and not (is_long and _discs(contour) & taken):
                break
        else:
            return None
        assert contour is not None
        contours.append(contour)
        seeds.append(seed)
        pixels = {pixel for dash in contour for pixel in dash}
        if is_long:  # the discs may be at either end
            pixels |= _discs(contour)
        taken.update(near for pixel in pixels for near in _around(pixel, MARGIN + 1))
    return contours


def _discs(contour: list[list[Pixel]]) -> set[Pixel]:
    return {near for end in (contour[0][0], contour[-1][-1]) for near in _around(end, 1)}


def _contour(
    generator: random.Random, dashes: int, seed: tuple[float, float], taken: set[Pixel], inside: range
) -> list[list[Pixel]] | None:
    """Dashes of 2 pixels from ``seed`` in a random direction; None where they find no room.

    It keeps a distance of one pixel from its own dashes, except the last one. ``inside`` has the rows and the
    columns it may use.
    """
    row, column = seed
    if (round(row), round(column)) in taken:
        return None
    angle, down, right = generator.uniform(0, 2 * math.pi), 0.0, 0.0
    contour: list[list[Pixel]] = []
    own: set[Pixel] = set()
    for number in range(dashes):
        for attempt in range(_TURNS if number else 1):
            turned = angle + (generator.gauss(0.0, TURN * (1 + attempt / 4)) if number else 0.0)
            down, right = math.sin(turned), math.cos(turned)
            # From the middle of the last pixel over the margin to the first of this dash.
            reach = MARGIN + 1 if number else 0
            begin = (row + reach * down, column + reach * right)
            dash = [(round(begin[0] + step * down), round(begin[1] + step * right)) for step in (0, 1)]
            if _is_free(dash[0], inside, taken, own) and _is_free(dash[1], inside, taken, own):
                break
        else:
            return None
        if contour:
            own.update(near for pixel in contour[-1] for near in _around(pixel, 1))
        contour.append(dash)
        angle, row, column = turned, begin[0] + down, begin[1] + right
    return contour


def _is_free(pixel: Pixel, inside: range, taken: set[Pixel], own: set[Pixel]) -> bool:
    return pixel[0] in inside and pixel[1] in inside and pixel not in taken and pixel not in own


def _around(pixel: Pixel, radius: int) -> Iterable[Pixel]:
    row, column = pixel
    reach = range(-radius, radius + 1)
    return ((row + down, column + right) for down in reach for right in reach)
