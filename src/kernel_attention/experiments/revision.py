"""Which code this is."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
