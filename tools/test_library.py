"""Test the library alone, from outside the checkout, on any system: `make test-library` without make.

    python tools/test_library.py [arguments of pytest]

The library is installed into a folder of its own, without its dependencies, which are taken from this Python.
The tests are copied beside it, and neither the checkout nor the laboratory can be imported.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Install, copy, run pytest; its exit code."""
    with tempfile.TemporaryDirectory(prefix="kernel-attention-alone-") as name:
        folder = Path(name).resolve()  # macOS reaches it by a link
        site = folder / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, str(ROOT)], check=True)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / file, folder)
        environment = os.environ | {"KERNEL_ATTENTION_ALONE": "1", "PYTHONPATH": str(site)}
        command = [sys.executable, "-m", "pytest", *sys.argv[1:], "tests"]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
