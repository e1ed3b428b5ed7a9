"""Runs of the task ``images``: what they learn and leave behind, and that they go on where they stopped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.small_runs import assert_same_outcome, read_json, stopped_at, train_arguments, trained_run
from tasks.image_data import IMAGES, make_images

from kernel_attention.mechanisms import list_attention
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.images.sets import load_images
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.images import ImageExperiment, ImageRecipe, ImageTask
from kernel_attention_lab.tasks.vision import channel_statistics

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[4] / "shared" / "data")
EVERYTHING = {
    "augmentation": "deit",
    "random_erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "ema_decay": 0.9,
    "repeats": 2,
    "drop_path": 0.2,
    "warmup_epochs": 1,
}

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with the set ``patches``: noisy images of 12 x 8 pixels in three colours."""
    return make_images(tmp_path_factory.mktemp("data"))


def arguments(folder, root, **changes):
    return train_arguments(folder, IMAGES | changes, root)


def trained(folder, root, **changes):
    return trained_run(folder, IMAGES | changes, root)


def test_a_run_learns_colours(root, tmp_path):
    folder = trained(tmp_path / "run", root, epochs=5)
    evaluation = read_json(folder / "seed-0/evaluation.json")
    assert evaluation["accuracy"] > 0.9, "the colour decides, the noise does not hide it"
    assert evaluation["cases"] == np.sum(evaluation["confusion_matrix"]) == 21
    assert "top5_accuracy" not in evaluation, "three classes have no fifth"
    facts = read_json(folder / "data.json")
    assert (facts["height"], facts["width"], facts["class_names"]) == (12, 8, ["blue", "green", "red"])
    assert read_json(folder / "summary.json")["mean"] == evaluation["accuracy"]


@pytest.mark.parametrize(("changes", "at"), [(EVERYTHING, 9)])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(changes, at, root, tmp_path, capsys):
    """6 steps an epoch; augmentation, mixing, moving average and dropped paths are resumed with the rest."""
    reference = trained(tmp_path / "reference" / "run", root, **changes)
    with stopped_at(ImageTask, at):
        assert main(arguments(tmp_path / "run", root, **changes)) == 1
    assert f"(seed 0: checkpoint after step {at})\n" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "--progress", "false"]) == 0
    assert_same_outcome(tmp_path / "run", reference)


def test_a_saved_run_gives_its_figures_again(root, tmp_path):
    folder = trained(tmp_path / "run", root, **EVERYTHING)
    run = load_run(folder)
    assert run.facts == run.experiment(root).facts()
    ((_, figures),) = run.evaluate(data_root=root)
    assert figures["accuracy"] == read_json(folder / "seed-0/evaluation.json")["accuracy"]
    batches = list(run.experiment(root).batches(9))
    assert sum(len(images) for (images,) in batches) == 9
    assert run.model()(batches[0][0]).shape[1] == 3


def test_the_models_scale_is_that_of_the_training_part(root, tmp_path):
    experiment = ImageExperiment(make_recipe(IMAGES), root)
    model = experiment.build_model(experiment.recipe, experiment.facts())
    experiment.prepare(model, 0)
    batches, held_out = experiment.loaders(0)
    pixels = torch.cat([batch.pixels for batch in batches]).double()
    assert (len(pixels), sum(len(batch.x) for batch in held_out)) == (45, 15)
    torch.testing.assert_close(model.input_mean.double(), pixels.mean(dim=(0, 2, 3)), rtol=0, atol=1e-6)
    deviation = pixels.std(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(model.input_std.double(), deviation, rtol=0, atol=1e-6)


def test_a_constant_channel_keeps_its_values():
    images = np.zeros((5, 4, 4, 3), np.uint8)
    mean, deviation = channel_statistics(images)
    assert mean.tolist() == [0, 0, 0]
    assert deviation.tolist() == [1, 1, 1]


def test_the_moving_average_is_that_of_the_weights(root):
    """After t steps: decay^(t-1) w_1 + (1 - decay) sum_s decay^(t-s) w_s, s from 2 to t."""
    task = ImageTask(*_small_model(), size=(12, 8))
    weights = []
    for _ in range(4):
        for parameter in task.model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        task.average.update_parameters(task.model)
        weights.append(task.model.head.weight.detach().double().clone())
    expected = weights[0]
    for weight in weights[1:]:
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(task.evaluated.head.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_decay_for_biases_norms_positions_and_class_token():
    task = ImageTask(*_small_model(), size=(12, 8))
    decayed, kept = task.parameter_groups()
    shapes = {id(parameter): name for name, parameter in task.model.named_parameters()}
    names = [{shapes[id(parameter)] for parameter in group["params"]} for group in (decayed, kept)]
    assert names[0].isdisjoint(names[1])
    assert names[0] | names[1] == set(shapes.values())
    assert {"positions", "class_token", "norm.weight", "head.bias", "patches.bias"} <= names[1]
    assert {"head.weight", "patches.weight", "layers.0.linear1.weight"} <= names[0]
    assert kept["weight_decay"] == 0


def _small_model():
    recipe = make_recipe(IMAGES | EVERYTHING)
    facts = {"height": 12, "width": 8, "class_names": ["a", "b"]}
    return ImageExperiment.build_model(recipe, facts), recipe


def test_schedule():
    """Linear to the rate over two epochs of five steps, half of the way down at the middle of the rest."""
    recipe = ImageRecipe(dataset="x", epochs=10, warmup_epochs=2, learning_rate=1.0, min_learning_rate=0.1)
    rates = [recipe.learning_rate_factor(step, 5) for step in range(51)]
    np.testing.assert_allclose(rates[9], 1.0)
    np.testing.assert_allclose(np.diff(rates[:10]), np.diff(rates[:10])[0])
    np.testing.assert_allclose(rates[30], (1 + 0.1) / 2)
    np.testing.assert_allclose(rates[50], 0.1)
    assert np.argmax(rates) == 9 or rates[10] == 1.0
    constant = ImageRecipe(dataset="x", schedule="constant", warmup_epochs=1)
    assert constant.learning_rate_factor(10_000, 5) == 1.0


@pytest.mark.parametrize("name", [mechanism.name for mechanism in list_attention()])
def test_every_mechanism_takes_a_step(name, root):
    recipe = make_recipe(IMAGES | {"attention": name, "num_layers": 1, "train_cases": 16})
    experiment = ImageExperiment(recipe, root)
    model = experiment.build_model(recipe, experiment.facts())
    experiment.prepare(model, 0)
    batch = next(iter(experiment.loaders(0)[0]))
    torch.nn.functional.cross_entropy(model(*batch.arguments), batch.target).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("changes", "message"), [({"patch_size": 5}, r"patch_size=5"), ({"dataset": "nowhere"}, "nowhere")]
)
def test_bad_recipes_leave_nothing(changes, message, root, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", root, **changes)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # the archive takes half a minute to read
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_cifar10_is_learnt_beyond_its_colours(tmp_path):
    """One pass over 4,000 images: twice as good as chance."""
    changes = {"dataset": "cifar10", "train_cases": 4000, "evaluation_cases": 1000, "epochs": 1}
    folder = trained(tmp_path / "run", SHARED, **changes | {"learning_rate": 0.003, "embed_dim": 32})
    evaluation = read_json(folder / "seed-0/evaluation.json")
    assert evaluation["cases"] == 1000
    assert evaluation["accuracy"] > 0.2
    assert evaluation["top5_accuracy"] > 0.6
    assert len(load_images("cifar10", SHARED).train) == 50_000
