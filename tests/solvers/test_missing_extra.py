"""Without scikit-learn the solvers say in one line what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "opening",
    ["import kernel_attention as ka; ka.solvers.KernelSVD", "from kernel_attention.solvers import KernelSVD"],
)
def test_a_missing_scikit_learn_names_the_extra(opening):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['sklearn'] = None\n{opening}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: kernel_attention.solvers needs sklearn")
    assert last.endswith("pip install 'kernel-attention[solvers]'")
    assert "During handling" not in done.stderr
