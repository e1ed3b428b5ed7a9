"""Image sets from their files: every layout gives the same splits, and what is wrong is named in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from data.images.image_data import CLASSES, encoded, gray_of, grays, make_cifar, make_set, pack, square
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention_lab.data import ImageSplit, list_image_sets, load_class_subset, load_images
from kernel_attention_lab.data.images import splits as image_splits
from kernel_attention_lab.data.splits import hold_out
from kernel_attention_lab.data.tokens.loading import load_tokens

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[5] / "shared" / "data")


def expected(split):
    return [gray_of(split, label, number) for label in CLASSES for number in range(3)]


def check_set(data, splits=("train", "val", "test")):
    """The splits are those of ``make_set``, image by image."""
    assert data.class_names == CLASSES
    found = {"train": data.train, "val": data.validation, "test": data.test}
    for split in splits:
        order = np.argsort(grays(found[split]))
        assert np.array(grays(found[split]))[order].tolist() == expected(split)
        assert found[split].targets[order].tolist() == [0, 0, 0, 1, 1, 1]
        assert found[split].images.shape == (6, 4, 4, 3)


@pytest.mark.parametrize("above", ["", "pets/"])
def test_class_folders_are_read_in_the_order_of_names(tmp_path, above):
    make_set(tmp_path / "set" / above)
    data = load_images("set", tmp_path)
    check_set(data)
    assert grays(data.train) == expected("train")
    assert isinstance(data.train.images, np.memmap)
    assert not data.train.images.flags.writeable


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip"])
def test_an_archive_is_its_folder(tmp_path, suffix):
    make_set(tmp_path / "files")
    (tmp_path / "images").mkdir()
    pack(tmp_path / "files", tmp_path / "images" / f"pets{suffix}")
    check_set(load_images("pets", tmp_path))
    check_set(load_images(str(tmp_path / "images" / f"pets{suffix}")))


@pytest.mark.parametrize("name", ["dev", "valid", "validation"])
def test_a_validation_split_has_several_names(tmp_path, name):
    make_set(tmp_path / "set")
    (tmp_path / "set/val").rename(tmp_path / "set" / name)
    check_set(load_images("set", tmp_path))


def test_a_validation_split_is_the_test_split_where_there_is_none(tmp_path):
    """As in ImageNet, whose test images have no labels."""
    make_set(tmp_path / "set", ("train", "val"))
    data = load_images("set", tmp_path)
    assert data.validation is None
    assert grays(data.test) == expected("val")


def test_class_folders_alone_are_divided_by_a_seed(tmp_path, caplog):
    for label in CLASSES:
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "set" / label / f"{number}.png").write_bytes(
                square(100 * CLASSES.index(label) + number)
            )
    data = load_images("set", tmp_path)
    assert "20% of each class, drawn with seed 0" in caplog.text
    assert np.bincount(data.train.targets).tolist() == [8, 8]
    assert np.bincount(data.test.targets).tolist() == [2, 2]
    assert sorted(grays(data.train) + grays(data.test)) == [*range(10), *range(100, 110)]
    assert grays(load_images("set", tmp_path).test) == grays(data.test)


def test_tiny_imagenet_as_it_is_distributed(tmp_path, caplog):
    root = tmp_path / "tiny-imagenet-200"
    make_set(tmp_path / "plain")
    for label in CLASSES:
        shutil.copytree(tmp_path / "plain/train" / label, root / "train" / label / "images")
        (root / "train" / label / f"{label}_boxes.txt").write_text("0.png\t0\t0\t3\t3\n")
    lines = []
    for folder, split in (("val", "val"), ("test", "test")):
        (root / folder / "images").mkdir(parents=True)
        for label in CLASSES:
            for path in sorted((tmp_path / "plain" / split / label).iterdir()):
                file = f"{split}_{label}_{path.name}"
                shutil.copy(path, root / folder / "images" / file)
                lines += [f"{file}\t{label}\t0\t0\t3\t3"] if split == "val" else []
    (root / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    for name in ("tiny_imagenet", str(pack(root, tmp_path / "tiny.zip"))):
        data = load_images(name, tmp_path)
        assert grays(data.train) == expected("train")
        assert grays(data.test) == expected("val"), "the test images have no labels"
        assert data.test.targets.tolist() == [0, 0, 0, 1, 1, 1]
        assert data.validation is None
    assert "test have no classes and are left out" in caplog.text


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar_as_torchvision_keeps_it(tmp_path, classes, packed):
    folder = tmp_path / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python")
    held = make_cifar(tmp_path / "files" / folder.name, classes)
    if packed:
        pack(tmp_path / "files", tmp_path / f"cifar-{classes}-python.tar.gz")
    else:
        (tmp_path / "files" / folder.name).rename(folder)
    data = load_images(f"cifar{classes}", tmp_path)
    assert data.class_names == tuple(f"class{number}" for number in range(classes))
    for split, found in (("train", data.train), ("test", data.test)):
        assert np.array_equal(found.images, held[split][0])
        assert found.targets.tolist() == held[split][1]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_image_folders_with_a_list(tmp_path, kind):
    """As Hugging Face's: the classes are in a file beside the images."""
    make_set(tmp_path / "plain")
    for split in ("train", "test"):
        folder = tmp_path / "set" / split
        folder.mkdir(parents=True)
        records = []
        for label in CLASSES:
            for path in sorted((tmp_path / "plain" / split / label).iterdir()):
                shutil.copy(path, folder / f"{label}-{path.name}")
                records.append({"file_name": f"{label}-{path.name}", "label": label})
        if kind == "jsonl":
            text = "\n".join(map(json.dumps, records))
        else:
            text = "\n".join(["file_name,label", *(",".join(record.values()) for record in records)])
        (folder / f"metadata.{kind}").write_text(text + "\n")
    check_set(load_images("set", tmp_path), ("train", "test"))


@pytest.mark.filterwarnings("ignore")  # its own: dill on pyarrow
@pytest.mark.parametrize("with_names", [True, False])
def test_a_set_that_hugging_face_saved(tmp_path, with_names):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    make_set(tmp_path / "plain")
    splits = {}
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        files = sorted((tmp_path / "plain" / split).rglob("*.png"))
        labels = [path.parent.name for path in files]
        kind = datasets.ClassLabel(names=list(CLASSES)) if with_names else datasets.Value("string")
        features = datasets.Features({"img": datasets.Image(), "label": kind})
        records = {"img": [path.read_bytes() for path in files], "label": labels}
        records["img"] = [{"bytes": content, "path": None} for content in records["img"]]
        splits[name] = datasets.Dataset.from_dict(records, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "images/saved"))
    check_set(load_images("saved", tmp_path))
    assert [info.name for info in list_image_sets(tmp_path)] == ["plain", "saved"]


def test_image_size_resizes_the_short_side_and_cuts_out_the_middle(tmp_path):
    make_set(tmp_path / "set", ("train", "test"))
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 255
    (tmp_path / "set/train/cat/0.png").write_bytes(encoded(wide))
    with pytest.raises(InputError) as error:
        load_images("set", tmp_path)
    assert "train/cat/" in str(error.value)
    assert "24 x 8 pixels" in str(error.value)
    assert "4 x 4 pixels" in str(error.value)
    assert "image_size" in str(error.value)
    data = load_images("set", tmp_path, image_size=8)
    assert data.train.images.shape == (6, 8, 8, 3)
    assert np.all(data.train.images[0] == 255), "the middle third"
    with pytest.raises(InputError, match="image_size=-1"):
        load_images("set", tmp_path, image_size=-1)


def test_a_subset_of_the_classes_keeps_the_numbers_of_the_model(tmp_path):
    """ImageNet-A, -R and -O are folders of some of ImageNet's classes."""
    names = ("ant", "bee", "cat", "cow", "dog")
    make_set(tmp_path / "plain", ("test",))
    (tmp_path / "plain/test").rename(tmp_path / "imagenet-a")
    subset = load_class_subset("imagenet-a", names, tmp_path)
    assert subset.classes.tolist() == [2, 4]
    assert subset.split.targets.tolist() == [2, 2, 2, 4, 4, 4]
    assert grays(subset.split) == expected("test")
    with pytest.raises(InputError, match="classes unseen in training: dog"):
        load_class_subset("imagenet-a", names[:4], tmp_path)


def test_the_image_sets_of_a_data_root(tmp_path):
    make_set(tmp_path / "pets")
    (tmp_path / "images").mkdir()
    pack(tmp_path / "pets", tmp_path / "images/packed.tar.xz")
    make_cifar(tmp_path / "images/cifar-10-batches-py")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("no image")
    (tmp_path / "images/no.tar").write_text("no archive")
    found = list_image_sets(tmp_path)
    assert [info.name for info in found] == ["cifar-10-batches-py", "packed", "pets"]
    assert found[1].path == tmp_path / "images/packed.tar.xz"
    for info in found:
        load_images(info.name, tmp_path)


def made_split(counts=(10, 20, 1), size=4):
    """Images that hold their own number, with so many cases of each class in turn."""
    targets = np.repeat(np.arange(len(counts)), counts)
    images = np.zeros((len(targets), size, size, 3), np.uint8)
    images += np.arange(len(targets), dtype=np.uint8)[:, None, None, None]
    return ImageSplit(images, targets)


def test_a_large_subset_stays_where_it_is_and_reads_as_an_array(monkeypatch):
    """ImageNet's training images are no copy in memory when a validation part is taken from them."""
    split = made_split()
    copied = split.subset([5, 3, 9, 30])
    monkeypatch.setattr(image_splits, "COPIED_BYTES", 0)
    rows = split.subset([5, 3, 9, 30])
    assert isinstance(copied.images, np.ndarray)
    assert not isinstance(rows.images, np.ndarray)
    for index in (
        0,
        -1,
        slice(1, 3),
        [2, 0],
        np.array([True, False, True, False]),
        (slice(None), 0, 0, 0),
        (1, 2),
    ):
        assert np.array_equal(rows.images[index], copied.images[index])
        assert isinstance(rows.images[index], np.ndarray)
    assert np.array_equal(rows.images, copied.images)
    assert np.array_equal(list(rows.images), copied.images)
    for name in ("shape", "ndim", "dtype", "size", "nbytes"):
        assert getattr(rows.images, name) == getattr(copied.images, name)
    assert np.array_equal(rows.subset([3, 0]).images, copied.images[[3, 0]]), "rows of rows"
    rest, held = hold_out(split, 0.2, seed=0)
    assert grays(rest) + grays(held) != sorted(grays(rest) + grays(held))
    assert sorted(grays(rest) + grays(held)) == list(range(31))
    assert grays(rest.evenly(3)) == [grays(rest)[place] for place in (0, 12, 24)]


@pytest.mark.slow
def test_the_real_cifar10_is_read_from_its_archive_once(monkeypatch, shared_cache):
    if not (SHARED / "images" / "cifar10.tar.xz").is_file():
        pytest.skip(f"no images/cifar10.tar.xz in {SHARED} (set KERNEL_ATTENTION_DATA to the real data)")
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    data = load_images("cifar10", SHARED)
    assert data.train.images.shape == (50_000, 32, 32, 3)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert data.validation is None
    assert np.array_equal(np.bincount(data.train.targets), [5000] * 10)
    assert np.array_equal(np.bincount(data.test.targets), [1000] * 10)
    assert data.class_names[0] == "airplane"
    assert data.class_names[9] == "truck"
    monkeypatch.setattr("kernel_attention_lab.data.images.cache._build", None)
    again = load_images("cifar10", SHARED)
    assert np.array_equal(again.test.images, data.test.images)
    gray = load_tokens("lra/image", SHARED).data
    first = Image.fromarray(data.test.images[0]).convert("L")
    assert np.array_equal(gray.test.case(0)[0], np.asarray(first).reshape(-1))
    assert np.array_equal(gray.train.targets, data.train.targets)
