"""Images that cannot be trained on, predicted or evaluated: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import pytest
from runs.small_runs import undrawn_pages
from tasks.image_sets import COLOURS, make_colours, write_image, write_image_recipe

from kernel_attention_lab.cli import main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    """No data root, and a cache outside of the folders that must stay as they are."""
    monkeypatch.delenv("KERNEL_ATTENTION_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def root(tmp_path):
    return make_colours(tmp_path / "data", train=3, test=2)


@pytest.fixture
def recipe(tmp_path):
    return write_image_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--patch_size", "5"), "image_size=(12, 12) must be a multiple of patch_size=5"),
        (("--image_size", "-3"), "image_size"),
    ],
)
def test_options_that_the_model_cannot_take(options, message, refused, root, recipe):
    assert message in refused("train", recipe, "--data_root", root, "--output", "run", *options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, undrawn_pages():
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        make_colours(folder / "data", train=4, test=2, size=(16, 12))
        recipe = write_image_recipe(folder / "recipe.yaml", epochs=1)
        arguments = [
            "train",
            recipe,
            "--data_root",
            folder / "data",
            "--output",
            folder / "run",
            "--progress",
            "false",
        ]
        assert main([str(argument) for argument in arguments]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: None, "does not exist (accepted: "),
        (lambda place: place.mkdir(), "images"),
        (lambda place: write_image(place / "red" / "0.png", COLOURS["red"], (12, 12)),
         "12 x 12 pixels (accepted: 16 x 12, the size of the training images)"),
        (lambda place: (place / "red").mkdir(parents=True) or (place / "red" / "0.png").write_bytes(b"x"),
         "red/0.png: not readable as an image (it is no image of a known format)"),
    ],
    ids=["missing", "empty", "another size", "no image"],
)  # fmt: skip
def test_files_that_a_trained_model_cannot_take(damage, message, refused, trained, tmp_path):
    place = tmp_path / "new"
    damage(place)
    for command in ("predict", "evaluate"):
        line = refused(command, trained, place, "--output", "out.json")
        assert message in line
        assert str(place) in line


def test_a_single_file_that_is_no_image(refused, trained, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"no image")
    message = "photo.jpg: not readable as an image (it is no image of a known format)"
    assert message in refused("predict", trained, tmp_path / "photo.jpg")


def test_evaluation_refuses_a_class_it_never_saw(refused, trained, tmp_path):
    write_image(tmp_path / "new" / "blue" / "0.png", (0, 0, 200), (16, 12))
    assert "it has classes unseen in training: blue" in refused("evaluate", trained, tmp_path / "new")
