"""A new kind of task is one file: in the folder of the tasks, or a plugin's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

TASK = '''
"""Sums of random numbers, by an encoder of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kernel_attention.fields import Count
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import SequenceSplit, make_loader
from kernel_attention.series.outputs import predict_outputs
from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.tasks.experiment import Experiment, Metric
from kernel_attention_lab.tasks.recipe import EpochRecipe
from kernel_attention_lab.tasks.registry import register_task


@dataclass(frozen=True)
class SumRecipe(EpochRecipe):
    """The sum of random numbers.

    Args:
        length: how many numbers are added.
        train_cases: number of training cases.

    The other keys are those of ``EpochRecipe``.
    """

    task_name: ClassVar[str] = "sums"

    length: Count = 5
    train_cases: Count = 64


@register_task(SumRecipe)
class SumExperiment(Experiment):
    """Regression of the sum of random numbers."""

    recipe: SumRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("length",)

    @staticmethod
    def build_model(recipe: SumRecipe, facts: dict[str, Any]) -> SequenceClassifier:
        return SequenceClassifier(1, 1, facts["length"], **recipe.encoder_options())

    @property
    def metric(self) -> Metric:
        return Metric("rmse", False)

    def facts(self) -> dict[str, Any]:
        return {"dataset": self.recipe.dataset, "task": "sums", "length": self.recipe.length}

    def loaders(self, seed: int) -> tuple[Any, Any]:
        size = self.recipe.effective_batch
        train, held_out = self._cases(seed, self.recipe.train_cases), self._cases(98, 32)
        return make_loader(train, size, shuffle=True, seed=seed), make_loader(held_out, size)

    def task(self, model: Any) -> SequenceTask:
        return SequenceTask(model, self.recipe.train_settings(), is_regression=True)

    def evaluate(self, model: Any) -> dict[str, Any]:
        test = self._cases(99, 32)
        outputs = predict_outputs(model, test, precision=self.recipe.precision).squeeze(-1).numpy()
        loss = float(np.mean((outputs - test.targets) ** 2))
        return {"rmse": loss**0.5, "loss": loss, "cases": len(test)}

    def batches(self, cases: int) -> Any:
        return make_loader(self._cases(99, cases), 8)

    def _cases(self, seed: int, count: int) -> SequenceSplit:
        numbers = np.random.default_rng(seed).normal(size=(count, self.recipe.length, 1)).astype(np.float32)
        return SequenceSplit(list(numbers), numbers.sum(axis=(1, 2)))
'''.lstrip()

RECIPE = """
task: sums
dataset: numbers
attention: linear
embed_dim: 8
num_heads: 2
num_layers: 1
feedforward_dim: 8
dropout: 0.0
epochs: 2
"""


USE = """
import sys
from kernel_attention_lab.cli import main
from kernel_attention_lab.runs import run

def command(words):
    print("$", words)
    assert main(words.split()) == 0, words

command("list recipes")
command("train sums --length 4 --output run --progress false")
command("evaluate run")
run.write_report = lambda folder: None
command("analyze run --cases 4 --output numbers")
command("train other.yaml --length 3 --plugin our_sums --output other --progress false")
command("evaluate other --plugin our_sums")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources with the new file, and a family of recipes for it."""
    folder = tmp_path_factory.mktemp("new") / "checkout"
    for part in ("src", "lab/src", "lab/recipes"):
        shutil.copytree(ROOT / part, folder / part)  # with the bytecode, which need not be made again
    (folder / "lab/src/kernel_attention_lab/tasks/sums.py").write_text(TASK, encoding="utf-8")
    (folder / "lab/recipes/sums.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


@pytest.fixture
def environment(checkout) -> dict[str, str]:
    """That of a process which imports the copy."""
    return {"PYTHONPATH": os.pathsep.join(str(checkout / place) for place in ("src", "lab/src"))}


def test_a_file_in_the_folder_or_a_plugin_is_listed_trained_and_measured(environment, forks, tmp_path):
    (tmp_path / "our_sums.py").write_text(TASK.replace('"sums"', '"other_sums"'), encoding="utf-8")
    (tmp_path / "other.yaml").write_text(RECIPE.replace("sums", "other_sums"), encoding="utf-8")
    done = forks.run("-P", "-c", USE, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    said = dict(re.findall(r"^\$ (\w+ [\w.]+)(.*?)(?=^\$|\Z)", done.stdout, re.DOTALL | re.MULTILINE))
    assert "│ sums " in said["list recipes"]
    result = json.loads((tmp_path / "run/seed-0/evaluation.json").read_text())
    assert result["cases"] == 32
    assert result["best_epoch"] in (1, 2)
    assert "sums" in (tmp_path / "run/report.html").read_text()
    assert "RMSE" in said["evaluate run"]
    assert "RMSE" in said["evaluate other"]


def test_its_help_does_not_wait_for_torch(environment, tmp_path):
    script = (
        "import sys\n"
        "from kernel_attention_lab.cli import main\n"
        "try: main(['train', 'sums', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True).stdout
    assert "--length INT" in printed
    assert "how many numbers are added" in printed
    assert printed.endswith("set()\n")
