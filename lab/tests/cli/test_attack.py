"""``attack``: a record beside the weights, written attack by attack; nothing where it was refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from kernel_attention_lab.cli import main
from kernel_attention_lab.data import load_ood
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.robustness import ATTACKS, attacked_cases, out_of_distribution_scores
from kernel_attention_lab.runs import attack as attack_module
from kernel_attention_lab.runs import run as run_module
from kernel_attention_lab.runs.saved import load_run

RECIPE = """task: images
dataset: digits
attention: {attention}
embed_dim: 32
num_heads: 2
num_layers: 2
feedforward_dim: 64
patch_size: 4
epochs: 5
pooling: mean
batch_size: 32
learning_rate: 0.01
augmentation: none
seeds: {seeds}
"""
RPC = "{rpc: {iterations: 3, lam: 0.1}}"


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits as an image folder: 300 to train, 90 to test."""
    root = tmp_path_factory.mktemp("images")
    bunch = load_digits()
    for index, (image, target) in enumerate(zip(bunch.images[:390], bunch.target[:390], strict=True)):
        folder = root / "digits" / ("train" if index < 300 else "test") / str(target)
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (image * 15.9).astype(np.uint8)
        Image.fromarray(np.repeat(pixels[..., None], 3, axis=2)).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="session")
def image_runs(digits_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of RPC-Attention with two seeds, and its softmax twin with one."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(run_module, "write_report", lambda folder: None)
        for name, attention, seeds in (("rpc", RPC, "[0, 1]"), ("softmax", "softmax", "[0]")):
            recipe = root / f"{name}.yaml"
            recipe.write_text(RECIPE.format(attention=attention, seeds=seeds))
            output = str(root / name)
            words = ["train", str(recipe), "--data_root", str(digits_folder), "--output", output]
            assert main([*words, "--progress", "false", "--accelerator", "cpu", "--threads", "1"]) == 0
    return {name: root / name for name in ("rpc", "softmax")}


@pytest.fixture(scope="session")
def cropped_run(digits_folder: Path, image_runs: dict[str, Path]) -> Path:
    """A run whose images are kept with 40 pixels a side, of which the model sees the middle 32."""
    generator = np.random.default_rng(0)
    for name in ("kite", "lamp"):
        place = digits_folder / "tiny_imagenet100" / "ood_val" / name
        place.mkdir(parents=True)
        for number in range(4):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(place / f"{number}.png")
    root = image_runs["rpc"].parent
    keys = "image_size: 32\ncrop_ratio: 0.8\nevaluation_cases: 50\ntrain_cases: 64\n"
    recipe = root / "cropped.yaml"
    recipe.write_text(
        RECIPE.format(attention="softmax", seeds="[0]").replace("epochs: 5", "epochs: 1") + keys
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr(run_module, "write_report", lambda folder: None)
        words = ["train", str(recipe), "--data_root", str(digits_folder), "--output", str(root / "cropped")]
        assert main([*words, "--progress", "false", "--accelerator", "cpu", "--threads", "1"]) == 0
    return root / "cropped"


@pytest.fixture(autouse=True)
def own_cache(image_runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(image_runs["rpc"].parent / "cache"))


@pytest.fixture
def run(image_runs, here):
    return shutil.copytree(image_runs["rpc"], here / "rpc")


def read(run: Path, seed: int = 0) -> dict:
    return json.loads((run / f"seed-{seed}" / "robustness.json").read_text())


def test_the_table_of_a_run(cli, run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = cli("attack", run, "--quick")
    assert code == 0
    assert re.fullmatch(r"(\d\d:\d\d:\d\d seed [01], attack \d of 8: [^\n]+\n)+", err)
    added = {path for path in run.rglob("*") if path.is_file()} - set(before)
    assert added == {run / f"seed-{seed}" / "robustness.json" for seed in (0, 1)}
    assert all(path.read_bytes() == content for path, content in before.items())
    record = read(run)
    attacks = [entry["attack"] for entry in record["attacks"]]
    assert attacks == ["clean", "fgsm", "pgd", "sld", "noise", "square", "spsa", "cw"]
    for entry in record["attacks"]:
        assert entry["cases"] == 16
        assert unpack_bits(entry["bits"], 16).mean() == entry["accuracy"]
        assert entry["protocol"] == "pixel"
        assert (entry["eps"] == 1 / 255) == ATTACKS[entry["attack"]].takes_eps
        assert entry["attack"] in out
    by_name = {entry["attack"]: entry for entry in record["attacks"]}
    assert by_name["clean"]["accuracy"] >= by_name["pgd"]["accuracy"]
    assert by_name["pgd"]["options"]["steps"] == 20
    shifts = by_name["cw"]["shifts"]
    assert [shift is None for shift in shifts] == unpack_bits(by_name["cw"]["bits"], 16).tolist()
    assert "seed 0" in out
    assert "seed 1" in out


def test_images_are_cropped_as_the_model_was_evaluated(cli, cropped_run, digits_folder, here):
    run = shutil.copytree(cropped_run, here / "cropped")
    assert cli("attack", run, "--attacks", "clean", "--cases", 90)[0] == 0
    assert cli("attack", run, "--plan", "corruptions", "out_of_distribution", "--cases", 3)[0] == 0
    saved = load_run(run)
    model, data = saved.model(0), saved.experiment(digits_folder).data
    middle = (slice(None), slice(4, 36), slice(4, 36))
    images = data.test.images[middle]
    order = attacked_cases(90, 90)
    record = read(run)
    assert record["images"]["cases"] == 90, "evaluation_cases is the length of an evaluation"
    (clean,) = record["attacks"]
    with torch.no_grad():
        logits = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()).float() / 255)
    right = logits.argmax(1).numpy() == data.test.targets
    assert unpack_bits(clean["bits"], 90).tolist() == right[order].tolist()
    assert record["corruptions"]["cases"] == 3
    unseen = load_ood("tiny_imagenet100", digits_folder, image_size=40).split.evenly(3)
    expected = out_of_distribution_scores(model, images[order[:3]], unseen.images[middle])
    assert expected.items() <= record["out_of_distribution"].items()


def test_a_finished_attack_is_not_run_again(cli, run, monkeypatch):
    words = ("attack", run, "--seed", 0, "--cases", 8, "--attacks")
    assert cli(*words, "fgsm", "noise")[0] == 0
    first = read(run)
    calls = []
    measure = attack_module.measure_attack
    monkeypatch.setattr(
        attack_module,
        "measure_attack",
        lambda model, images, labels, step, **rest: (
            calls.append(step.attack),
            measure(model, images, labels, step, **rest),
        )[1],
    )
    assert cli(*words, "fgsm", "noise", "pgd")[0] == 0
    assert calls == ["pgd"]
    second = read(run)
    assert second["attacks"][:2] == first["attacks"]
    calls.clear()
    assert cli(*words, "fgsm", "--eps", "1/255", "2/255")[0] == 0
    assert cli(*words, "fgsm", "--attack-seed", 3)[0] == 0
    assert calls == ["fgsm", "fgsm"]
    calls.clear()
    assert cli(*words, "fgsm", "--again", "true")[0] == 0
    assert calls == ["fgsm"]
    assert len(read(run)["attacks"]) == 5

    def without_seconds(record):
        return sorted(
            json.dumps({key: value for key, value in entry.items() if key != "seconds"}, sort_keys=True)
            for entry in record["attacks"]
        )

    assert set(without_seconds(first)) <= set(without_seconds(read(run)))


def test_an_interrupted_plan_keeps_what_is_done(cli, run, monkeypatch):
    measure = attack_module.measure_attack

    def interrupted(model, images, labels, step, **rest):
        if step.attack == "pgd":
            raise KeyboardInterrupt
        return measure(model, images, labels, step, **rest)

    words = ("attack", run, "--seed", 0, "--cases", 8, "--attacks", "fgsm", "pgd")
    with monkeypatch.context() as patch:
        patch.setattr(attack_module, "measure_attack", interrupted)
        code, _, err = cli(*words)
    assert code == 1
    assert [line for line in err.splitlines() if line.strip()][-3:] == [
        "interrupted",
        f"saved: the attacks that are done, in {run}/seed-*",
        "resume: the same command goes on after them",
    ]
    assert [entry["attack"] for entry in read(run)["attacks"]] == ["fgsm"]
    assert not list(run.rglob(".lock"))
    assert cli(*words)[0] == 0
    assert [entry["attack"] for entry in read(run)["attacks"]] == ["fgsm", "pgd"]


def test_other_weights_begin_a_new_record(cli, run):
    words = ("attack", run, "--cases", 8, "--attacks")
    assert cli(*words, "fgsm")[0] == 0
    old = read(run)
    shutil.copy(run / "seed-1" / "best.safetensors", run / "seed-0" / "best.safetensors")
    assert cli(*words, "noise")[0] == 0
    assert [entry["attack"] for entry in read(run)["attacks"]] == ["noise"]
    assert read(run)["weights"] == read(run, 1)["weights"] != old["weights"]


def test_what_others_have_written_into_the_record_stays(cli, run):
    words = ("attack", run, "--seed", 0, "--cases", 8, "--attacks")
    assert cli(*words, "fgsm")[0] == 0
    path = run / "seed-0" / "robustness.json"
    path.write_text(json.dumps(read(run) | {"somebody_elses": {"accuracy": 0.5}}))
    assert cli(*words, "noise")[0] == 0
    assert read(run)["somebody_elses"] == {"accuracy": 0.5}
    assert len(read(run)["attacks"]) == 2


@pytest.fixture
def nothing_unseen(digits_folder: Path) -> Iterator[None]:
    """No folder of unseen images, whichever tests came before."""
    place, aside = digits_folder / "tiny_imagenet100", digits_folder / "aside"
    if is_there := place.is_dir():
        place.rename(aside)
    yield
    if is_there:
        aside.rename(place)


@pytest.mark.usefixtures("nothing_unseen")
def test_uncertainty_of_every_seed_and_the_ensemble_of_all(cli, run, image_runs, here):
    """Images of 8 x 8 pixels are too small to corrupt, and there is no set of unseen ones: both are said."""
    code, out, _ = cli("attack", run, "--plan", "uncertainty", "ensemble", "--cases", 40)
    assert code == 0
    assert "uncertainty" in read(run)
    assert "ensemble" not in read(run), "it stands beside the last seed"
    found = read(run, 1)
    assert list(found["uncertainty"]["methods"]) == ["plain", "temperature"]
    assert found["uncertainty"]["cases"] == {"known": 40}
    assert found["ensemble"]["members"] == 2
    assert {"corrupted", "unseen"} == found["ensemble"]["absent"].keys()
    assert "H, W >= 32" in found["ensemble"]["absent"]["corrupted"]
    assert "ensemble: known: accuracy" in out
    assert "unseen: not measured" in out
    page = (run / "report.html").read_text("utf-8")
    assert "Reliability diagram" in page
    assert "one pass" in page
    damaged = found | {"ensemble": {"methods": {"ensemble": {"known": {"accuracy": 1}}}}}
    (run / "seed-1" / "robustness.json").write_text(json.dumps(damaged))
    assert "robustness.json" in " ".join(read_run(run).problems)
    code, _, err = cli("attack", image_runs["softmax"], "--plan", "ensemble", "--output", here / "out")
    assert code == 2
    assert "has 1 trained model, accepted: 2 and more seeds" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--attacks", "fgms"], "unknown attack 'fgms'; did you mean 'fgsm'"),
        (["--plan", "tabel"], "unknown plan 'tabel'; did you mean 'table'"),
        (["--plan", "table", "--attacks", "fgsm"], "give plans or attacks, not both"),
        (["--eps", "2/255"], "eps and protocol are for attacks by name"),
        (["--attacks", "fgsm", "--eps=-1/255"], "--eps '-1/255' must be a positive number, such as 1/255"),
        (["--attacks", "fgsm", "--eps", "1/0"], "--eps '1/0' must be a positive number"),
        (["--attacks", "fgsm", "--protocol", "pixels"], "unknown protocol 'pixels'; did you mean 'pixel'"),
        (["--attacks", "square", "--protocol", "paper"], "takes pixels in [0, 1]"),
        (["--cases", "0"], "cases=0 must be at least 1"),
        (["--batch-size", "0"], "batch_size=0 must be a whole number of at least 1"),
        (["--attack-seed", "-1"], "attack_seed=-1 must be at least 0"),
        (["--seed", "7"], "seed=7 is not in"),
        (["--transfer", "nowhere"], "run nowhere: not a run folder"),
        (["--output", "file.txt/out"], "output file.txt/out: cannot be written"),
        (["--eps_step", "1"], "attack has no option --eps_step"),
    ],
)
def test_bad_arguments(refused, image_runs, here, options, message):
    (here / "file.txt").write_text("in the way")
    assert message in refused("attack", image_runs["rpc"], *options)


def test_a_run_of_another_task(refused, trained):
    assert "task time_series has no images to attack (accepted: task images; task tokens with" in refused(
        "attack", trained
    )


def test_a_transfer_from_other_data(refused, image_runs, here):
    other = shutil.copytree(image_runs["softmax"], here / "other")
    facts = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps(facts | {"test_cases": 5}))
    message = refused("attack", image_runs["rpc"], "--transfer", other)
    assert "its data are not those of" in message
    assert "(they differ in test_cases)" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("{}", "has no 'weights'"),
        ('{"weights": "0", "attacks": [{"attack": "pgd"}]}', "has no 'protocol'"),
        (
            '{"weights": "0", "attacks": [{"attack": "pgd", "protocol": "pixel", "bits": "zz"}]}',
            "robustness.json",
        ),
    ],
)
def test_a_damaged_record(refused, run, content, message):
    (run / "seed-0" / "robustness.json").write_text(content)
    assert message in refused("attack", run, "--attacks", "fgsm")
