"""Data sets that Hugging Face ``datasets`` saved on disk with ``save_to_disk``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError


def load_splits(folder: Path) -> Any:
    """The splits of a saved data set by their names.

    Raises:
        InputError: where the library is missing, or cannot read the folder.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"dataset {folder}: needs Hugging Face's datasets: pip install 'kernel-attention[language]'"
        ) from None
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # the library lets through what Arrow raises
        raise InputError(f"dataset {folder}: not readable by Hugging Face's datasets ({error})") from None
