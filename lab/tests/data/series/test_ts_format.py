"""The strict reader of .ts files: it agrees with aeon on sound files and names the line of every damage."""

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention.series.files.ts_format import read_ts
from kernel_attention_lab.data import read_sequences
from kernel_attention_lab.data.archive import bundled_folder

BUNDLED = [
    "JapaneseVowels/JapaneseVowels",
    "JapaneseVowels/JapaneseVowels_eq",
    "BasicMotions/BasicMotions",
    "Covid3Month/Covid3Month",
    "CardanoSentiment/CardanoSentiment",
    "PickupGestureWiimoteZ/PickupGestureWiimoteZ",
    "UnitTest/UnitTest",
    "UnitTest/UnitTestTimeStamps",
    "ArrowHead/ArrowHead",
]


def read(text):
    return read_ts(text.splitlines(keepends=True), "toy.ts")


def assert_equals_aeon(path):
    from aeon.datasets import load_from_ts_file

    expected, labels, meta = load_from_ts_file(str(path), return_meta_data=True)
    sequences, ours = read_sequences(path)
    assert len(sequences) == len(expected)
    for sequence, case in zip(sequences, expected, strict=True):
        assert sequence.dtype == np.float64
        np.testing.assert_array_equal(sequence, case.T)
    if meta["targetlabel"]:
        np.testing.assert_array_equal(ours, labels)
    else:
        assert ours.tolist() == labels.tolist()


@pytest.mark.parametrize("stem", BUNDLED)
def test_values_and_labels_of_the_bundled_sets_are_those_of_aeon(stem):
    assert_equals_aeon(bundled_folder() / f"{stem}_TRAIN.ts")


@pytest.mark.parametrize("name", ["Handwriting", "AtrialFibrillation"])
def test_values_and_labels_of_archive_sets_are_those_of_aeon(name, outside_data, tmp_path):
    import zipfile

    with zipfile.ZipFile(outside_data / "uea" / f"{name}.zip") as archive:
        path = archive.extract(f"{name}_TRAIN.ts", tmp_path)
    assert_equals_aeon(path)


def test_a_sound_file_reads_as_time_by_channels_with_lower_case_labels(toy):
    file = read(toy.text())
    assert file.header.task == "classification"
    assert file.header.labels == ("left", "right")
    np.testing.assert_array_equal(file.sequences[0], np.array([[1, 4], [2, 5], [3, 6]], np.float32))
    np.testing.assert_array_equal(file.sequences[3], np.array([[0, 1], [-10, 2], [0.5, 3]], np.float32))
    assert file.labels == ["left", "right", "left", "right"]


def test_blank_lines_spaces_comments_and_windows_line_ends_change_nothing(toy):
    plain = read(toy.text())
    noisy = toy.text([" 1 , 2,3 :4,5, 6 : Left ", "", "# note", *toy.cases[1:], "", ""])
    noisy = read(noisy.replace("\n", "\r\n"))
    assert noisy.labels == plain.labels
    np.testing.assert_array_equal(np.stack(noisy.sequences), np.stack(plain.sequences))


def test_question_mark_and_nan_in_any_case_are_missing(toy):
    file = read(toy.text(["1,?,3:4,NaN,nan:left"]))
    assert np.isnan(file.sequences[0]).tolist() == [[False, False], [True, True], [False, True]]


def test_a_label_that_contains_nan_or_a_question_mark_stays_itself(toy):
    file = read(toy.text(["1,2,3:4,5,6:Banana", "1,2,3:4,5,6:why?"], classlabel="true banana why?"))
    assert file.labels == ["banana", "why?"]


def test_numeric_labels_match_the_header_as_numbers_and_take_its_spelling(toy):
    file = read(toy.text(["1,2,3:4,5,6:1", "1,2,3:4,5,6:2.00"], classlabel="true 1.0 2"))
    assert file.labels == ["1.0", "2"]


def test_time_stamps_are_dropped_and_signs_kept(toy):
    stamped = "(2007-01-01 01:36:00,-1.5),(2007-01-01 01:37:00,2):(0,-3),(1,?):left"
    file = read(toy.text([stamped], timestamps="true"))
    np.testing.assert_array_equal(file.sequences[0], np.array([[-1.5, -3], [2, np.nan]], np.float32))


DAMAGED_SECOND_CASE = {
    "truncated before the label": ("1,2,3:4,5,6", "no class label after the last colon"),
    "truncated inside the values": ("1,2,3:4,", "no class label after the last colon"),
    "truncated inside the first channel": ("1,2", "no class label after the last colon"),
    "empty label": ("1,2,3:4,5,6:", "no class label after the last colon"),
    "one channel too few": ("1,2,3:left", "1 channels, but the first case has 2"),
    "one channel too many": ("1,2,3:4,5,6:7,8,9:left", "3 channels, but the first case has 2"),
    "text among the values": ("1,x,3:4,5,6:left", "'x' in channel 0, step 1 is not a number"),
    "a number that only Python knows": ("1,2,3:4,5_0,6:left", "'5_0' in channel 1, step 1 is not a number"),
    "a missing comma value": ("1,2,3:4,,6:left", "'' in channel 1, step 1 is not a number"),
    "an empty channel": ("1,2,3::left", "channel 1 is empty (a series of length 0)"),
    "both channels empty": (": :left", "channel 0 is empty (a series of length 0)"),
    "channels of two lengths": ("1,2,3:4,5:left", "channel 1 has 2 values, channel 0 has 3"),
    "shorter than the others": ("1,2:4,5:left", "2 time steps, the first case has 3"),
    "an unknown label": (
        "1,2,3:4,5,6:up",
        "class label 'up' is not in the header's @classLabel (left, right)",
    ),
    "an infinite value": ("1,2,3:4,inf,6:left", "infinite value in channel 1, step 1"),
    "a value beyond float32": ("1,2,1e39:4,5,6:left", "infinite value in channel 0, step 2"),
}


@pytest.mark.parametrize(("line", "what"), DAMAGED_SECOND_CASE.values(), ids=DAMAGED_SECOND_CASE.keys())
def test_a_damaged_case_is_named_by_line_and_reason(line, what, toy):
    with pytest.raises(InputError) as error:
        read(toy.text([toy.cases[0], line, *toy.cases[2:]]))
    assert str(error.value).startswith(f"toy.ts, line {toy.first_line + 1}: ")
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_where_the_header_knows_better_the_first_case_is_blamed(toy):
    with pytest.raises(InputError, match=rf"line {toy.first_line}: 1 channels.*@dimensions 2"):
        read(toy.text(["1,2,3:left", *toy.cases[1:]]))


@pytest.mark.parametrize("target", ["x", "nan", "inf", "1,2", ""])
def test_a_target_that_is_no_finite_number_is_refused(target, toy):
    with pytest.raises(InputError, match=rf"line {toy.first_line + 1}: .*target value"):
        read(toy.text([f"1,2,3:4,5,6:{target}"], classlabel="false", targetlabel="true"))


def test_more_channels_than_a_univariate_header_allows(toy):
    with pytest.raises(InputError, match="2 channels, but the header says @univariate true"):
        read(toy.text(univariate="true", dimensions=None))


@pytest.mark.parametrize("case", ["1,2,3:4,5,6:left", "(0,1),(1,2:(0,1),(1,2):left", "(0),(1):(0,1):left"])
def test_values_without_their_time_stamps(case, toy):
    with pytest.raises(InputError, match=r"channel 0 is not a list of \(time stamp,value\) pairs"):
        read(toy.text([case], timestamps="true"))


HEADERS = {
    "nothing": ("", "toy.ts: the file is empty"),
    "only white space": ("\n \n", "toy.ts: the file is empty"),
    "no @data": ("@problemName Toy\n@classLabel true a\n", "toy.ts: no @data line"),
    "data too early": ("@classLabel true a\n1,2:a\n@data\n", "toy.ts, line 2: data before the @data line"),
    "something else": ("PK\x03\x04\n", "toy.ts, line 1: data before the @data line"),
    "not a boolean": ("@equalLength maybe\n@data\n", "toy.ts, line 1: @equallength needs true or false"),
    "no value": ("@missing\n@data\n", "toy.ts, line 1: @missing needs true or false"),
    "no labels": ("@classLabel true\n@data\n", "toy.ts, line 1: @classLabel true needs the class labels"),
    "labels by case": (
        "@classLabel true a A\n@data\n",
        "class labels that differ only in upper and lower case",
    ),
}


@pytest.mark.parametrize(("text", "what"), HEADERS.values(), ids=HEADERS.keys())
def test_a_damaged_header_is_named(text, what):
    with pytest.raises(InputError) as error:
        read(text)
    assert what in str(error.value)


@pytest.mark.parametrize("count", ["1" * 5000, "\N{SUPERSCRIPT TWO}", "-1"])
def test_a_number_of_dimensions_that_is_none_declares_nothing(count):
    assert read(f"@dimensions {count}\n@data\n1,2:3,4\n").header.dimensions is None
