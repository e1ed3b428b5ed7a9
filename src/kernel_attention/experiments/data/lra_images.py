"""Images as sequences of gray values: CIFAR-10 from an archive or folders, and the release of Pathfinder.

Legend: n images of side x side pixels.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.token_sets import TokenData, TokenSplit

CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

_SIDE = 32
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")
_TORCHVISION = "cifar-10-batches-py"
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R 601, as Pillow's and TensorFlow's grayscale


def load_gray_images(root: Path | None) -> TokenData:
    """Gray CIFAR-10: 1,024 tokens of 256 values an image, row by row.

    Looked for under the data root: ``cifar-10-batches-py`` (torchvision's layout), a folder ``cifar10`` with
    ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or such folders in ``cifar10*.tar``; also in a subfolder
    ``images``.

    Raises:
        InputError: where there is none of these, or an image is damaged or not 32 x 32.
    """
    for folder in [] if root is None else [root, root / "images"]:
        if (folder / _TORCHVISION).is_dir():
            splits = _read_torchvision(folder / _TORCHVISION)
        elif (folder / "cifar10" / "train").is_dir():
            splits = _split_by_folder(_files(folder / "cifar10"), folder / "cifar10")
        elif archives := sorted(folder.glob("cifar10*.tar")):
            splits = _split_by_folder(_members(archives[0]), archives[0])
        else:
            continue
        return TokenData("lra/image", splits["train"], None, splits["test"], 256, _SIDE * _SIDE, CIFAR10)
    raise InputError(
        f"dataset lra/image: no CIFAR-10 under {root or 'a data root (none was given)'} "
        f"(accepted: {_TORCHVISION}, cifar10/train/CLASS/*.png, cifar10*.tar; set --data_root)"
    )


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
            images.append(_gray(_read(image), str(image)))
            labels.append(int(fields[3]))
    if not images:
        raise InputError(f"dataset {folder}: has no images listed in {difficulty}/metadata/*.npy")
    order = np.random.default_rng(0).permutation(len(images))
    first, second = int(0.8 * len(order)), int(0.9 * len(order))
    parts = (order[:first], order[first:second], order[second:])
    return [TokenSplit.of([images[i] for i in part], [labels[i] for i in part]) for part in parts]


def _read_torchvision(folder: Path) -> dict[str, TokenSplit]:
    batches = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    splits = {}
    for split, names in batches.items():
        images, labels = [], []
        for name in names:
            content = _unpickle(folder / name)
            data = np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, 3, _SIDE * _SIDE)
            images += list(np.rint(np.einsum("c,ncp->np", _LUMA, data)).astype(np.uint8))
            labels += list(content[b"labels"])
        splits[split] = TokenSplit.of(images, labels)
    return splits


class _Plain(pickle.Unpickler):
    """Only arrays, bytes, lists and numbers, so that a file cannot execute anything."""

    _ALLOWED = frozenset(
        {
            ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        with path.open("rb") as file:
            content = _Plain(file, encoding="bytes").load()
        if not {b"data", b"labels"} <= set(content):
            raise ValueError("it has no data and labels")
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"file {path}: not readable as a batch of CIFAR-10 ({error})") from None
    return content


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES:
            yield path.relative_to(folder).as_posix(), _read(path)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive) as file:
            for member in file:
                if member.isfile() and Path(member.name).suffix.lower() in _SUFFIXES:
                    content = file.extractfile(member)
                    assert content is not None
                    yield member.name, content.read()
    except (OSError, tarfile.TarError, EOFError) as error:
        raise InputError(f"file {archive}: cannot be read as an archive ({error})") from None


def _split_by_folder(images: Iterator[tuple[str, bytes]], place: Path) -> dict[str, TokenSplit]:
    """Splits of images named ``.../SPLIT/CLASS/file``."""
    found: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "test": []}
    for name, content in images:
        parts = name.split("/")
        if len(parts) < 3 or parts[-3] not in found:
            continue
        if parts[-2] not in CIFAR10:
            raise InputError(f"{place}: folder {parts[-2]!r} is no class of CIFAR-10 ({', '.join(CIFAR10)})")
        found[parts[-3]].append((_gray(content, f"{place}: {name}"), CIFAR10.index(parts[-2])))
    for split, cases in found.items():
        if not cases:
            raise InputError(f"{place}: has no images of the {split} split ({split}/CLASS/*.png)")
    return {
        split: TokenSplit.of([image for image, _ in cases], [label for _, label in cases])
        for split, cases in found.items()
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"file {path}: cannot be read ({error.strerror or error})") from None


def _gray(content: bytes, where: str) -> np.ndarray:
    """(side * side,) uint8."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("L"), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises the last for broken PNGs
        raise InputError(f"{where}: not readable as an image ({error})") from None
    if pixels.shape != (_SIDE, _SIDE):
        raise InputError(
            f"{where}: has {pixels.shape[1]} x {pixels.shape[0]} pixels, expected {_SIDE} x {_SIDE}"
        )
    return pixels.reshape(-1)
