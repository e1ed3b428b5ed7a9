"""The trainer's state: written by atomic rename, read back without executing anything from the file."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from kernel_attention.atomic import write_atomically
from kernel_attention.errors import InputError
from kernel_attention.experiments.plain_yaml import require_file

_PARTS = ("callbacks", "epoch", "global_step", "loops", "optimizer_states", "state_dict")


class AtomicCheckpointIO(CheckpointIO):
    """Trainer state by atomic rename, read back without executing anything from the file."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write the state to a temporary file and rename it."""
        write_atomically(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Always with ``weights_only=True``; InputError where the file is damaged or is no checkpoint."""
        check_checkpoint(Path(path))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the errors below say what is wrong with the file
                checkpoint = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                f"checkpoint {path}: refused, it is damaged or holds more than tensors and plain values"
            ) from None
        except Exception as error:  # a damaged pickle can raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"checkpoint {path}: truncated or not a checkpoint ({reason})") from None
        missing = [part for part in _PARTS if not isinstance(checkpoint, dict) or part not in checkpoint]
        if missing:
            raise InputError(f"checkpoint {path}: not a trainer's state (it has no {', '.join(missing)})")
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file; a missing one is no error."""
        Path(path).unlink(missing_ok=True)


def check_checkpoint(path: Path) -> None:
    """InputError where the file is damaged.

    A checkpoint is a zip archive with a checksum of every part. PyTorch writes the checksums and does not
    read them.
    """
    require_file(path)
    if not zipfile.is_zipfile(path):
        return  # the reader says what else it is
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive can raise anything
        reason = str(error) or type(error).__name__
        raise InputError(f"checkpoint {path}: truncated or not a checkpoint ({reason})") from None
    if damaged is not None:
        raise InputError(f"checkpoint {path}: damaged, its part {damaged} does not have its checksum")
