"""Files that are either whole or not there: every write goes to a neighbour and is renamed into place."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml
from torch import Tensor

from kernel_attention.atomic import write_atomically, write_text_atomically
from kernel_attention.errors import InputError


def is_unfinished(path: Path) -> bool:
    """Whether this is what a write leaves that was killed."""
    return re.fullmatch(r"\..+\.\d+\.tmp", path.name) is not None


def remove_unfinished(folder: Path) -> None:
    """Delete what killed writes left in a folder and in those inside it."""
    for path in folder.rglob(".*.tmp"):
        if is_unfinished(path):
            path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """JSON with two spaces of indentation; NaN is refused, as other readers refuse it."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False))


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    """YAML in the order of the keys."""
    write_text_atomically(path, yaml.safe_dump(value, sort_keys=False))


def csv_text(rows: list[dict[str, Any]]) -> str:
    """One line a row; a column for every key that occurs, in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """See :func:`csv_text`."""
    write_text_atomically(path, csv_text(rows))


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
