"""The images that an image run leaves for its report, and its analysis over training."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
import yaml
from runs.small_runs import undrawn_pages
from tasks.image_data import IMAGES, make_images

from kernel_attention.analysis import capture
from kernel_attention.mechanisms import list_attention
from kernel_attention.models.vision import VisionTransformer
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.images.sets import load_images
from kernel_attention_lab.runs import read_recipe, recipe_text
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.images import ImageExperiment, image_examples, patch_attention

GRID = (3, 5)
SIZES = {"embed_dim": 14, "num_heads": 2, "num_layers": 2, "feedforward_dim": 11}


def vision_transformer(attention, pooling):
    torch.manual_seed(0)
    size = (2 * GRID[0], 2 * GRID[1])
    model = VisionTransformer(size, 2, 4, attention, pooling=pooling, **SIZES).double()
    for parameter in model.parameters():  # far from uniform attention, which the untrained weights give
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def first_layer(model, images):
    (attention,) = capture(model, (images,), "first").values()
    return attention


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_the_map_is_the_softmax_over_all_tokens_at_the_places_of_the_patches(pooling):
    """Query by query and patch by patch; the class token's weight for itself is not shown."""
    model, images = vision_transformer("softmax", pooling), torch.rand(3, 3, 6, 10, dtype=torch.float64)
    attention = first_layer(model, images)
    found = patch_attention(model, attention)
    assert found.shape == (3, 2, *GRID)
    extra = int(pooling == "class")
    for case, head in ((0, 0), (2, 1)):
        q, k = attention.queries[case, head], attention.keys[case, head]
        for row in range(GRID[0]):
            for column in range(GRID[1]):
                patch = extra + row * GRID[1] + column
                weights = [(key @ q.T / math.sqrt(7)).exp() for key in k]
                by_query = weights[patch] / torch.stack(weights).sum(0)
                expected = by_query[0] if pooling == "class" else by_query.mean()
                assert found[case, head, row, column] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", [mechanism.name for mechanism in list_attention()])
def test_every_mechanism_has_a_map_or_says_that_it_has_none(name, root):
    split = load_images("patches", root).test
    model = VisionTransformer((12, 8), 4, 3, name, embed_dim=16, num_heads=4, num_layers=1, feedforward_dim=9)
    found = image_examples(model, split, "32-true")
    text = str(found["attention_text"])
    assert text.startswith(name)
    if "multilinear" in name or name == "tensor":  # their kernels are tensors
        assert "attention" not in found
        assert "no attention matrix" in text
    else:
        assert found["attention"].shape == (12, 4, 3, 2)
        assert np.isfinite(found["attention"]).all()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(root, tmp_path_factory):
    """A run with its moving average kept after every second epoch, and its report."""
    folder = tmp_path_factory.mktemp("images") / "run"
    recipe = folder.with_name("recipe.yaml")
    recipe.write_text(yaml.safe_dump(IMAGES | {"epochs": 4, "keep_weights_every": 2, "ema_decay": 0.5}))
    options = ["--output", str(folder), "--data_root", str(root), "--progress", "false"]
    with undrawn_pages():
        assert main(["train", str(recipe), *options]) == 0
    return folder


def test_the_examples_are_test_images_with_the_models_predictions(run, root):
    split = load_images("patches", root).test.evenly(12)
    with np.load(run / "seed-0/examples.npz", allow_pickle=False) as arrays:
        found = dict(arrays)
    np.testing.assert_array_equal(found["images"], split.images)
    np.testing.assert_array_equal(found["targets"], split.targets)
    pixels = torch.from_numpy(split.images.transpose(0, 3, 1, 2).copy()).float() / 255
    with torch.no_grad():
        shares = load_run(run).model()(pixels).softmax(-1)
    np.testing.assert_array_equal(found["predictions"], shares.argmax(-1))
    np.testing.assert_allclose(found["probabilities"], shares.amax(-1), rtol=1e-5)
    assert found["attention"].shape == (12, 2, 3, 2)
    assert str(found["attention_text"]) == "softmax: the attention of the class token to the patches"


def test_the_report_shows_them(run):
    page = (run / "report.html").read_text()
    assert "12 test images with predictions" in page
    assert "First layer, softmax: the attention of the class token to the patches." in page


def test_kept_weights_are_the_moving_averages(run, root):
    """The last copy gives the figures of the last epoch, which are those of the averaged weights."""
    saved = load_run(run)
    assert saved.kept_epochs(0) == [0, 2, 4]
    metrics = json.loads((run / "seed-0/metrics.json").read_text())
    experiment = saved.experiment(root)
    _, held_out = experiment.loaders(0)
    model = saved.model(0, epoch=4)
    with torch.no_grad():
        right = [model(*batch.arguments).argmax(-1) == batch.target for batch in held_out]
    assert float(torch.cat(right).float().mean()) == pytest.approx(metrics[-1]["val_accuracy"])


def test_the_analysis_says_what_the_class_token_is(run, root, capsys, undrawn):
    options = ["--data_root", str(root), "--over_training", "--cases", "5"]
    examples = run / "seed-0/examples.npz"
    with np.load(examples) as arrays:
        before = dict(arrays)
    examples.unlink()  # as a run of an earlier version
    assert main(["analyze", str(run), *options]) == 0
    capsys.readouterr()
    with np.load(examples, allow_pickle=False) as arrays:
        assert {name: value.tolist() for name, value in arrays.items()} == {
            name: value.tolist() for name, value in before.items()
        }
    note = (
        "5 evenly spaced images of the test split; token 0 is the class token, and counts as the patches do"
    )
    for name in ("diagnostics", "diagnostics_over_training"):
        assert json.loads((run / f"seed-0/{name}.json").read_text())["note"] == note
    layers = json.loads((run / "seed-0/diagnostics.json").read_text())["layers"]
    assert [layer["name"] for layer in layers] == ["layers.0.attention", "layers.1.attention"]
    assert layers[0]["tokens"] == [7], "six patches and the class token"
    assert "released_projection_error" in layers[0]["summary"]
    page = (run / "report.html").read_text()
    assert "token 0 is the class token" in page
    assert "one line per layer" in page


def test_the_deep_recipe_trains_and_keeps_what_the_analyses_need():
    """Twelve layers, their weights after every epoch, and models of the header that can be built."""
    header = recipe_text("images/cifar10_deep")
    recipe = make_recipe(read_recipe("images/cifar10_deep")[1])
    assert (recipe.num_layers, recipe.keep_weights_every, recipe.pooling) == (12, 1, "class")
    text = re.sub(r"\n# *", " ", header)
    specs = [yaml.safe_load(spec.strip("'")) for spec in re.findall(r"--attention ('.*?'|\w+)", text)]
    assert len(specs) == 2
    facts = {"height": 32, "width": 32, "class_names": list("abcdefghij")}
    for spec in (recipe.attention, *specs):
        model = ImageExperiment.build_model(dataclasses.replace(recipe, attention=spec), facts)
        assert model(torch.rand(1, 3, 32, 32)).shape == (1, 10)
