"""A new mechanism is a function, a layer and a line of the table: the battery covers it unasked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_the_battery_covers_a_new_mechanism_without_further_edits():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "contracts.dummy_mechanism",
    ]
    selection = ["-k", "dummy", "-m", "not slow", str(TESTS / "contracts")]
    program = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [command[0], "-c", program, *command[3:], *selection],
        cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) > 30
