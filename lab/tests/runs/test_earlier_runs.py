"""Runs of every kind of task that commit 4ea74c81 left open with today's code, and predict the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kernel_attention.models import EncoderLayer
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks.registry import build_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
KINDS = sorted(path.parent.name for path in FIXTURES.glob("*/predictions.json"))


def stored(kind):
    """The predictions of then, and the tolerance: rounding on another CPU, with a factor of 8."""
    found = json.loads((FIXTURES / kind / "predictions.json").read_text())
    return found, 8 * found.pop("rounding")


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_of_an_earlier_run_has_its_outputs(kind):
    call = load_file(FIXTURES / kind / "call.safetensors")
    expected = call.pop("outputs")
    with torch.no_grad():
        found = load_run(FIXTURES / kind / "run").model()(*(call[name] for name in sorted(call)))
    assert (found - expected).abs().max().item() <= stored(kind)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_run_predicts_and_evaluates_as_it_did(kind):
    expected, tolerance = stored(kind)
    run = load_run(FIXTURES / kind / "run")
    file = next((FIXTURES / kind).glob("new*"), None)
    if "predictions" in expected:
        assert same(run.predict(file), expected["predictions"], tolerance)
    if "evaluation" in expected:
        found = dict(run.evaluate(None if file is None else str(file)))[0]
        assert same(found, expected["evaluation"], tolerance)


def same(found, expected, tolerance):
    """Numbers within the tolerance, relative where they exceed 1; everything else equal, key by key."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return all(same(found[key], expected[key], tolerance) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(
            same(*pair, tolerance) for pair in zip(found, expected, strict=True)
        )
    if isinstance(expected, float):
        return abs(found - expected) <= tolerance * max(1.0, abs(expected))
    return found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_of_every_kind_of_task_can_ask_for_a_short_convolution(kind):
    """The model then starts as the trained one without: only the kernels are missing in its weights."""
    run = load_run(FIXTURES / kind / "run")
    plain, model = run.model(), build_model(run.with_keys({"short_convolution": 3}).recipe, run.facts)
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    layers = sum(isinstance(module, EncoderLayer) for module in plain.modules())
    assert layers
    assert len(missing) == layers
    assert all(name.endswith("short_convolution.weight") for name in missing)
    call = load_file(FIXTURES / kind / "call.safetensors")
    inputs = [call[name] for name in sorted(call) if name != "outputs"]
    with torch.no_grad():
        assert torch.equal(model.eval()(*inputs), plain(*inputs))


@pytest.mark.parametrize("kind", ["decisions", "segmentation"])
def test_an_earlier_run_has_a_report(kind, tmp_path, undrawn):
    folder = shutil.copytree(FIXTURES / kind / "run", tmp_path / kind)
    write_report(folder)
    assert "<html" in (folder / "report.html").read_text()
