"""Generated data sets on disk; a file is whole or absent."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kernel_attention.atomic import write_atomically
from kernel_attention.errors import writing

logger = logging.getLogger(__name__)


def cached_arrays(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in an ``.npz`` file. If it is missing or damaged, they are made and written again.

    Raises:
        InputError: where the file cannot be written.
    """
    try:
        # Opened here, because NumPy leaves a damaged file open.
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError):
        logger.info("generating %s", path)
    arrays = make()
    with writing(f"cache {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **arrays))
    return arrays
