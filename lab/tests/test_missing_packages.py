"""An installation without extras: one line that names the extra, never a traceback; and imports that wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from checkout import SOURCES

Program = Callable[..., subprocess.CompletedProcess[str]]
TRAIN = ("lightning_fabric", "matplotlib", "pydantic", "rich", "safetensors", "sklearn", "yaml")


@pytest.fixture
def run(forks) -> Program:
    """Runs a program in a process that has torch and where these packages cannot be imported."""

    def run(script: str, *blocked: str) -> subprocess.CompletedProcess[str]:
        return forks.run("-c", f"import sys; sys.modules |= dict.fromkeys({blocked!r})\n{script}")

    return run


def test_every_command_of_a_bare_installation_names_the_extra(run):
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
def test_a_package_that_is_missing_alone(package, tmp_path, run):
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
def test_estimators_name_the_extra(package, what, run):
    """A fitted estimator predicts without the trainer; ``fit`` asks for it. No laboratory is needed."""
    script = (
        "import kernel_attention as ka, numpy as np\n"
        "for name in ('AttentionClassifier', 'AttentionRegressor'):\n"
        "    try: getattr(ka, name)(epochs=1).fit(np.ones((4, 1, 5)), [0, 1, 0, 1])\n"
        "    except ImportError as error: print(error)\n"
        "assert not [name for name in sys.modules if name.startswith('kernel_attention_lab')]"
    )
    process = run(script, package)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        f"{what.format(name)} needs {package}, which is not installed: "
        "pip install 'kernel-attention[estimators]'"
        for name in ("AttentionClassifier", "AttentionRegressor")
    ], process.stderr


def test_a_missing_module_of_ours_is_no_missing_extra(run):
    script = "import kernel_attention as ka\nka.AttentionClassifier"
    process = run(script, "kernel_attention.estimators")
    assert "Traceback" in process.stderr
    assert "pip install" not in process.stderr


def test_layers_need_torch_alone(run):
    script = (
        "import torch, kernel_attention as ka\n"
        "layer = ka.create_attention('primal', embed_dim=8, num_heads=2, rank=2)\n"
        "print(tuple(layer(torch.zeros(1, 3, 8)).shape))"
    )
    assert run(script, *TRAIN, "aeon", "transformers", "timm").stdout == "(1, 3, 8)\n"


def test_the_import_brings_the_standard_library_alone(run):
    script = (
        "before = set(sys.modules)\n"
        "import kernel_attention\n"
        "brought = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(brought - set(sys.stdlib_module_names))"
    )
    assert run(script).stdout == "{'kernel_attention'}\n"


def test_a_list_and_what_reads_a_run_do_not_wait_for_the_trainer(run):
    """Fabric brings the compiler and data parallelism, which ``evaluate`` can do without."""
    script = (
        "from kernel_attention_lab.cli import main\n"
        "main(['list'])\n"
        "heavy = {'lightning_fabric', 'sklearn', 'aeon', 'transformers', 'matplotlib', 'pandas', 'scipy'}\n"
        "print(heavy & set(sys.modules), file=sys.stderr)\n"
        "import kernel_attention_lab.runs.saved, kernel_attention_lab.runs.analyze\n"
        "print({'lightning_fabric', 'transformers', 'aeon'} & set(sys.modules), file=sys.stderr)"
    )
    assert run(script).stderr == "set()\nset()\n"


def test_a_classifier_waits_for_the_base_classes_of_sklearn_alone(run):
    """scikit-learn's models, measures and searches take longer than all modules of this library."""
    script = (
        "import kernel_attention as ka\n"
        "ka.AttentionClassifier\n"
        "heavy = {'lightning_fabric', 'aeon', 'transformers', 'matplotlib', 'timm', 'rich'}\n"
        "heavy |= {f'sklearn.{name}' for name in ('svm', 'linear_model', 'metrics', 'model_selection')}\n"
        "print(heavy & set(sys.modules))"
    )
    assert run(script).stdout == "set()\n"


def test_help_waits_for_nothing_heavy():
    commands = ("--help", "--version", "evaluate --help", "bench --help", "train --help")
    script = (
        "import sys\n"
        "from kernel_attention_lab.cli import main\n"
        "heavy = {'lightning_fabric', 'rich', 'sklearn', 'aeon', 'transformers', 'matplotlib'}\n"
        "heavy |= {'torch', 'numpy'}\n"
        f"for words in {commands}:\n"
        "    try: main(words.split())\n"
        "    except SystemExit as end: print(words, end.code, heavy & set(sys.modules), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": SOURCES},
        capture_output=True,
        text=True,
    )
    assert process.stderr.splitlines() == [f"{words} 0 set()" for words in commands]
    assert process.stdout.count("usage: ") == len(commands) - 1
