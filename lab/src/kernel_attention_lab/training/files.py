"""Files that are either whole or absent: every write goes to a temporary file that is then renamed."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor

from kernel_attention.atomic import write_atomically, write_text_atomically
from kernel_attention.errors import InputError
from kernel_attention_lab.plain_yaml import require_file

_CHECKSUM = "sha256"

_log = logging.getLogger(__name__)


def is_unfinished(path: Path) -> bool:
    """Whether this is the temporary file of a killed write."""
    return re.fullmatch(r"\..+\.[0-9a-f]+\.tmp", path.name) is not None


def remove_unfinished(folder: Path) -> None:
    """Delete the temporary files of killed writes in a folder and its subfolders."""
    for path in folder.rglob(".*.tmp"):
        if is_unfinished(path):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON with two spaces of indentation. NaN is refused, because other readers refuse it."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False))


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write named arrays as ``.npz``, which ``numpy.load`` reads without pickles."""
    # mypy takes the names for the function's own arguments.
    write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    """Write YAML in the order of the keys."""
    write_text_atomically(path, yaml.safe_dump(value, sort_keys=False))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """CSV with one line per row, and a column for every key in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the text of ``csv_text`` by atomic rename."""
    write_text_atomically(path, csv_text(rows))


def write_weights(path: Path, weights: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a state dict as safetensors, with a checksum of its tensors and ``metadata`` in the header."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    data = safetensors.torch.save(tensors, {**(metadata or {}), _CHECKSUM: _checksum(tensors)})
    write_atomically(path, lambda file: file.write(data))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors; InputError where the file is missing or damaged."""
    require_file(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, UnicodeError, safetensors.SafetensorError) as error:
        raise InputError(f"{path}: not readable as safetensors weights ({error})") from None
    if _CHECKSUM not in metadata:
        _say_unchecked(path)
    elif metadata[_CHECKSUM] != _checksum(weights):
        raise InputError(f"{path}: damaged, its weights do not have the checksum that was written with them")
    return weights


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a file of ``write_weights`` that can be read."""
    with safetensors.safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def _checksum(weights: dict[str, Tensor]) -> str:
    """SHA-256 over the name, type, shape and bytes of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def _say_unchecked(path: Path) -> None:
    """Warn, once per file, that it has no checksum, as in runs of earlier versions."""
    _log.warning(
        "%s has no checksum (it was written by an earlier version): its weights are not checked", path
    )
