"""The folder of what can be made or fetched again. This module imports no other of the library."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``kernel-attention`` in the user's cache folder: downloads without a data root, compiled kernels."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kernel-attention"
