"""Runs on a GPU: every kind of task trains there, and its weights have the same figures on the CPU."""

from __future__ import annotations

import json

import pytest
import yaml
from runs.small_runs import SMALL, make_waves
from tasks.decision_data import DECISIONS, make_decisions
from tasks.image_data import IMAGES, make_images
from tasks.text_data import LANGUAGE, make_text
from tasks.token_data import TOKENS, make_tokens

from kernel_attention_lab.cli import main
from kernel_attention_lab.runs.saved import load_run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("brief")]

TASKS = {
    "time series": (SMALL, make_waves),
    "images": (IMAGES, make_images),
    "language": (LANGUAGE, make_text),
    "tokens": (TOKENS | {"dataset": "sst2"}, make_tokens),
    "decisions": (DECISIONS, make_decisions),
}


def train(folder, make, root, keys):
    """A run on the GPU in ``folder``, in float32; the data root is returned."""
    (root / "data").mkdir()
    data_root = make(root / "data")
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(yaml.safe_dump(keys | {"accelerator": "cuda", "precision": "32-true"}, sort_keys=False))
    command = ["train", str(recipe), "--output", str(folder), "--data-root", str(data_root)]
    assert main([*command, "--progress", "false"]) == 0
    return data_root


@pytest.mark.parametrize("task", TASKS)
def test_the_weights_have_the_same_loss_on_the_cpu(task, tmp_path):
    keys, make = TASKS[task]
    data_root = train(tmp_path / "run", make, tmp_path, keys)
    found = json.loads((tmp_path / "run/seed-0/evaluation.json").read_text())
    run = load_run(tmp_path / "run")
    (_, again), *_ = run.with_keys({"accelerator": "cpu"}).evaluate(data_root=data_root)
    # Both losses are means in float32 over the same cases, a few hundred roundings each.
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-4)


def test_attacks_work_where_the_model_is(tmp_path):
    train(tmp_path / "run", make_images, tmp_path, IMAGES)
    assert main(["attack", str(tmp_path / "run"), "--attacks", "fgsm", "spsa", "--cases", "8"]) == 0
    record = json.loads((tmp_path / "run/seed-0/robustness.json").read_text())
    assert [entry["cases"] for entry in record["attacks"]] == [8, 8]
