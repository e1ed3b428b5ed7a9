"""Predictions and figures of image files: an image, folders and archives, as training saw them."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from runs.small_runs import undrawn_pages
from tasks.image_sets import COLOURS, make_colours, write_image, write_image_recipe

from kernel_attention_lab.cli import main
from kernel_attention_lab.runs.saved import load_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("images")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("KERNEL_ATTENTION_DATA", raising=False)
        yield folder


def train(folder, name, root, **changes):
    recipe = write_image_recipe(folder / f"{name}.yaml", **changes)
    arguments = ["train", recipe, "--data_root", root, "--output", folder / name, "--progress", "false"]
    with undrawn_pages():
        assert main([str(argument) for argument in arguments]) == 0
    return folder / name


@pytest.fixture(scope="module")
def colours(folder):
    return make_colours(folder / "data")


@pytest.fixture(scope="module")
def trained(folder, colours):
    """A run on the images as they are, 12 x 12."""
    return train(folder, "own", colours)


@pytest.fixture(scope="module")
def cropped(folder):
    """A run in DeiT's manner on larger photographs: 8 x 8 pixels of 10, all of its augmentation."""
    root = make_colours(folder / "larger", size=(26, 20))
    return train(
        folder, "cropped", root, image_size=8, crop_ratio=0.8, augmentation="deit", random_erasing=0.25,
        mixup=0.8, cutmix=1.0, label_smoothing=0.1, ema_decay=0.5, repeats=2, drop_path=0.1, warmup_epochs=1,
    )  # fmt: skip


def predicted(cli, *arguments):
    code, out, err = cli("predict", *arguments)
    assert (code, err) == (0, "")
    return list(csv.DictReader(io.StringIO(out)))


def test_predictions_of_a_folder_and_its_archives_agree_with_evaluate(cli, trained, colours, tmp_path):
    folder = colours / "colours" / "test"
    with (
        tarfile.open(tmp_path / "test.tar.xz", "w:xz") as tar,
        zipfile.ZipFile(tmp_path / "test.zip", "w") as zip_,
    ):
        for path in sorted(folder.rglob("*.png")):
            tar.add(path, path.relative_to(folder).as_posix())
            zip_.write(path, path.relative_to(folder).as_posix())
    rows = predicted(cli, trained, folder)
    assert [row["file"] for row in rows] == [f"{name}/{index}.png" for name in COLOURS for index in range(4)]
    right = sum(row["prediction"] == row["file"].partition("/")[0] for row in rows)
    for row in rows:
        chances = {name: float(row[f"probability_{name}"]) for name in COLOURS}
        assert row["prediction"] == max(chances, key=chances.get)
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
    for place in (tmp_path / "test.tar.xz", tmp_path / "test.zip"):
        assert predicted(cli, trained, place) == rows
        assert cli("evaluate", trained, place, "--output", "out.json")[0] == 0
        (figures,) = json.loads((tmp_path / "here" / "out.json").read_text())
        assert (figures["accuracy"], figures["cases"]) == (right / 12, 12)
    summary = json.loads((trained / "seed-0" / "evaluation.json").read_text())
    assert summary["accuracy"] == right / 12
    assert right / 12 > 0.6, "colours are learnt"


def test_a_single_image_gets_what_it_gets_in_its_folder(cli, trained, colours):
    place = colours / "colours" / "test" / "red" / "2.png"
    (row,) = predicted(cli, trained, place)
    assert row["file"] == "2.png"
    same = predicted(cli, trained, place.parent)[2]
    assert row["prediction"] == same["prediction"]
    for name in COLOURS:
        assert float(row[f"probability_{name}"]) == pytest.approx(
            float(same[f"probability_{name}"]), abs=1e-6
        )


def test_a_photograph_is_resized_and_cropped_as_in_training(cli, cropped, tmp_path):
    """The short side becomes 10 pixels, and the middle 8 x 8 of it are read."""
    assert (load_run(cropped).facts["height"], load_run(cropped).facts["width"]) == (8, 8)
    place = write_image(tmp_path / "photo.png", COLOURS["violet"], (40, 30), seed=7)
    (row,) = predicted(cli, cropped, place)
    small = Image.open(place).resize((13, 10), Image.Resampling.BICUBIC).crop((2, 1, 10, 9))
    pixels = torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)[None] / 255
    chances = load_run(cropped).model()(pixels).softmax(dim=-1)[0]
    for name, chance in zip(COLOURS, chances.tolist(), strict=True):
        assert float(row[f"probability_{name}"]) == pytest.approx(chance, abs=1e-5)


def test_evaluation_on_some_of_the_classes(cli, cropped, colours, tmp_path, here):
    """ImageNet-A and its like have some classes only: accuracy among all, and among theirs."""
    for name in ("green", "red"):
        for index in range(3):
            write_image(tmp_path / "some" / name / f"{index}.png", COLOURS[name], (20, 20), seed=index)
    assert cli("evaluate", cropped, tmp_path / "some", "--output", "out.json")[0] == 0
    (figures,) = json.loads((here / "out.json").read_text())
    assert figures["cases"] == 6
    assert figures["accuracy"] <= figures["subset_accuracy"] <= 1
    assert np.sum(figures["confusion_matrix"], axis=1).tolist() == [3, 3, 0]


def test_grey_and_transparent_images_stand_among_the_others(cli, trained, tmp_path):
    for mode in ("L", "RGBA", "P"):
        Image.new("RGB", (12, 12), COLOURS["red"]).convert(mode).save(tmp_path / f"{mode}.png")
    rows = predicted(cli, trained, tmp_path)
    assert [row["file"] for row in rows] == ["L.png", "P.png", "RGBA.png"]
    assert rows[1]["prediction"] == rows[2]["prediction"], "palette and transparency do not change the colour"
