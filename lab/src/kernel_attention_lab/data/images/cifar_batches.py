"""The files of CIFAR-10 and CIFAR-100 as their authors and torchvision keep them: pickled arrays."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple

import numpy as np

from kernel_attention.errors import InputError

CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

FOLDERS = ("cifar-10-batches-py", "cifar-100-python")
SIDE = 32

_SPLITS = {f"data_batch_{number}": "train" for number in range(1, 6)}
_SPLITS |= {"test_batch": "test", "train": "train", "test": "test"}
_NAMES = {"batches.meta": b"label_names", "meta": b"fine_label_names"}


class CifarBatch(NamedTuple):
    """Images (n, 32, 32, 3) uint8 of one file, and their class numbers."""

    split: str
    images: np.ndarray
    labels: list[int]


def is_cifar_file(name: str) -> bool:
    """Return whether a file of this name in one of ``FOLDERS`` is read here."""
    return name in _SPLITS or name in _NAMES


def read_cifar_file(name: str, content: bytes, where: str) -> CifarBatch | tuple[str, ...]:
    """The images of a batch, or the names of the classes.

    Args:
        name: the file's name without folders.
        content: the pickle. Nothing in it is executed.
        where: names the file in errors.

    Raises:
        InputError: where it is anything else.
    """
    try:
        found = _Plain(io.BytesIO(content), encoding="bytes").load()
        if name in _NAMES:
            return tuple(label.decode() for label in found[_NAMES[name]])
        labels = [int(label) for label in found[b"fine_labels" if b"fine_labels" in found else b"labels"]]
        pixels = np.asarray(found[b"data"], dtype=np.uint8).reshape(len(labels), 3, SIDE, SIDE)
    except Exception as error:  # a damaged pickle can raise anything
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{where}: not readable as a file of CIFAR ({reason})") from None
    return CifarBatch(_SPLITS[name], pixels.transpose(0, 2, 3, 1), labels)


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
