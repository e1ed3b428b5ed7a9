"""Unseen classes without those that look like a seen one."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data.images.image_data import CLASSES, grays, make_set

from kernel_attention.errors import InputError
from kernel_attention_lab.data import load_images, load_ood
from kernel_attention_lab.data.images.out_of_distribution import LOOKS_LIKE_CIFAR10

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[5] / "shared" / "data")


@pytest.fixture
def root(tmp_path):
    make_set(tmp_path / "set", size=8)
    for number, label in enumerate(("ant", "bee", "cow")):
        (tmp_path / "set/ood_val" / label).mkdir(parents=True)
        for source in sorted((tmp_path / "set/train" / CLASSES[number % 2]).iterdir()):
            (tmp_path / "set/ood_val" / label / source.name).write_bytes(source.read_bytes())
    return tmp_path


def test_the_part_is_resized_and_named_classes_are_left_out(root):
    found = load_ood(
        "set", root, image_size=4, left_out={"bee": ("honeybee", "an insect"), "elk": ("elk", "")}
    )
    assert found.split.images.shape == (6, 4, 4, 3)
    assert found.class_names == ("ant", "cow")
    assert found.split.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.left_out == (("bee", "honeybee", "an insect"),)
    assert load_ood("set", root, left_out={}).class_names == ("ant", "bee", "cow")
    data = load_images("set", root)
    assert data.class_names == CLASSES, "the part is no split of the set"
    assert grays(data.test) != grays(found.split)


def test_a_set_without_the_part(root):
    with pytest.raises(InputError, match="has no folder unseen"):
        load_ood("set", root, part="unseen")
    everything = {label: ("", "") for label in ("ant", "bee", "cow")}
    with pytest.raises(InputError, match="all classes of ood_val are left out"):
        load_ood("set", root, left_out=everything)


@pytest.fixture(scope="module")
def archive():
    path = SHARED / "images" / "tiny_imagenet100.tar.xz"
    if not path.is_file():
        pytest.skip(f"no images/{path.name} in {SHARED} (set KERNEL_ATTENTION_DATA to the real data)")
    return path


def test_the_list_names_classes_of_the_real_set(archive):
    """Each number is an unseen class there, and its name is in the set's own list."""
    with tarfile.open(archive) as file:
        member = next(member for member in file if member.name.endswith("classes.tsv"))
        lines = file.extractfile(member).read().decode().splitlines()
    unseen = {number: names for number, kind, names in (line.split("\t") for line in lines) if kind == "ood"}
    assert len(unseen) == 100
    for number, (names, reason) in LOOKS_LIKE_CIFAR10.items():
        assert number in unseen
        assert set(names.split(", ")) <= set(unseen[number].split(", "))
        assert reason
    cifar = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"}
    assert all(any(word in reason for word in cifar) for _, reason in LOOKS_LIKE_CIFAR10.values())


@pytest.mark.slow
def test_the_real_unseen_classes_beside_cifar10(archive, monkeypatch, shared_cache):
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    found = load_ood(data_root=SHARED)
    assert found.split.images.shape == (4000, 32, 32, 3)
    assert np.array_equal(np.bincount(found.split.targets), [50] * 80)
    assert len(found.left_out) == len(LOOKS_LIKE_CIFAR10) == 20
    assert not set(found.class_names) & set(LOOKS_LIKE_CIFAR10)
    data = load_images("tiny_imagenet100", SHARED, image_size=32)
    assert np.array_equal(np.bincount(data.train.targets), [500] * 100)
    assert np.array_equal(np.bincount(data.test.targets), [50] * 100)
    assert (data.class_names[0], data.validation) == ("n01443537", None)
    assert not set(data.class_names) & set(found.class_names)
