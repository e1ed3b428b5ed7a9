"""Runs of the task ``segmentation``: what they learn, start from and measure, and how they resume."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data.segmentation.pairs import colours, pair_files, png, write_files
from runs.small_runs import assert_same_outcome, read_json, stopped_at, train_arguments, trained_run

from kernel_attention.mechanisms import list_attention
from kernel_attention.models.vision import interpolate_positions
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.segmentation.sets import SegmentationSplit
from kernel_attention_lab.robustness.corruptions import CORRUPTIONS, corrupt_image
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.runs.start import prepare
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.segmentation import (
    SegmentationExperiment,
    SegmentationTask,
    segmentation_metrics,
)

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[4] / "shared" / "data")
SIZES = {
    "attention": "softmax",
    "embed_dim": 16,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 24,
    "patch_size": 2,
    "accelerator": "cpu",
    "threads": 1,
}
SMALL = SIZES | {
    "task": "segmentation",
    "dataset": "stripes",
    "image_size": 0,
    "crop_size": [12, 14],
    "epochs": 3,
    "batch_size": 4,
    "optimizer": "adamw",
    "learning_rate": 0.01,
}
CLASSIFIER = SIZES | {"task": "images", "dataset": "patches", "epochs": 1, "batch_size": 8}

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with ``stripes``, images with label maps, and ``patches``, images of one of the colours."""
    folder = tmp_path_factory.mktemp("data")
    write_files(folder / "stripes", pair_files({"train": 14, "val": 5, "test": 6}))
    for split, count in (("train", 8), ("test", 3)):
        for label in (0, 1, 3):
            for number in range(count):
                image = colours(np.full((8, 6), label), number + 100 * label)
                write_files(folder / "patches", {f"{split}/{label}/{number}.png": png(image)})
    return folder


def arguments(folder, root, keys=SMALL, **changes):
    return train_arguments(folder, {**keys, **changes}, root)


def trained(folder, root, keys=SMALL, **changes):
    return trained_run(folder, {**keys, **changes}, root)


@pytest.fixture(scope="module")
def classifier(root, tmp_path_factory):
    """A run of a classifier, of seeds 0 and 1."""
    return trained(tmp_path_factory.mktemp("start") / "classifier", root, CLASSIFIER, seeds=[0, 1])


# A run


def test_a_run_learns_what_no_constant_can(root, tmp_path):
    folder = trained(tmp_path / "run", root, epochs=12)
    evaluation, rows = read_json(folder / "seed-0/evaluation.json"), read_json(folder / "seed-0/metrics.json")
    assert evaluation["mean_iou"] > 0.8 > 0.6 > evaluation["majority_mean_iou"]
    assert evaluation["majority_mean_iou"] >= evaluation["constant_mean_iou"] > 0
    assert evaluation["cases"] == 6
    assert evaluation["pixels"] == np.sum(evaluation["confusion_matrix"]) == 6 * 11 * 12, (
        "the first column is void"
    )
    assert len(evaluation["class_iou"]) == len(evaluation["class_accuracy"]) == 3
    assert np.mean(evaluation["class_iou"]) == pytest.approx(evaluation["mean_iou"])
    best = rows[evaluation["best_epoch"] - 1]
    assert best["val_mean_iou"] == max(row["val_mean_iou"] for row in rows)
    summary = read_json(folder / "summary.json")
    assert (summary["metric"], summary["mean"]) == ("mean_iou", evaluation["mean_iou"])
    facts = read_json(folder / "data.json")
    assert facts["class_names"] == ["ground", "wall", "sky"]
    assert facts["image_sizes"] == "13 x 11"


def test_the_epoch_is_chosen_by_the_overlap_of_all_validation_pixels(root, tmp_path):
    """Its figures are those of the saved weights on the split, not a mean over batches."""
    folder = trained(tmp_path / "run", root, batch_size=2)
    evaluation, rows = read_json(folder / "seed-0/evaluation.json"), read_json(folder / "seed-0/metrics.json")
    ((_, found),) = load_run(folder).evaluate(data_root=root, split="validation")
    best = rows[evaluation["best_epoch"] - 1]
    for name in ("mean_iou", "mean_accuracy", "pixel_accuracy", "loss"):
        assert best[f"val_{name}"] == pytest.approx(found[name], rel=1e-5), name


@pytest.mark.parametrize(("changes", "at"), [({"drop_path": 0.3, "seeds": [1, 0], "epochs": 2}, 6)])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(changes, at, root, classifier, tmp_path, capsys):
    """4 steps an epoch. A seed that has begun needs the run that it started from no more."""
    start = Path(shutil.copytree(classifier, tmp_path / "classifier"))
    changes = changes | {"start_from": str(start)}
    reference = trained(tmp_path / "reference" / "run", root, **changes)
    with stopped_at(SegmentationTask, at):
        assert main(arguments(tmp_path / "run", root, **changes)) == 1
    assert f"checkpoint after step {at})\n" in capsys.readouterr().err
    if len(changes.get("seeds", [0])) == 1:
        shutil.rmtree(start)
    assert main(["train", "--resume", str(tmp_path / "run"), "--progress", "false"]) == 0
    assert_same_outcome(tmp_path / "run", reference)


def test_a_saved_run_gives_its_figures_and_its_examples_again(root, tmp_path):
    folder = trained(tmp_path / "run", root)
    run = load_run(folder)
    experiment = run.experiment(root)
    assert run.facts == experiment.facts()
    ((_, figures),) = run.evaluate(data_root=root)
    expected = read_json(folder / "seed-0/evaluation.json")
    assert figures["confusion_matrix"] == expected["confusion_matrix"]
    assert [tuple(images.shape) for (images,) in experiment.batches(2)] == [(1, 3, 11, 13)] * 2
    with np.load(folder / "seed-0/examples.npz") as examples:
        truth, predicted = examples["labels"], examples["predictions"]
        assert examples["images"].shape == (4, 11, 13, 3)
    np.testing.assert_array_equal(truth[0], experiment.test.labels[0])
    pixels = torch.from_numpy(experiment.test.images[0].copy()).permute(2, 0, 1)[None] / 255
    with torch.no_grad():
        np.testing.assert_array_equal(predicted[0], run.model()(pixels).argmax(dim=1)[0])


@pytest.mark.parametrize("name", [mechanism.name for mechanism in list_attention()])
def test_every_mechanism_takes_a_step(name, root):
    recipe = make_recipe(SMALL | {"attention": name, "embed_dim": 8})
    experiment = SegmentationExperiment(recipe, root)
    torch.manual_seed(0)
    model = experiment.build_model(recipe, experiment.facts())
    experiment.prepare(model, 0)
    batch = next(iter(experiment.loaders(0)[0]))
    torch.nn.functional.cross_entropy(
        model(*batch.arguments), batch.target.long(), ignore_index=255
    ).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_the_learning_rate_falls_with_a_power_of_the_steps_left():
    recipe = make_recipe({"task": "segmentation", "dataset": "ade20k"})
    rates = [recipe.learning_rate * recipe.learning_rate_factor(step, 1000) for step in (0, 500, 1000)]
    np.testing.assert_allclose(rates, [1e-3, 1e-5 + (1e-3 - 1e-5) * 0.5**0.9, 1e-5])
    model = SegmentationExperiment.build_model(make_recipe(SMALL), {"class_names": ["a", "b"]})
    task = SegmentationTask(model, make_recipe(SMALL | {"optimizer": "sgd", "weight_decay": 0.1}))
    task.learning_rate_factor = lambda: None
    optimizer, _ = task.make_optimizer()
    assert {group["momentum"] for group in optimizer.param_groups} == {0.9}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    (undecayed,) = (group["params"] for group in optimizer.param_groups if not group["weight_decay"])
    assert any(parameter is model.encoder.positions for parameter in undecayed)


# The start


def test_the_encoder_starts_as_the_classifier_of_its_seed(root, classifier):
    recipe = make_recipe(SMALL | {"start_from": str(classifier), "seeds": [1, 2]})
    experiment = SegmentationExperiment(recipe, root)
    for seed, source in ((1, 1), (2, 0)):
        torch.manual_seed(0)
        model = experiment.build_model(recipe, experiment.facts())
        head = model.encoder.head.weight.detach().clone()
        prepare(experiment, model, seed)
        trained, found = load_run(classifier).model(source).state_dict(), model.encoder.state_dict()
        for name, value in trained.items():
            if name == "positions":
                value = interpolate_positions(value, (4, 3), (6, 7))
            if not name.startswith("head."):
                assert torch.equal(found[name], value), name
        assert torch.equal(found["head.weight"], head)
        assert trained["input_mean"].abs().min() > 0, "the scale is the classifier's too"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 12}, "embed_dim is 16 there and 12 here; both must be equal"),
        (
            {"num_heads": 4, "pooling": "mean"},
            "num_heads is 2 there and 4 here, pooling is class there and mean here",
        ),
        ({"attention": ["softmax", "rpc"]}, "attention is softmax there and ['softmax', 'rpc'] here"),
        ({"start_from": "{root}/nowhere"}, "nowhere: not a run folder (it has no config.yaml)"),
        ({"start_from": "{other}"}, "it is of task segmentation (accepted: images)"),
        ({"start_from": "{untrained}"}, "no trained seed in it yet"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_in_one_line(
    changes, message, root, classifier, tmp_path, capsys
):
    other, untrained = tmp_path / "other", tmp_path / "untrained"
    if "{other}" in changes.values():
        trained(other, root, epochs=1)
    shutil.copytree(classifier, untrained, ignore=shutil.ignore_patterns("seed-*"))
    changes = {
        key: value.format(root=root, other=other, untrained=untrained) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    capsys.readouterr()
    assert main(arguments(tmp_path / "run", root, **({"start_from": str(classifier)} | changes))) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "start_from=" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_size": [12, 13]}, "crop_size=[12, 13] must be one or two multiples of patch_size=2"),
        ({"crop_size": [4, 4, 4]}, "must be one or two multiples"),
        ({"crop_size": []}, "crop_size=[] must be one or more whole numbers of at least 1"),
        ({"severities": [6]}, "severities=[6] must be"),
        ({"severities": [1, 1]}, "severities=[1, 1] must be"),
        ({"severities": [1]}, "corruptions need images of at least 32 pixels a side, the smallest has 11"),
        ({"optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"dataset": "nothing"}, "dataset 'nothing': no such folder or archive"),
    ],
)
def test_bad_keys_are_refused_in_one_line(changes, message, root, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", root, **changes)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# Corruptions


def test_the_corrupted_figures_are_those_of_corrupted_images(root, tmp_path, monkeypatch):
    """The mean over corruptions and severities, and one record each."""
    monkeypatch.chdir(tmp_path)
    folder = trained(tmp_path / "run", root, image_size=32, crop_size=[32, 38], epochs=1)
    command = ["evaluate", str(folder), "--data-root", str(root), "--severities", "1,4"]
    assert main([*command, "--corrupted_cases", "2", "--output", "figures.json"]) == 0
    (figures,) = read_json(tmp_path / "figures.json")
    records = figures["corruptions"]
    assert [(r["corruption"], r["severity"]) for r in records] == [
        (c, s) for c in CORRUPTIONS for s in (1, 4)
    ]
    assert figures["corrupted_cases"] == 2
    assert figures["corrupted_mean_iou"] == pytest.approx(np.mean([r["mean_iou"] for r in records]))
    experiment = load_run(folder).experiment(root)
    split = experiment.test.evenly(2)
    numbers = (0, len(experiment.test) - 1)  # in the split, so that more cases change nothing for these
    images = [
        corrupt_image(np.array(image), "fog", 4, index=number)
        for number, image in zip(numbers, split.images, strict=True)
    ]
    found = experiment._measure(load_run(folder).model(), SegmentationSplit(images, split.labels))
    (fog,) = (r for r in records if (r["corruption"], r["severity"]) == ("fog", 4))
    assert fog["mean_iou"] == found["mean_iou"]
    assert "corruptions" not in read_json(folder / "seed-0/evaluation.json")


# Real data


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "images" / "camvid240.tar").is_file(), reason=f"no images/camvid240.tar in {SHARED}"
)
def test_camvid_is_learnt_beyond_the_constant(tmp_path):
    changes = {"dataset": "camvid240", "image_size": 60, "crop_size": [64, 80], "patch_size": 8, "epochs": 4}
    folder = trained(
        tmp_path / "run",
        SHARED,
        **changes,
        train_cases=60,
        evaluation_cases=12,
        embed_dim=32,
        learning_rate=0.003,
    )
    figures = read_json(folder / "seed-0/evaluation.json")
    assert figures["pixel_accuracy"] > figures["constant_pixel_accuracy"] + 0.1
    assert figures["mean_iou"] > 2 * figures["constant_mean_iou"]
    assert figures["majority_mean_iou"] > 2 * figures["constant_mean_iou"]
    model, split = load_run(folder).model(), load_run(folder).experiment(SHARED).test
    assert split.images[0].shape == (60, 80, 3)
    assert split.labels[0].shape == (180, 240), "measured at the labels' own size"
    assert segmentation_metrics(model, [], 11, "32-true")["pixels"] == 0
