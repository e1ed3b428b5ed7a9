"""Where a figure comes from: the processor, and the revision of the code."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def processor_name(described: Path = Path("/proc/cpuinfo")) -> str:
    """The model of the processor, as the system describes it; its architecture where it does not say.

    Args:
        described: the file in which Linux describes the processors.
    """
    try:
        lines = described.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def code_revision() -> dict[str, str]:
    """``{"revision": ...}``, git's name of this code, with ``+`` where files have changed since.

    Records that are not code, below ``results/``, may have changed. It is empty outside a clone.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        # Another repository that holds an installed copy does not track this file.
        subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=True)
        name = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = ["status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)results"]
        changed = subprocess.run([*git, *changes], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"revision": name.strip() + ("+" if changed else "")}
