"""Images as sequences of gray values: CIFAR-10 from an archive or folders, and the release of Pathfinder.

Legend: n images of side x side pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kernel_attention.errors import InputError, reading
from kernel_attention_lab.data.images.cache import Part, cached_parts
from kernel_attention_lab.data.images.cifar_batches import CIFAR10, FOLDERS, SIDE
from kernel_attention_lab.data.images.decoding import decode_image
from kernel_attention_lab.data.images.files import ARCHIVE_SUFFIXES
from kernel_attention_lab.data.images.layouts import split_of
from kernel_attention_lab.data.images.sets import locate_images
from kernel_attention_lab.data.tokens.sets import TokenData, TokenSplit

_AT_ONCE = 4096  # images


def load_gray_images(root: Path | None) -> TokenData:
    """Gray CIFAR-10: 1,024 tokens of 256 values an image, row by row.

    Looked for under the data root and its folder ``images`` as ``load_images`` looks for ``cifar10``; also an
    archive ``cifar10_*``.

    Raises:
        InputError: where there is none of these, or an image is damaged or not 32 x 32.
    """
    place = locate_gray_images(root)
    # Runs on torchvision's files were rounded from the exact weights, those on image files as Pillow rounds.
    gray = _exact_luma if place.name in FOLDERS else _pillow_luma
    splits: dict[str, TokenSplit] = {}
    for folder, part in cached_parts(place).items():
        if split := split_of(folder):
            splits[split] = _gray_split(part, gray, place)
    for split in ("train", "test"):
        if split not in splits:
            raise InputError(f"{place}: has no images of the {split} split ({split}/CLASS/*.png)")
    return TokenData("lra/image", splits["train"], None, splits["test"], 256, SIDE * SIDE, CIFAR10)


def locate_gray_images(root: Path | None) -> Path:
    """The folder or archive of CIFAR-10; InputError where there is none."""
    if root is not None:
        with contextlib.suppress(InputError):
            return locate_images("cifar10", root)
        for folder in (root, root / "images"):
            if archives := sorted(
                path for end in ARCHIVE_SUFFIXES for path in folder.glob(f"cifar10_*{end}")
            ):
                return archives[0]
    raise InputError(
        f"dataset lra/image: no CIFAR-10 under {root or 'a data root (none was given)'} "
        "(accepted: cifar-10-batches-py, cifar10/train/CLASS/*.png, an archive cifar10.tar; set --data_root)"
    )


def _gray_split(part: Part, gray: Callable[[np.ndarray], np.ndarray], place: Path) -> TokenSplit:
    height, width = part.images.shape[1:3]
    if (height, width) != (SIDE, SIDE):
        raise InputError(f"{place}: its images have {width} x {height} pixels, expected {SIDE} x {SIDE}")
    unknown = set(part.class_names) - set(CIFAR10)
    if unknown:
        raise InputError(
            f"{place}: folder {sorted(unknown)[0]!r} is no class of CIFAR-10 ({', '.join(CIFAR10)})"
        )
    numbers = np.array([CIFAR10.index(name) for name in part.class_names])
    chunks = [gray(part.images[start : start + _AT_ONCE]) for start in range(0, len(part.images), _AT_ONCE)]
    offsets = np.arange(len(part.images) + 1, dtype=np.int64) * SIDE * SIDE
    return TokenSplit(np.concatenate(chunks).reshape(-1), offsets, numbers[part.targets])


def _pillow_luma(images: np.ndarray) -> np.ndarray:
    """(n, H, W, 3) to (n, H, W) uint8, to the bit as Pillow's mode L: ITU-R 601 in steps of 2^-16."""
    weighted = images.astype(np.int64) @ np.array([19595, 38470, 7471])
    return ((weighted + (1 << 15)) >> 16).astype(np.uint8)


def _exact_luma(images: np.ndarray) -> np.ndarray:
    """(n, H, W, 3) to (n, H, W) uint8 by the weights of ITU-R 601."""
    red, green, blue = np.moveaxis(images.astype(np.float64), -1, 0)
    return np.rint(0.299 * red + 0.587 * green + 0.114 * blue).astype(np.uint8)


def read_pathfinder_release(folder: Path, difficulty: str = "curv_contour_length_14") -> list[TokenSplit]:
    """Training, validation and test split of the release's ``pathfinder32`` folder: 8 to 1 to 1, as there.

    ``metadata/*.npy`` are text files whose lines begin with: folder, file, number, label.
    """
    lists = sorted(
        (folder / difficulty / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name)
    )
    images, labels = [], []
    for path in lists:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"file {path}: cannot be read as the release's list of images ({error})"
            ) from None
        for number, line in enumerate(lines, start=1):
            fields = line.split()
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise InputError(f"file {path}: line {number} does not say folder, file, number, label")
            image = folder / difficulty / fields[0] / fields[1]
            images.append(_gray(image))
            labels.append(int(fields[3]))
    if not images:
        raise InputError(f"dataset {folder}: has no images listed in {difficulty}/metadata/*.npy")
    order = np.random.default_rng(0).permutation(len(images))
    first, second = int(0.8 * len(order)), int(0.9 * len(order))
    parts = (order[:first], order[first:second], order[second:])
    return [TokenSplit.of([images[i] for i in part], [labels[i] for i in part]) for part in parts]


def _gray(path: Path) -> np.ndarray:
    """(side * side,) uint8."""
    with reading(f"file {path}"):
        content = path.read_bytes()
    pixels = decode_image(content, str(path))
    if pixels.shape[:2] != (SIDE, SIDE):
        raise InputError(
            f"{path}: has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {SIDE} x {SIDE}"
        )
    return _pillow_luma(pixels[None]).reshape(-1)
