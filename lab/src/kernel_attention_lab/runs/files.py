"""Files that are either whole or absent: every write goes to a temporary file that is then renamed."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kernel_attention.files import is_unfinished, write_atomically, write_text_atomically

_CHECKSUM = "sha256"

_log = logging.getLogger(__name__)


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


def remove_unfinished(folder: Path) -> None:
    """Delete the temporary files of killed writes in a folder and its subfolders."""
    for path in folder.rglob(".*.tmp"):
        if is_unfinished(path):
            path.unlink(missing_ok=True)
