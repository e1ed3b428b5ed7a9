"""Images with label maps: layouts, classes and void, sizes, the cache, and what is refused."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data.segmentation.pairs import blocks, colours, jpeg, pair_files, png, write_files, write_tar
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention.files import cache_folder
from kernel_attention_lab.data.segmentation.sets import VOID, hold_out_pairs, load_segmentation

SHARED = Path(__file__).parents[5] / "shared" / "data" / "images" / "camvid240.tar"
COUNTS = {"train": 4, "val": 2, "test": 3}
FORMS = {
    "split/kind": "{split}/{kind}/{name}",
    "kind/split": "{kind}/{split}/{name}",
    "below a folder": "my set/{split}/{kind}/{name}",
}


def contents(data):
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    return {
        name: [(image.tolist(), labels.tolist()) for image, labels in split] for name, split in splits.items()
    }


@pytest.fixture
def made(tmp_path):
    """A folder with a sound set."""
    return write_files(tmp_path / "made", pair_files(COUNTS))


# What is read


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("place", ["folder", "tar"])
def test_every_layout_gives_the_same_set(form, place, made, tmp_path):
    files = pair_files(COUNTS, form)
    other = write_files(tmp_path / "other", files) if place == "folder" else tmp_path / "other.tar.gz"
    if place == "tar":
        write_tar(other, dict(reversed(files.items())))  # labels first, the list of classes last
    data = load_segmentation(str(other))
    assert contents(data) == contents(load_segmentation(str(made)))
    assert data.class_names == ("ground", "wall", "sky")
    assert [len(split) for split in (data.train, data.validation, data.test)] == [4, 2, 3]
    image, labels = data.test.images[1], data.test.labels[1]
    expected = blocks(7)
    np.testing.assert_array_equal(image, colours(expected, 7))
    np.testing.assert_array_equal(labels, np.array([0, 1, VOID, 2])[expected])


def test_the_layout_with_annot_folders(made, tmp_path):
    files = pair_files(COUNTS)
    renamed = {
        path.replace("/images/", "/").replace("/labels/", "annot/"): content
        for path, content in files.items()
    }
    assert "testannot/000.png" in renamed
    data = load_segmentation(str(write_files(tmp_path / "annot", renamed)))
    assert contents(data) == contents(load_segmentation(str(made)))


def test_ade20k_has_its_classes_and_its_validation_split_tests(tmp_path):
    names = ["wall", "building, edifice", "sky"]
    lines = [f"{i}\t0.1\t11\t1\t0\t{name}  " for i, name in enumerate(names, start=1)]
    files = {
        "ADEChallengeData2016/objectInfo150.txt": "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *lines])
    }
    files = {path: text.encode() for path, text in files.items()}
    for split, count in (("training", 3), ("validation", 2)):
        for index in range(count):
            labels = np.array([[0, 1, 2], [3, 3, 0]], dtype=np.uint8).repeat(4 + index, axis=1)
            for kind, content in (
                ("images", jpeg(np.full((*labels.shape, 3), 90, dtype=np.uint8))),
                ("annotations", png(labels)),
            ):
                suffix = "jpg" if kind == "images" else "png"
                files[f"ADEChallengeData2016/{kind}/{split}/ADE_{index}.{suffix}"] = content
    data = load_segmentation(str(write_files(tmp_path / "ade", files)))
    assert data.class_names == ("wall", "building", "sky")
    assert (len(data.train), data.validation, len(data.test)) == (3, None, 2)
    assert [labels.shape for _, labels in data.train] == [(2, 12), (2, 15), (2, 18)]
    np.testing.assert_array_equal(data.train.labels[0][:, ::4], [[VOID, 0, 1], [2, 2, VOID]])


def test_a_set_without_splits_and_without_names(tmp_path):
    files = {}
    for index in range(10):
        labels = blocks(index, values=(0, 1, 4))
        files |= {f"images/{index}.png": png(colours(labels % 4, index)), f"masks/{index}.png": png(labels)}
    data = load_segmentation(str(write_files(tmp_path / "plain", files)))
    assert data.class_names == ("0", "1", "2", "3", "4")
    assert (len(data.train), data.validation, len(data.test)) == (8, None, 2)


def test_the_short_side_is_resized_and_labels_of_the_test_split_keep_their_size(made):
    data = load_segmentation(str(made), image_size=22)
    assert {image.shape for image, _ in data.train} == {(22, 26, 3)}
    np.testing.assert_array_equal(
        data.train.labels[0], load_segmentation(str(made)).train.labels[0].repeat(2, 0).repeat(2, 1)
    )
    assert {labels.shape for _, labels in data.train} == {(22, 26)}
    assert {(image.shape, labels.shape) for image, labels in data.test} == {((22, 26, 3), (11, 13))}


@pytest.mark.skipif(not SHARED.is_file(), reason=f"no {SHARED}")
def test_camvid():
    data = load_segmentation("camvid240", SHARED.parents[1])
    assert data.class_names[:4] == ("sky", "building", "pole", "road")
    assert len(data.class_names) == 11
    assert [len(split) for split in (data.train, data.validation, data.test)] == [367, 101, 233]
    assert {image.shape for image, _ in data.test} == {(180, 240, 3)}
    counts = sum(np.bincount(labels.ravel(), minlength=256) for _, labels in data.train)
    assert counts[11:VOID].sum() == 0
    assert counts.argmax() == data.class_names.index("road")
    assert counts[VOID] / counts.sum() == pytest.approx(0.04, abs=0.005)
    with tarfile.open(SHARED) as archive:
        names = sorted(name for name in archive.getnames() if "/test/" in name)
        image, labels = (archive.extractfile(names[i]).read() for i in (5, 5 + 233))
    np.testing.assert_array_equal(data.test.images[5], Image.open(io.BytesIO(image)))
    expected = np.asarray(Image.open(io.BytesIO(labels)))
    np.testing.assert_array_equal(data.test.labels[5], np.where(expected == 11, VOID, expected))


# Parts and the cache


def test_subsets_and_what_is_held_out(made):
    split = load_segmentation(str(made)).train
    rest, held = hold_out_pairs(split, 0.3, seed=5)
    assert (len(rest), len(held)) == (3, 1)
    images = sorted(image.tobytes() for image, _ in split)
    assert sorted(image.tobytes() for part in (rest, held) for image, _ in part) == images
    again = hold_out_pairs(split, 0.3, seed=5)[1]
    assert again.images[0].tobytes() == held.images[0].tobytes()
    assert len(split.evenly(3)) == 3
    assert split.evenly(0) is split
    with pytest.raises(InputError, match="a split of 1 image has none to hold out"):
        hold_out_pairs(held, 0.5, seed=0)


def test_a_second_reading_needs_no_file_and_a_damaged_cache_is_made_again(made, caplog):
    before = contents(load_segmentation(str(made)))
    (cache,) = (cache_folder() / "segmentation").iterdir()
    (cache / "labels.bin").write_bytes(b"\0")
    assert contents(load_segmentation(str(made))) == before
    assert "is damaged" in caplog.text
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert contents(load_segmentation(str(made))) == before
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == times


# What is refused


def grown(labels):
    return np.pad(labels, ((0, 1), (0, 0)))


BAD = {
    "sizes": (
        lambda files: files | {"val/labels/001.png": png(grown(blocks(5)))},
        r"val/labels/001.png has 13 x 12 pixels and val/images/001.png has 13 x 11 pixels; an image and its",
    ),
    "a label that is no class": (
        lambda files: files | {"test/labels/002.png": png(blocks(0, values=(0, 7, 3)))},
        r"test/labels/002.png: has label 7 \(accepted: 0 to 3, and 255 for void\)",
    ),
    "a label of 16 bits": (
        lambda files: files | {"test/labels/002.png": png(blocks(0).astype(np.uint16) * 300)},
        r"test/labels/002.png: has label 300 \(accepted: 0 to 3",
    ),
    "an image without labels": (
        lambda files: {path: content for path, content in files.items() if path != "train/labels/003.png"},
        r"train/images/003.png has no label map of its name",
    ),
    "labels without an image": (
        lambda files: {path: content for path, content in files.items() if path != "train/images/003.png"},
        r"train/labels/003.png has no image of its name",
    ),
    "coloured labels": (
        lambda files: files | {"train/labels/000.png": png(colours(blocks(0), 0))},
        r"train/labels/000.png: is an image of mode RGB; accepted: one class number a pixel",
    ),
    "labels that are no image": (
        lambda files: files | {"train/labels/000.png": b"\x89PNG"},
        r"train/labels/000.png: not readable as an image",
    ),
    "an image that is none": (
        lambda files: files | {"train/images/000.png": files["train/images/000.png"][:99]},
        r"train/images/000.png: not readable as an image",
    ),
    "labels with loss": (
        lambda files: {path.replace("ls/000.png", "ls/000.jpg"): content for path, content in files.items()},
        r"labels/000.jpg: labels in a format that loses values \(accepted: .bmp",
    ),
    "two of one name": (
        lambda files: files | {"train/images/000.jpg": files["train/images/000.png"]},
        r"have the same name",
    ),
    "no training split": (
        lambda files: {path: content for path, content in files.items() if not path.startswith("train")},
        r"has no images of a training split \(it has: test, validation\)",
    ),
    "a training split alone": (
        lambda files: {path: content for path, content in files.items() if path.startswith("train/")},
        r"has no images of a test or validation split",
    ),
    "no folders of labels": (
        lambda files: {f"photos/{index}.png": png(blocks(index)) for index in range(2)},
        r"has no folders of images and labels \(accepted: SPLIT/images and SPLIT/labels",
    ),
    "one class": (
        lambda files: files | {"classes.txt": b"ground\nvoid\nvoid\nvoid"},
        r"has one class only, 'ground' \(accepted: at least two\)",
    ),
    "an empty list": (lambda files: files | {"classes.txt": b" \n"}, r"its list has 0 classes"),
    "a list in another encoding": (
        lambda files: files | {"classes.txt": b"caf\xe9"},
        r"classes.txt: is not UTF-8",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_bad_sets_are_refused_in_one_line(change, message, tmp_path):
    where = write_tar(tmp_path / "bad.tar", change(pair_files(COUNTS)))
    with pytest.raises(InputError, match=message) as error:
        load_segmentation(str(where))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(where))


def test_palette_labels_are_their_numbers(made):
    labels = Image.fromarray(blocks(0)).convert("P")
    labels.putpalette([7, 90, 200] * 256)
    buffer = io.BytesIO()
    labels.save(buffer, "PNG")
    before = contents(load_segmentation(str(made)))
    (made / "train/labels/000.png").write_bytes(buffer.getvalue())
    assert contents(load_segmentation(str(made))) == before
