"""The folders of this checkout."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kernel_attention": ROOT / "src" / "kernel_attention",
    "kernel_attention_lab": ROOT / "lab" / "src" / "kernel_attention_lab",
}
SOURCES = os.pathsep.join(str(folder.parent) for folder in PACKAGES.values())
"""PYTHONPATH of a process that imports both packages from here."""
