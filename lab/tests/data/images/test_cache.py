"""Decoded images on disk: whole or absent, and made again when the source or the cache has changed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile

import numpy as np
import pytest
from data.images.image_data import CLASSES, gray_of, grays, make_set, pack, square
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention.files import cache_folder
from kernel_attention_lab.data import fetching, load_images
from kernel_attention_lab.data.images import cache as image_cache
from kernel_attention_lab.data.images.cache import cached_parts


def caches():
    return sorted((cache_folder() / "images").iterdir())


@pytest.fixture
def built(monkeypatch):
    """The places that are decoded, in turn."""
    places = []
    build = image_cache._build

    def counted(place, *arguments):
        places.append(place)
        build(place, *arguments)

    monkeypatch.setattr(image_cache, "_build", counted)
    return places


def test_a_set_is_decoded_once(tmp_path, built):
    make_set(tmp_path / "set")
    pack(tmp_path / "set", tmp_path / "packed.tar.gz")
    for _ in range(2):
        load_images("set", tmp_path)
        load_images("packed", tmp_path)
        load_images("packed", tmp_path, image_size=3)
    assert [place.name for place in built] == ["set", "packed.tar.gz", "packed.tar.gz"]
    assert len(caches()) == 3


@pytest.mark.parametrize("change", ["content", "time", "name", "more"])
def test_a_source_that_changed_is_read_again(tmp_path, built, change):
    make_set(tmp_path / "set")
    load_images("set", tmp_path)
    path = tmp_path / "set/train/dog/2.png"
    if change == "content":
        path.write_bytes(square(250))
    elif change == "time":  # a file of the same size, whose time the file system keeps
        os.utime(path, ns=(1, 1))
    elif change == "name":
        path.rename(path.with_name("9.png"))
    else:
        path.with_name("3.png").write_bytes(square(250))
    data = load_images("set", tmp_path)
    assert len(built) == 2
    assert grays(data.train)[-1] == (250 if change in ("content", "more") else gray_of("train", "dog", 2))


@pytest.mark.parametrize("file", ["index.json", "0-images.npy", "0-targets.npy"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other"])
def test_a_damaged_cache_is_made_again(tmp_path, built, file, damage, caplog):
    make_set(tmp_path / "set", count=40)
    before = load_images("set", tmp_path)
    (cache,) = caches()
    content = (cache / file).read_bytes()
    if damage == "gone":
        (cache / file).unlink()
    else:
        damaged = {"cut": content[: len(content) * 2 // 3], "empty": b"", "other": b"something else"}
        # Another file, so that arrays that are mapped keep theirs.
        (cache / file).unlink()
        (cache / file).write_bytes(damaged[damage])
    after = load_images("set", tmp_path)
    assert len(built) == 2
    assert np.array_equal(after.train.images, before.train.images)
    assert np.array_equal(after.train.targets, before.train.targets)
    assert caches() == [cache], "nothing else is left"
    load_images("set", tmp_path)
    assert len(built) == 2
    if damage != "gone":
        assert "is damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    make_set(tmp_path / "set")
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"cache .*file.*: cannot be written \(Not a directory\)"):
        load_images("set", tmp_path)


def test_a_set_that_is_refused_leaves_no_cache(tmp_path):
    make_set(tmp_path / "set")
    (tmp_path / "set/train/dog/2.png").write_bytes(b"no image")
    for _ in range(2):
        with pytest.raises(InputError, match=r"train/dog/2\.png: not readable as an image"):
            load_images("set", tmp_path)
    assert caches() == []


def test_the_cache_of_the_other_process_stays(tmp_path, monkeypatch):
    """Both have decoded, where the file system has no locks; the second finds the place taken."""
    monkeypatch.setattr(fetching, "locked_in_turn", contextlib.nullcontext)
    make_set(tmp_path / "set")
    publish = image_cache._publish

    def late(new, folder, read):
        if not folder.exists():
            monkeypatch.setattr(image_cache, "_publish", publish)
            cached_parts(tmp_path / "set")
        publish(new, folder, read)

    monkeypatch.setattr(image_cache, "_publish", late)
    first = cached_parts(tmp_path / "set")
    assert len(caches()) == 1
    assert len(first["train"].targets) == 6


WHITE = square(255)


def with_file(path, content=WHITE):
    def change(root):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)

    return change


def without(pattern):
    def change(root):
        for path in sorted(root.glob(pattern)):
            path.unlink()

    return change


def as_text(path, text):
    return with_file(path, text.encode())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_file("train/cat/1.png", b"junk"), r"train/cat/1\.png: not readable as an image"),
        (with_file("train/cat/1.png", WHITE[:45]), r"train/cat/1\.png: not readable as an image"),
        (with_file("val/cat/1.png", square(1, 7)), r"4 x 4 pixels and val/cat/1\.png has 7 x 7 pixels;"),
        (with_file("test/bird/1.png"), "the test split has classes unseen in training: bird"),
        (with_file("val/bird/1.png"), "the validation split has classes unseen in training: bird"),
        (with_file("dev/cat/1.png"), "dev and val are both its validation split"),
        (with_file("train/0.png"), r"train/0\.png has no class, as other images of train have"),
        (lambda root: (root / "train/bird").mkdir(), "class folder train/bird has no images"),
        (with_file("train/bird/notes.txt"), "class folder train/bird has no images"),
        (without("*/*/*.png"), r"has no images \(accepted: \.bmp"),
        (without("train/*/*.png"), "has no images in train/CLASS"),
        (without("*/dog/*.png"), "class folder test/dog has no images"),
        (as_text("train/metadata.jsonl", '{"file_name": "a.png", "label"'), "metadata.jsonl is not a list"),
        (as_text("train/metadata.jsonl", '["a.png", "cat"]'), "metadata.jsonl is not a list"),
        (as_text("train/metadata.csv", "path,label\na.png,cat\n"), "metadata.csv is not .* 'file_name'"),
        (as_text("val/val_annotations.txt", "a.png cat\n"), "val_annotations.txt is not a list"),
        (with_file("cifar-10-batches-py/data_batch_1", b"junk"), "data_batch_1: not readable as a file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, change, message):
    change(make_set(tmp_path / "set"))
    with pytest.raises(InputError) as error:
        load_images("set", tmp_path)
    assert re.search(message, str(error.value))
    assert str(error.value).count("\n") == 0
    assert str(tmp_path / "set") in str(error.value)


@pytest.mark.parametrize("mark", ["", "NA", "nan", "None", " "])
def test_a_missing_label_is_no_class(mark, tmp_path):
    make_set(tmp_path / "set")
    as_text("train/metadata.csv", f"file_name,label\ncat/0.png,{mark}\n")(tmp_path / "set")
    with pytest.raises(InputError, match=r"cat/0\.png has the label .*, a missing value"):
        load_images("set", tmp_path)


def test_a_caption_is_no_class(tmp_path):
    make_set(tmp_path / "set")
    (tmp_path / "set/train/metadata.jsonl").write_text('{"file_name": "cat/0.png", "text": "a cat"}\n')
    assert load_images("set", tmp_path).train.targets.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_set_that_is_not_there(tmp_path):
    make_set(tmp_path / "cifar10")
    with pytest.raises(
        InputError, match=r"dataset 'cifar_10': no such .*did you mean 'cifar10'\?.*data_root"
    ):
        load_images("cifar_10", tmp_path)
    with pytest.raises(InputError, match=r"archive \(there is no data root to look in; set --data_root"):
        load_images("cifar10")


def fixed(place, seed):
    """A set whose files have the sizes and times of every other seed's."""
    draw = np.random.default_rng(seed)
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            folder = place / part / label
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.ppm")
    for path in place.rglob("*"):
        os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("kind", ["folder", "tar", "replaced"])
def test_two_sets_of_one_name_have_caches_of_their_own(tmp_path, kind):
    """Sizes and times are equal in layers of containers and in archives made with one time."""
    places = []
    for seed, home in enumerate(("a", "b")):
        place = tmp_path / home / "photos"
        fixed(place, seed)
        if kind == "tar":
            with tarfile.open(place.with_suffix(".tar"), "w") as archive:
                archive.add(place, "photos")
            place = place.with_suffix(".tar")
            os.utime(place, ns=(0, 0))
        places.append(place)
    first = cached_parts(places[0])
    if kind == "replaced":
        shutil.rmtree(places[0])
        places[1].rename(places[0])
        second = cached_parts(places[0])
    else:
        second = cached_parts(places[1])
    part = next(part for part in first if part.endswith("train"))
    assert not np.array_equal(first[part].images, second[part].images)


def test_class_numbers_beyond_the_classes_are_damage(tmp_path, built):
    make_set(tmp_path / "set")
    load_images("set", tmp_path)
    (cache,) = caches()
    np.save(cache / "0-targets.npy", np.full(6, 7))
    assert load_images("set", tmp_path).test.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(built) == 2


def test_one_class_is_too_few(tmp_path):
    make_set(tmp_path / "set", classes=CLASSES[:1])
    with pytest.raises(InputError, match="has one class only, 'cat'"):
        load_images("set", tmp_path)
