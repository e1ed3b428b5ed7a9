"""An installation without extras: one line that names the extra, never a traceback; and imports that wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from checkout import SOURCES

TRAIN = ("lightning_fabric", "matplotlib", "pydantic", "rich", "safetensors", "sklearn", "yaml")


def run(script: str, *blocked: str) -> subprocess.CompletedProcess[str]:
    """A program in a process where these packages cannot be imported."""
    block = f"import sys; sys.modules |= dict.fromkeys({blocked!r})\n"
    return subprocess.run(
        [sys.executable, "-c", block + script],
        env=os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_every_command_of_a_bare_installation_names_the_extra():
    script = (
        "from kernel_attention_lab.cli import main\n"
        "for words in ('train demo', 'train --help', 'evaluate run', 'bench', 'list', 'list attention'):\n"
        "    assert main(words.split()) == 2, words\n"
    )
    process = run(script, *TRAIN, "aeon")
    assert (process.returncode, process.stdout) == (0, ""), process.stderr
    lines = process.stderr.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert line.startswith("error: kernel-attention needs ")
        assert line.endswith(", which is not installed: pip install kernel-attention-lab")


@pytest.mark.parametrize("package", ["pydantic", "lightning_fabric", "aeon"])
def test_a_package_that_is_missing_alone(package, tmp_path):
    """``train`` stops in one line wherever it first needs the package, before it writes anything."""
    output = tmp_path / "run"
    script = (
        "from kernel_attention_lab.cli import main\n"
        f"sys.exit(main(['train', 'demo', '--epochs', '1', '--output', {str(output)!r}]))"
    )
    process = run(script, package)
    asked = "'kernel-attention-lab[timeseries]'" if package == "aeon" else "kernel-attention-lab"
    assert process.returncode == 2, process.stderr
    assert f"pip install {asked}" in process.stderr.splitlines()[-1], process.stderr
    assert "Traceback" not in process.stderr
    assert not output.exists()


@pytest.mark.parametrize(
    ("package", "what"),
    [("sklearn", "kernel_attention.{}"), ("lightning_fabric", "{}.fit")],
    ids=["sklearn", "lightning_fabric"],
)
def test_estimators_name_the_extra(package, what):
    """A fitted estimator predicts without the trainer; it is asked for by ``fit``."""
    script = (
        "import kernel_attention as ka, numpy as np\n"
        "for name in ('AttentionClassifier', 'AttentionRegressor'):\n"
        "    try: getattr(ka, name)(epochs=1).fit(np.ones((4, 1, 5)), [0, 1, 0, 1])\n"
        "    except ImportError as error: print(error)"
    )
    process = run(script, package)
    assert process.stdout.splitlines() == [
        f"{what.format(name)} needs {package}, which is not installed: "
        "pip install 'kernel-attention[estimators]'"
        for name in ("AttentionClassifier", "AttentionRegressor")
    ], process.stderr


def test_a_missing_module_of_ours_is_no_missing_extra():
    script = "import kernel_attention as ka\nka.AttentionClassifier"
    process = run(script, "kernel_attention.estimators")
    assert "Traceback" in process.stderr
    assert "pip install" not in process.stderr


def test_layers_need_torch_alone():
    script = (
        "import torch, kernel_attention as ka\n"
        "layer = ka.create_attention('primal', embed_dim=8, num_heads=2, rank=2)\n"
        "print(tuple(layer(torch.zeros(1, 3, 8)).shape))"
    )
    assert run(script, *TRAIN, "aeon", "transformers", "timm").stdout == "(1, 3, 8)\n"


def test_the_import_brings_the_standard_library_alone():
    script = (
        "before = set(sys.modules)\n"
        "import kernel_attention\n"
        "brought = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(brought - set(sys.stdlib_module_names))"
    )
    assert run(script).stdout == "{'kernel_attention'}\n"


def test_a_list_does_not_wait_for_the_trainer():
    script = (
        "from kernel_attention_lab.cli import main\n"
        "main(['list'])\n"
        "heavy = {'lightning_fabric', 'sklearn', 'aeon', 'transformers', 'matplotlib', 'pandas', 'scipy'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)"
    )
    assert run(script).stderr == "set()\n"


def test_what_reads_a_run_does_not_wait_for_the_trainer():
    """Fabric brings the compiler and data parallelism, which ``evaluate`` can do without."""
    script = (
        "import kernel_attention_lab.runs.saved, kernel_attention_lab.runs.analyze\n"
        "print({'lightning_fabric', 'transformers', 'aeon'} & set(sys.modules), file=sys.stderr)"
    )
    assert run(script).stderr == "set()\n"


@pytest.mark.parametrize("words", ["--help", "--version", "evaluate --help", "bench --help", "train --help"])
def test_help_waits_for_nothing_heavy(words):
    script = (
        "from kernel_attention_lab.cli import main\n"
        f"try: main({words.split()!r})\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'lightning_fabric', 'rich', 'sklearn', 'aeon', 'transformers', 'matplotlib'}\n"
        "heavy |= {'torch', 'numpy'}\n"
        "print(code, heavy & set(sys.modules), file=sys.stderr)"
    )
    process = run(script)
    assert process.stderr == "0 set()\n"
    assert process.stdout


def test_an_estimator_brings_nothing_of_the_laboratory():
    script = (
        "import kernel_attention as ka\n"
        "ka.AttentionClassifier\n"
        "print([name for name in sys.modules if name.startswith('kernel_attention_lab')])"
    )
    assert run(script).stdout == "[]\n"
