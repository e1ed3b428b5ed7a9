"""Sets by name and sequences by file: what is loaded, from where, and every way it can be refused."""

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.data import load_time_series, read_sequences

# name: task, train, test, channels, shortest, longest, outputs
BUNDLED = {
    "JapaneseVowels": ("classification", 270, 370, 12, 7, 29, 9),
    "JapaneseVowels_eq": ("classification", 270, 370, 12, 25, 25, 9),
    "BasicMotions": ("classification", 40, 40, 6, 100, 100, 4),
    "PickupGestureWiimoteZ": ("classification", 50, 50, 1, 29, 361, 10),
    "Covid3Month": ("regression", 140, 61, 1, 84, 84, 1),
    "CardanoSentiment": ("regression", 74, 33, 2, 24, 24, 1),
}
OUTSIDE = {
    "UWaveGestureLibrary": ("classification", 120, 320, 3, 315, 315, 8),
    "ArticularyWordRecognition": ("classification", 275, 300, 9, 144, 144, 25),
    "FingerMovements": ("classification", 316, 100, 28, 50, 50, 2),
    "AtrialFibrillation": ("classification", 15, 15, 2, 640, 640, 3),
    "StandWalkJump": ("classification", 12, 15, 4, 2500, 2500, 3),
}


def assert_counts(data, task, train, test, channels, shortest, longest, outputs):
    lengths = [len(sequence) for split in (data.train, data.test) for sequence in split.sequences]
    assert (data.task, len(data.train), len(data.test)) == (task, train, test)
    assert (data.num_features, min(lengths), data.max_len, data.num_outputs) == (
        channels,
        shortest,
        longest,
        outputs,
    )
    for split in (data.train, data.test):
        assert all(sequence.dtype == np.float32 for sequence in split.sequences)
        assert all(sequence.shape[1] == channels for sequence in split.sequences)
        assert all(np.isfinite(sequence).all() for sequence in split.sequences)
        assert split.targets.dtype == (np.int64 if task == "classification" else np.float32)
    if task == "classification":
        assert set(data.train.targets.tolist()) == set(range(outputs))
        assert set(data.test.targets.tolist()) <= set(range(outputs))
        assert data.class_names == tuple(sorted(data.class_names))
    else:
        assert data.class_names == ()


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_set_loads_by_name_alone(name):
    assert_counts(load_time_series(name), *BUNDLED[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_set_of_the_archive_loads_from_its_zip(name, outside_data):
    assert_counts(load_time_series(name, outside_data), *OUTSIDE[name])


def test_class_indices_follow_the_sorted_labels(toy):
    data = load_time_series("Toy", toy.root)
    assert data.class_names == ("left", "right")
    assert data.train.targets.tolist() == [0, 1, 0, 1]


def test_folder_flat_files_and_zips_give_the_same_data(toy, tmp_path):
    reference = load_time_series("Toy", toy.root)
    flat = load_time_series("Toy", toy.folder)
    toy.zip(prefix="Toy/")
    zipped = load_time_series("Toy", toy.root)
    (tmp_path / "uea").mkdir()
    (tmp_path / "Toy.zip").rename(tmp_path / "uea" / "Toy.zip")
    below = load_time_series("Toy", tmp_path)
    for other in (flat, zipped, below):
        np.testing.assert_array_equal(np.stack(other.train.sequences), np.stack(reference.train.sequences))
        np.testing.assert_array_equal(other.test.targets, reference.test.targets)


def test_declared_gaps_are_interpolated_and_undeclared_ones_refused(toy):
    gaps = ["?,2,3:4,?,8:left", *toy.cases[1:]]
    toy.write("TRAIN", gaps, missing="true")
    first = load_time_series("Toy", toy.root).train.sequences[0]
    np.testing.assert_array_equal(first, np.array([[2, 4], [2, 6], [3, 8]], np.float32))
    with pytest.raises(InputError, match="case 0, channel 0, step 0 of the train split of Toy"):
        load_time_series("Toy", toy.root, missing="error")
    toy.write("TRAIN", gaps)
    with pytest.raises(InputError, match=r"NaN.*the train split of Toy.*missing='interpolate'"):
        load_time_series("Toy", toy.root)
    np.testing.assert_array_equal(load_time_series("Toy", toy.root, "interpolate").train.sequences[0], first)


def test_an_unknown_value_of_missing_is_refused_before_anything_is_read():
    with pytest.raises(InputError, match=r"unknown value of missing 'drop'.*auto, error, interpolate"):
        load_time_series("NoSuchSet", missing="drop")


@pytest.mark.parametrize("split", ["TRAIN", "TEST"])
def test_an_empty_split(split, toy):
    toy.write(split, [])
    with pytest.raises(InputError, match=f"the {split.lower()} split of Toy is empty"):
        load_time_series("Toy", toy.root)


def test_labels_of_the_test_split_unseen_in_training(toy):
    toy.write("TRAIN", [case for case in toy.cases if case.lower().endswith("left")])
    with pytest.raises(
        InputError, match=r"test split of Toy has labels unseen in training: right \(seen: left\)"
    ):
        load_time_series("Toy", toy.root)


def test_splits_of_different_channel_counts(toy):
    toy.write("TEST", ["1,2,3:left"], dimensions="1")
    with pytest.raises(InputError, match="train split of Toy has 2 channels, the test split 1"):
        load_time_series("Toy", toy.root)


def test_a_split_without_labels(toy):
    toy.write("TEST", ["1,2,3:4,5,6"], classlabel="false")
    with pytest.raises(InputError, match="test split of Toy has neither @classLabel true nor @targetLabel"):
        load_time_series("Toy", toy.root)


def test_a_damaged_line_inside_a_zip_is_named_with_both(toy):
    toy.write("TEST", [*toy.cases, "1,2,3:4,"])
    path = toy.zip()
    with pytest.raises(InputError) as error:
        load_time_series("Toy", toy.root)
    assert str(error.value).startswith(f"{path}:Toy_TEST.ts, line {toy.first_line + 4}: ")


@pytest.mark.parametrize("position", [0.25, 0.5, 0.75])
def test_a_zip_damaged_or_cut_anywhere_is_refused(position, toy):
    path = toy.zip()
    sound = path.read_bytes()
    index = int(position * len(sound))
    for damaged in (sound[:index], sound[:40] + bytes(60) + sound[100:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"Toy.zip"):
            load_time_series("Toy", toy.root)


def test_a_zip_without_the_files(toy):
    path = toy.zip()
    path.rename(path.with_name("Other.zip"))
    with pytest.raises(
        InputError, match=r"Other.zip has no Other_TRAIN.ts \(it has: Toy_TRAIN.ts, Toy_TEST.ts\)"
    ):
        load_time_series("Other", toy.root)


def test_read_sequences_of_ts_with_and_without_labels(toy):
    sequences, labels = read_sequences(toy.folder / "Toy_TEST.ts")
    assert [sequence.shape for sequence in sequences] == [(3, 2)] * 4
    assert labels.tolist() == ["left", "right", "left", "right"]
    path = toy.write("TEST", ["1,2,3:4,5,6", "1,2:3,4"], classlabel="false", equallength="false")
    sequences, labels = read_sequences(path)
    assert [sequence.shape for sequence in sequences] == [(3, 2), (2, 2)]
    assert labels is None
    path = toy.write("TEST", ["1,2,3:4,5,6:0.5"], classlabel="false", targetlabel="true")
    assert read_sequences(path)[1].tolist() == [0.5]


def test_read_sequences_of_numpy_files(tmp_path):
    X = np.arange(24.0).reshape(2, 3, 4)
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "x.npz", X=X, y=np.array(["a", "b"]))
    np.savez(tmp_path / "bare.npz", X=X)
    for name, expected in (("x.npy", None), ("x.npz", ["a", "b"]), ("bare.npz", None)):
        sequences, labels = read_sequences(tmp_path / name)
        np.testing.assert_array_equal(np.stack(sequences), X.transpose(0, 2, 1))
        assert labels is None if expected is None else labels.tolist() == expected


def test_read_sequences_refuses_what_it_cannot_read(toy, tmp_path):
    with pytest.raises(InputError, match=r"gone.ts' does not exist"):
        read_sequences(tmp_path / "gone.ts")
    with pytest.raises(InputError, match="Toy' is not a file"):
        read_sequences(toy.folder)
    (tmp_path / "x.txt").write_text("1,2")
    with pytest.raises(InputError, match=r"unknown type of file '.txt' \(accepted: .ts, .npy, .npz, .csv, "):
        read_sequences(tmp_path / "x.txt")
    with pytest.raises(InputError, match=r"Toy_TEST.ts is empty"):
        read_sequences(toy.write("TEST", []))
    for name in ("x.npy", "x.npz"):
        (tmp_path / name).write_bytes(b"no array")
        with pytest.raises(InputError, match=f"{name} is not a readable|{name}: its header says shape"):
            read_sequences(tmp_path / name)
    np.savez(tmp_path / "x.npz", Z=np.zeros(3))
    with pytest.raises(InputError, match=r"has no array 'X' \(it has: Z\)"):
        read_sequences(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", X=np.zeros((2, 1, 3)), y=np.zeros(3))
    with pytest.raises(InputError, match=r"y has shape \(3,\), accepted: \(2,\)"):
        read_sequences(tmp_path / "x.npz")
    np.save(tmp_path / "x.npy", np.full((1, 1, 2), np.nan))
    with pytest.raises(InputError, match=r"missing value \(NaN\) in case 0, .*x\.npy"):
        read_sequences(tmp_path / "x.npy")


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    np.save(tmp_path / "x.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="not a readable"):
        read_sequences(tmp_path / "x.npy")
    assert not (tmp_path / "ran").exists()


def test_splits_of_different_tasks(toy):
    toy.write("TEST", ["1,2,3:4,5,6:1"], classlabel="false", targetlabel="true")
    with pytest.raises(InputError, match="train split of Toy is classification, the test split regression"):
        load_time_series("Toy", toy.root)


def test_a_file_that_is_no_text(toy):
    (toy.folder / "Toy_TRAIN.ts").write_bytes(b"@data\n\xff\xfe\x00")
    with pytest.raises(InputError, match=r"Toy_TRAIN.ts is not text in UTF-8"):
        load_time_series("Toy", toy.root)
