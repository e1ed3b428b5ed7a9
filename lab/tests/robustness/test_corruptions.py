"""Corrupted images are the library's, the same in every subset, and cached."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.robustness import (
    CORRUPTIONS,
    SEVERITIES,
    corrupt_image,
    corrupt_images,
    corrupted_images,
)
from kernel_attention_lab.robustness.corruptions import _seed_of

imagecorruptions = pytest.importorskip("imagecorruptions")


def test_the_names_are_the_librarys_common_fifteen():
    assert list(CORRUPTIONS) == imagecorruptions.get_corruption_names("common")


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_equal_to_the_librarys_own_output(corruption, photos):
    """With its global generator seeded, as its users are told to; two corruptions take the seed."""
    for severity in SEVERITIES:
        for index in (0, 7):
            seed = _seed_of(3, index, corruption, severity)
            np.random.seed(seed)
            taken = {"seed": seed} if corruption in ("impulse_noise", "glass_blur") else {}
            expected = imagecorruptions.corrupt(
                photos[1], severity=severity, corruption_name=corruption, **taken
            )
            found = corrupt_image(photos[1], corruption, severity, seed=3, index=index)
            assert found.dtype == np.uint8
            np.testing.assert_array_equal(found, expected)


RANDOM = [name for name in CORRUPTIONS if name not in (
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")]  # fmt: skip


@pytest.mark.parametrize("corruption", RANDOM)
def test_seed_number_and_severity_change_the_draw(corruption, photos):
    drawn = [
        corrupt_image(photos[0], corruption, 3, **options).tobytes()
        for options in ({}, {"seed": 1}, {"index": 1}, {})
    ]
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]
    assert len({_seed_of(0, 0, corruption, severity) for severity in SEVERITIES}) == 5


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_the_callers_generator_is_not_touched_and_not_used(corruption, photos, capsys):
    np.random.seed(11)
    first = corrupt_image(photos[0], corruption, 5)
    after = np.random.random(4)
    np.random.seed(11)
    np.testing.assert_array_equal(np.random.random(4), after)
    np.testing.assert_array_equal(corrupt_image(photos[0], corruption, 5), first)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("value", [0, 255])
def test_images_of_one_colour(corruption, value):
    """Where a library divides by a range or a largest value, warnings are errors here."""
    plain = np.full((33, 47, 3), value, dtype=np.uint8)
    for severity in (1, 5):
        assert corrupt_image(plain, corruption, severity).shape == plain.shape


def test_higher_severity_is_further_from_the_image(photos):
    """On average over the corruptions and images; a single corruption need not be monotone."""

    def distance(name, severity):
        return np.abs(corrupt_images(photos, name, severity).astype(float) - photos).mean()

    distances = [np.mean([distance(name, severity) for name in CORRUPTIONS]) for severity in SEVERITIES]
    assert distances == sorted(distances)
    assert distances[0] > 1


def test_an_image_is_corrupted_alike_in_every_subset(photos):
    whole = corrupt_images(photos, "snow", 4, seed=5, indices=range(10, 16))
    some = corrupt_images(photos[[4, 1]], "snow", 4, seed=5, indices=[14, 11])
    np.testing.assert_array_equal(some, whole[[4, 1]])


def test_the_cache_gives_what_was_made(photos, tmp_path):
    chosen = ("fog", "glass_blur", "jpeg_compression")
    made = dict(corrupted_images(photos, seed=2, corruptions=chosen, cache=tmp_path))
    said: list[str] = []
    read = dict(corrupted_images(photos, seed=2, corruptions=chosen, cache=tmp_path, on_progress=said.append))
    assert said == []
    for corruption in chosen:
        assert made[corruption].shape == (5, *photos.shape)
        assert not made[corruption].flags.writeable
        np.testing.assert_array_equal(read[corruption], made[corruption])
        for severity in SEVERITIES:
            expected = corrupt_images(photos, corruption, severity, seed=2)
            np.testing.assert_array_equal(read[corruption][severity - 1], expected)


def test_the_cache_is_of_these_images_numbers_and_seed(photos, tmp_path):
    changed = photos.copy()
    changed[0, 0, 0, 0] ^= 1
    calls = [(photos, {}), (changed, {}), (photos[:5], {}), (photos, {"seed": 1})]
    calls.append((photos, {"indices": range(1, 7)}))
    for images, options in calls:
        ((_, found),) = corrupted_images(images, corruptions=["shot_noise"], cache=tmp_path, **options)
        np.testing.assert_array_equal(found[2], corrupt_images(images, "shot_noise", 3, **options))
    assert len(list(tmp_path.iterdir())) == len(calls)


def test_an_interrupted_cache_continues_at_the_first_missing_corruption(photos, tmp_path):
    def interrupt(line):
        if "frost" in line:
            raise KeyboardInterrupt

    chosen = ("contrast", "frost", "fog")
    with pytest.raises(KeyboardInterrupt):
        dict(corrupted_images(photos, corruptions=chosen, cache=tmp_path, on_progress=interrupt))
    said: list[str] = []
    assert list(
        dict(corrupted_images(photos, corruptions=chosen, cache=tmp_path, on_progress=said.append))
    ) == [*chosen]
    assert said == [f"corrupting 6 images: {name}" for name in ("frost", "fog")]


@pytest.mark.parametrize("damage", [lambda data: data[:-7], lambda data: b"", lambda data: b"x" + data[1:]])
def test_a_damaged_file_of_the_cache_is_made_again(photos, tmp_path, damage):
    ((_, made),) = corrupted_images(photos, corruptions=["contrast"], cache=tmp_path)
    expected = np.array(made)
    del made
    (path,) = tmp_path.rglob("contrast.npy")
    path.write_bytes(damage(path.read_bytes()))
    ((_, again),) = corrupted_images(photos, corruptions=["contrast"], cache=tmp_path)
    np.testing.assert_array_equal(again, expected)


@pytest.mark.slow
def test_processes_change_nothing(photos, tmp_path):
    many = np.concatenate([photos] * 25)  # more than two blocks
    ((_, alone),) = corrupted_images(many, corruptions=["gaussian_noise"], cache=tmp_path / "1")
    ((_, shared),) = corrupted_images(many, corruptions=["gaussian_noise"], cache=tmp_path / "2", workers=2)
    np.testing.assert_array_equal(shared, alone)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": np.zeros((2, 31, 40, 3), np.uint8)}, r"H, W >= 32, not shape \(2, 31, 40, 3\), uint8"),
        ({"images": np.zeros((2, 32, 32, 3), np.float32)}, r"uint8 .*, not shape \(2, 32, 32, 3\), float32"),
        ({"images": np.zeros((2, 32, 32, 1), np.uint8)}, "not shape"),
        ({"images": np.zeros((0, 32, 32, 3), np.uint8)}, "not shape"),
        ({"corruptions": ["frog"]}, "unknown corruption 'frog'; did you mean 'fog' or 'frost'"),
        ({"indices": [1]}, "indices must be 6 whole numbers"),
        ({"indices": range(-1, 5)}, "of at least 0"),
        ({"workers": 0}, "workers=0 must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_line(photos, tmp_path, change, said):
    """Refused at the call, before anything is made."""
    with pytest.raises(InputError, match=said):
        corrupted_images(**{"images": photos, "cache": tmp_path} | change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("severity", [0, 6, 2.5])
def test_a_severity_that_does_not_exist(photos, severity):
    with pytest.raises(InputError, match="must be one of 1, 2, 3, 4, 5"):
        corrupt_image(photos[0], "fog", severity)


def test_an_opencv_that_cannot_be_loaded_is_one_line(tmp_path, forks):
    """As opencv-python behaves without libGL: the stand-in raises what its import raises there."""
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    script = (
        "import numpy as np\n"
        "from kernel_attention_lab.robustness import corrupt_image\n"
        "try: corrupt_image(np.zeros((32, 32, 3), np.uint8), 'fog', 1)\n"
        "except ValueError as error: print(error)"
    )
    found = forks.run("-c", script, env={"PYTHONPATH": str(tmp_path)})
    assert found.stdout == (
        "corruptions need OpenCV, which cannot be loaded here (libGL.so.1: cannot open shared object file): "
        "pip uninstall opencv-python; pip install --force-reinstall opencv-python-headless\n"
    ), found.stderr


def test_without_the_library_the_extra_is_named(forks):
    script = (
        "import sys, numpy as np; sys.modules['imagecorruptions'] = None\n"
        "from kernel_attention_lab.extras import install_hint\n"
        "from kernel_attention_lab.robustness import corrupt_image\n"
        "try: corrupt_image(np.zeros((32, 32, 3), np.uint8), 'fog', 1)\n"
        "except ModuleNotFoundError as error: print(install_hint(error, 'this'))"
    )
    found = forks.run("-c", script)
    assert found.stdout == (
        "this needs imagecorruptions, which is not installed: "
        "pip install 'kernel-attention-lab[robustness]'\n"
    ), found.stderr
