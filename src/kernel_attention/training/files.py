"""Files that are either whole or not there: every write goes to a neighbour and is renamed into place."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
import yaml
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor

from kernel_attention.errors import InputError


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Call ``write`` on a temporary file beside ``path``, flush it to disk, rename it to ``path``."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """JSON with two spaces of indentation; NaN is refused, as other readers refuse it."""
    write_atomically(path, lambda file: file.write(json.dumps(value, indent=2, allow_nan=False).encode()))


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    """YAML in the order of the keys."""
    write_atomically(path, lambda file: file.write(yaml.safe_dump(value, sort_keys=False).encode()))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row; a column for every key that occurs, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """A state dict as safetensors."""
    data = safetensors.torch.save({name: tensor.detach().contiguous() for name, tensor in weights.items()})
    write_atomically(path, lambda file: file.write(data))


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from safetensors; InputError where the file is missing or damaged."""
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path}: not readable as safetensors weights ({error})") from None


def read_json(path: Path) -> Any:
    """InputError where the file is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None


class AtomicCheckpointIO(CheckpointIO):
    """Trainer state by atomic rename, read back without executing anything from the file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """See :class:`CheckpointIO`."""
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Always with ``weights_only=True``; InputError where the file is truncated or is no checkpoint."""
        try:
            return torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"checkpoint {path}: truncated or not a checkpoint ({reason})") from None

    def remove_checkpoint(self, path: Any) -> None:
        """See :class:`CheckpointIO`."""
        Path(path).unlink(missing_ok=True)
