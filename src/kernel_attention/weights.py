"""Weights as safetensors files that are whole or absent, with a checksum of their tensors."""

import functools
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from kernel_attention.errors import InputError, require_file
from kernel_attention.files import write_atomically

_CHECKSUM = "sha256"

_log = logging.getLogger(__name__)


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
