"""What a run does with its data, its seeds and its folder."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics

import numpy as np
import pytest
import torch
from runs.small_runs import SMALL, train_small
from safetensors.torch import load_file

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import SequenceSplit
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.runs import run, train
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import Metric, Recipe, time_series
from kernel_attention_lab.tasks.registry import build_model

pytestmark = pytest.mark.usefixtures("brief")


def read(path):
    return json.loads(path.read_text())


def test_the_folder_holds_what_the_documentation_lists(trained):
    files = {path.relative_to(trained).as_posix() for path in trained.rglob("*") if path.is_file()}
    per_seed = {
        "best.safetensors", "evaluation.json", "last.ckpt", "last.safetensors", "metrics.csv", "metrics.json",
        "spectra.json",
    }  # fmt: skip
    shared = {"config.yaml", "data.json", "report.html", "summary.json", "versions.json"}
    assert files == shared | {f"seed-{seed}/{name}" for seed in (0, 1) for name in per_seed}
    assert all(path.stat().st_mode & 0o044 for path in trained.rglob("*")), (
        "readable for others, as umask says"
    )


def test_summary_is_mean_and_sample_deviation_of_the_seeds(trained):
    summary = read(trained / "summary.json")
    values = [read(trained / f"seed-{seed}" / "evaluation.json")["accuracy"] for seed in (0, 1)]
    assert summary["values"] == values
    assert summary["seeds"] == [0, 1]
    assert summary["mean"] == pytest.approx(sum(values) / 2)
    assert summary["std"] == pytest.approx(np.std(values, ddof=1))
    assert summary["protocol"] == "holdout"
    assert "read once" in summary["protocol_text"]
    assert (summary["recipe"], summary["dataset"], summary["attention"]) == ("run", "Waves", "primal")


def test_summarise_takes_any_number_of_seeds():
    recipe = Recipe(**SMALL, seeds=[4, 2, 7])
    results = [{"accuracy": value, "seconds": 1.0} for value in (0.5, 0.75, 0.9)]
    summary = run.summarise(recipe, "name", results, Metric("accuracy", True))
    assert summary["mean"] == pytest.approx(statistics.fmean([0.5, 0.75, 0.9]))
    assert summary["std"] == pytest.approx(statistics.stdev([0.5, 0.75, 0.9]))
    assert run.summarise(recipe, "name", results[:1], Metric("accuracy", True))["std"] is None


def test_a_seed_gives_the_same_run_alone_or_after_another(trained, waves, tmp_path):
    alone = train_small(tmp_path / "run", waves, "--seeds", "1")
    for name in ("best.safetensors", "last.safetensors", "spectra.json"):
        assert (alone / "seed-1" / name).read_bytes() == (trained / "seed-1" / name).read_bytes()


def test_seeds_differ_in_weights_and_in_the_cases_held_out(trained, waves):
    first, second = (load_file(trained / f"seed-{seed}" / "last.safetensors") for seed in (0, 1))
    assert not torch.equal(first["head.weight"], second["head.weight"])
    data, recipe = load_time_series("Waves", data_root=waves), Recipe(**SMALL)
    held_out = [time_series.split_data(data, recipe, seed)[1].sequences for seed in (0, 1)]
    assert {id(case) for case in held_out[0]} != {id(case) for case in held_out[1]}


@pytest.fixture
def watched(monkeypatch):
    """Records which splits are loaded, batched and evaluated by a run."""
    seen = {"loads": [], "trained on": [], "evaluated": [], "spectra": []}

    def load(*arguments, **options):
        seen["loads"].append(load_time_series(*arguments, **options))
        return seen["loads"][-1]

    def watch(name, what):
        original = getattr(time_series, name)

        def wrapper(*arguments, **options):
            seen[what] += [argument for argument in arguments if hasattr(argument, "sequences")]
            return original(*arguments, **options)

        monkeypatch.setattr(time_series, name, wrapper)

    monkeypatch.setattr(time_series, "load_time_series", load)
    watch("make_loader", "trained on")
    watch("evaluate_split", "evaluated")
    watch("kernel_spectra", "spectra")
    return seen


def cases(*splits):
    return [id(sequence) for split in splits for sequence in split.sequences]


def test_holdout_reads_the_test_split_once_after_training(watched, waves, tmp_path):
    train_small(tmp_path / "run", waves)
    (data,) = watched["loads"]
    fitted, chosen_on = watched["trained on"]
    assert sorted(cases(fitted, chosen_on)) == sorted(cases(data.train)), (
        "two disjoint parts of the training split"
    )
    assert watched["evaluated"] == [data.test]
    assert watched["spectra"] == [data.test], "the spectra come after the choice and enter no figure"
    labels = [set(split.targets.tolist()) for split in (fitted, chosen_on)]
    assert labels == [{0, 1, 2}, {0, 1, 2}]


def test_paper_chooses_the_epoch_on_the_test_split(watched, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, protocol="paper")
    (data,) = watched["loads"]
    assert watched["trained on"] == [data.train, data.test]
    evaluation, rows = read(folder / "seed-0/evaluation.json"), read(folder / "seed-0/metrics.json")
    best = max(rows, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
    assert evaluation["best_epoch"] == best["epoch"]
    assert evaluation["accuracy"] == pytest.approx(best["val_accuracy"])
    assert evaluation["loss"] == pytest.approx(best["val_loss"], rel=1e-5)
    assert evaluation["protocol"] == "paper"
    assert "optimistic" in read(folder / "summary.json")["protocol_text"]


# Of 15 test cases the last three are the last fifth.
def test_thesis_1_chooses_and_reports_on_the_first_four_fifths_of_the_test_split(watched, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, protocol="thesis-1")
    (data,) = watched["loads"]
    fitted, chosen_on = watched["trained on"]
    assert cases(fitted) == cases(data.train)
    assert cases(chosen_on) == cases(data.test)[:12]
    assert [cases(split) for split in watched["evaluated"] + watched["spectra"]] == [
        cases(data.test)[:12]
    ] * 2
    assert_the_best_epoch_is_reported(folder, "thesis-1", "test, first 80 %", 12)


def test_thesis_3_trains_on_four_fifths_of_the_test_split_too(watched, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, protocol="thesis-3")
    (data,) = watched["loads"]
    fitted, chosen_on = watched["trained on"]
    assert cases(fitted) == cases(data.train, data.test)[:-3]
    assert fitted.targets.tolist() == [*data.train.targets, *data.test.targets[:12]]
    assert cases(chosen_on) == cases(data.test)[12:]
    assert [cases(split) for split in watched["evaluated"] + watched["spectra"]] == [
        cases(data.test)[12:]
    ] * 2
    assert_the_best_epoch_is_reported(folder, "thesis-3", "test, last 20 %", 3)
    mean = load_file(folder / "seed-0/best.safetensors")["encoder.input_mean"]
    np.testing.assert_allclose(mean, np.concatenate(fitted.sequences).mean(axis=0), rtol=1e-5, atol=1e-6)


def assert_the_best_epoch_is_reported(folder, protocol, split, count):
    evaluation, rows = read(folder / "seed-0/evaluation.json"), read(folder / "seed-0/metrics.json")
    best = max(rows, key=lambda row: (row["val_accuracy"], -row["val_loss"]))
    assert evaluation["best_epoch"] == best["epoch"]
    assert evaluation["accuracy"] == pytest.approx(best["val_accuracy"])
    assert (evaluation["protocol"], evaluation["split"]) == (protocol, split)
    assert evaluation["cases"] == np.sum(evaluation["confusion_matrix"]) == count
    assert "optimistic" in read(folder / "summary.json")["protocol_text"]
    ((_, again),) = load_run(folder).evaluate()
    assert again["accuracy"] == evaluation["accuracy"]


# Largest accuracies of the thesis's tables 4-8 and A-14 in %, and the sizes of the archive's test splits.
@pytest.mark.parametrize(
    ("test_cases", "accuracies"),
    [
        (263, (40.4, 42.3, 44.2, 36.5, 34.6)),
        (173, (94.1, 91.2, 88.2)),
        (293, (96.6, 94.8, 98.3, 93.1, 91.4)),
        (370, (97.3, 98.7, 96.0)),
    ],
)  # fmt: skip
def test_the_last_fifth_has_the_cases_of_the_thesis_accuracies(test_cases, accuracies):
    split = SequenceSplit([np.zeros((1, 1), np.float32)] * test_cases, np.arange(test_cases))
    data = TimeSeriesData("Numbers", "classification", split, split, ("a",))
    first, last = time_series.divide_test(data)
    assert [*first.targets, *last.targets] == [*range(test_cases)]
    # Half a unit of the printed digit; some figures were rounded twice, to 0.01 and then to 0.1.
    for accuracy in accuracies:
        assert np.abs(100 * np.arange(len(last) + 1) / len(last) - accuracy).min() <= 0.055, accuracy


def test_the_thesis_protocols_need_five_test_cases(waves):
    data = load_time_series("Waves", data_root=waves)
    few = dataclasses.replace(data, test=data.test.subset(range(4)))
    with pytest.raises(InputError, match=r"test split of Waves has 4 cases.* need at least 5"):
        time_series.split_data(few, Recipe(**SMALL, protocol="thesis-1"), 0)


def test_the_scale_of_the_inputs_is_that_of_the_cases_trained_on(watched, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves)
    steps = np.concatenate(watched["trained on"][0].sequences)
    weights = load_file(folder / "seed-0/best.safetensors")
    np.testing.assert_allclose(weights["encoder.input_mean"], steps.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights["encoder.input_std"], steps.std(axis=0), rtol=1e-5)


def test_evaluate_every_is_respected(waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, epochs=5, evaluate_every=2)
    rows = read(folder / "seed-0/metrics.json")
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["epoch"] for row in rows if "val_loss" in row] == [2, 4]
    assert all(
        {"train_loss", "train_accuracy", "objective_layer_0", "objective_layer_1"} <= row.keys()
        for row in rows
    )
    assert read(folder / "seed-0/evaluation.json")["best_epoch"] in (2, 4)
    with (folder / "seed-0/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["val_loss"] != "" for row in table] == [False, True, False, True, False]


def test_the_best_weights_are_those_of_the_best_epoch(waves, tmp_path):
    """A run that ends at the best epoch of a longer one has the longer one's best weights as its last."""
    long = train_small(tmp_path / "long", waves, "--epochs", "4")
    best = read(long / "seed-0/evaluation.json")["best_epoch"]
    short = train_small(tmp_path / "short", waves, "--epochs", str(best))
    assert (short / "seed-0/last.safetensors").read_bytes() == (long / "seed-0/best.safetensors").read_bytes()


def test_kept_weights_are_those_of_their_epochs(waves, tmp_path):
    """The untrained ones too, and a run that keeps weights trains as one that does not."""
    folder = train_small(tmp_path / "run", waves, epochs=4, keep_weights_every=2)
    plain = train_small(tmp_path / "plain", waves, epochs=4)
    names = sorted(path.name for path in (folder / "seed-0").glob("epoch-*"))
    assert names == ["epoch-000.safetensors", "epoch-002.safetensors", "epoch-004.safetensors"]
    assert not list(plain.rglob("epoch-*"))
    last = (folder / "seed-0/epoch-004.safetensors").read_bytes()
    assert last == (plain / "seed-0/last.safetensors").read_bytes()
    saved = load_run(folder)
    torch.manual_seed(0)
    untrained = build_model(saved.recipe, saved.facts)
    kept = saved.model(0, epoch=0).state_dict()
    for name, value in untrained.state_dict().items():
        if "input_" not in name:  # the scale of the data, set before training
            torch.testing.assert_close(kept[name], value, rtol=0, atol=0)
    with pytest.raises(InputError, match=r"epoch=3 of seed 0 is not in .* \(kept: \[0, 2, 4\]\)"):
        saved.model(0, epoch=3)


def test_regression_is_measured_in_rmse_and_r2(trained_regression, waves):
    folder = trained_regression
    evaluation, rows = read(folder / "seed-0/evaluation.json"), read(folder / "seed-0/metrics.json")
    assert {"val_rmse", "val_r2", "train_rmse"} <= rows[0].keys()
    assert "val_accuracy" not in rows[0]
    best = min(rows, key=lambda row: row["val_loss"])
    assert evaluation["best_epoch"] == best["epoch"]
    assert evaluation["rmse"] == pytest.approx(evaluation["loss"] ** 0.5)
    targets = load_time_series("Tides", data_root=waves).test.targets
    assert evaluation["r2"] == pytest.approx(1 - evaluation["loss"] / np.var(targets), rel=1e-4)
    assert read(folder / "summary.json")["metric"] == "rmse"


def test_the_trained_model_comes_back_from_the_folder(trained, waves):
    saved = load_run(trained)
    assert saved.seeds == [0, 1]
    assert saved.recipe == Recipe(**SMALL, seeds=[0, 1])
    model = saved.model(1)
    assert isinstance(model, SequenceClassifier)
    assert not model.training
    with pytest.raises(InputError, match="seed=7"):
        saved.model(7)


@pytest.mark.filterwarnings("ignore:precision=bf16-mixed")  # slow on a processor without bfloat16, but right
def test_mixed_precision_trains_and_evaluates(trained, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, "--precision", "bf16-mixed")
    rows = read(folder / "seed-0/metrics.json")
    exact_rows = read(trained / "seed-0/metrics.json")
    assert rows[0]["train_loss"] != exact_rows[0]["train_loss"]
    # bfloat16 has 8 bits of mantissa: a step is off by 2^-8 of the values that enter it.
    assert rows[0]["train_loss"] == pytest.approx(exact_rows[0]["train_loss"], rel=2**-5)
    assert load_file(folder / "seed-0/best.safetensors")["head.weight"].dtype == torch.float32


def test_a_run_from_python_may_use_numpy_numbers(waves, tmp_path):
    """What ``config.yaml`` gives back is the same recipe."""
    options = SMALL | {
        "attention": {"primal": {"rank": np.int64(3)}},
        "epochs": np.int64(1),
        "dropout": np.float32(0.5),
    }
    recipe = Recipe(**options)
    train(recipe, tmp_path / "run", data_root=waves, progress=False)
    assert load_run(tmp_path / "run").recipe == recipe


@pytest.mark.parametrize("attention", ["softmax", ["softmax", {"primal": {"rank": 3, "eta": 0.1}}], "cosine"])
def test_any_mechanism_trains(attention, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, attention=attention, epochs=1)
    row = read(folder / "seed-0/metrics.json")[0]
    objectives = [key for key in row if key.startswith("objective")]
    assert objectives == (["objective_layer_1"] if isinstance(attention, list) else [])
