"""Series in files of one's own: real sets in every layout, and what is refused."""

from __future__ import annotations

import csv
import datetime
import re
from time import process_time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention_lab.data import SeriesColumns, load_series_files, load_time_series, read_series_file

LONG = SeriesColumns(case="case", time="time", target="label")
WIDE = SeriesColumns(case="case", target="label")


@pytest.fixture(scope="module", params=["JapaneseVowels", "AtrialFibrillation"])
def split(request):
    """A real training split: of unequal lengths, and long series of one length with two channels."""
    is_bundled = request.param != "AtrialFibrillation"
    root = None if is_bundled else request.getfixturevalue("outside_data")
    data = load_time_series(request.param, root)
    chosen = data.train.subset(np.arange(0, len(data.train), max(len(data.train) // 20, 1)))
    return chosen, [data.class_names[target] for target in chosen.targets]


def long_rows(sequences, labels):
    """Rows of a table with a step a row; the steps of every case in reverse order."""
    for case, (sequence, label) in enumerate(zip(sequences, labels, strict=True)):
        for time in reversed(range(len(sequence))):
            yield [f"case {case}", time, *map(float, sequence[time]), label]


def long_names(sequences):
    return ["case", "time", *(f"channel {c}" for c in range(sequences[0].shape[1])), "label"]


def wide_rows(sequences, labels):
    """Rows of a table with a case a row; the last cells of a shorter case are empty."""
    longest = max(map(len, sequences))
    for case, (sequence, label) in enumerate(zip(sequences, labels, strict=True)):
        empty = [None] * (longest - len(sequence))
        cells = [cell for channel in sequence.T for cell in [*map(float, channel), *empty]]
        yield [label, *cells, f"case {case}"]


def wide_names(sequences):
    steps = range(max(map(len, sequences)))
    return ["label", *(f"x{c}_{step}" for c in range(sequences[0].shape[1]) for step in steps), "case"]


def write_csv(path, names, rows, delimiter=","):
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([names, *rows])
    return path


def write_parquet(path, names, rows):
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["long.csv", "long.tsv", "long.parquet", "wide.csv", "wide.parquet", "npz"])
def test_every_layout_holds_the_same_series(split, kind, tmp_path):
    chosen, labels = split
    path = tmp_path / f"series.{kind.rpartition('.')[2]}"
    if kind == "npz":
        lengths = [len(sequence) for sequence in chosen.sequences]
        np.savez(path, X=np.concatenate(chosen.sequences), lengths=lengths, y=labels)
        found, columns = read_series_file(path), None
    else:
        is_long = kind.startswith("long")
        names = (long_names if is_long else wide_names)(chosen.sequences)
        rows = (long_rows if is_long else wide_rows)(chosen.sequences, labels)
        if kind.endswith("parquet"):
            write_parquet(path, names, rows)
        else:
            write_csv(path, names, rows, "\t" if kind.endswith("tsv") else ",")
        columns = LONG if is_long else WIDE
        found = read_series_file(path, columns=columns)
        assert found.cases == [f"case {index}" for index in range(len(labels))]
    precision = np.float32 if kind == "npz" else np.float64  # text has no precision of its own
    assert [sequence.dtype for sequence in found.sequences] == [np.dtype(precision)] * len(labels)
    for ours, expected in zip(found.sequences, chosen.sequences, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert found.labels.tolist() == labels
    data = load_series_files(str(path), columns=columns, test_file=str(path))
    assert data.class_names == tuple(sorted(set(labels)))  # nine speakers: one digit each
    assert len(data.train) == len(data.test) == len(labels)


def test_a_part_of_the_cases_is_the_test_split(split, tmp_path):
    chosen, labels = split
    path = tmp_path / "series.csv"
    labels = [str(index % 3) for index in range(len(labels))]
    write_csv(path, wide_names(chosen.sequences), wide_rows(chosen.sequences, labels))
    first, second = (load_series_files(str(path), columns=WIDE, test_fraction=0.25) for _ in range(2))
    assert len(first.train) + len(first.test) == len(labels)
    assert len(first.test) == round(0.25 * len(labels))
    assert (first.test.targets == second.test.targets).all()
    assert set(first.test.targets) == {0, 1, 2}


def test_files_lie_below_the_data_root_or_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "root" / "own").mkdir(parents=True)
    text = "x0,target\n" + "1,a\n2,b\n" * 5
    for place in ("root/own/a.csv", "b.csv"):
        (tmp_path / place).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert len(load_series_files("own/a.csv", tmp_path / "root").train) == 8
    assert len(load_series_files("b.csv", tmp_path / "root").train) == 8
    with pytest.raises(InputError, match=r"dataset 'c.csv': there is no file c.csv or .*root/c.csv"):
        load_series_files("c.csv", tmp_path / "root")


@pytest.mark.parametrize(
    ("targets", "kind", "expected"),
    [
        (["1", "2"], "auto", ("1", "2")),
        (["10", "9"], "auto", ("9", "10")),
        (["b", "10"], "auto", ("10", "b")),
        (["true", "false"], "auto", ("false", "true")),
        (["1.5", "2"], "auto", ()),
        (["1", "2"], "value", ()),
        (["1.5", "2"], "class", ("1.5", "2")),
    ],
)
def test_targets_are_classes_or_values(targets, kind, expected, tmp_path):
    path = tmp_path / "series.csv"
    path.write_text("t0,t1,target\n" + "".join(f"{i},0,{targets[i % 2]}\n" for i in range(10)))
    data = load_series_files(str(path), target_type=kind)
    assert data.class_names == expected
    assert data.task == ("classification" if expected else "regression")
    if not expected:
        assert set(data.train.targets.tolist()) == {float(target) for target in targets}


def test_a_ts_file_says_itself_what_its_targets_are(tmp_path):
    path = tmp_path / "own.ts"
    path.write_text("@targetLabel true\n@data\n" + "".join(f"{i},2,3:{i % 3}\n" for i in range(12)))
    assert load_series_files(str(path)).task == "regression"
    assert load_series_files(str(path), target_type="class").class_names == ("0.0", "1.0", "2.0")


def test_wide_columns_are_channels_in_the_order_of_their_numbers(tmp_path):
    path = tmp_path / "series.csv"
    path.write_text(",target,a_10,a_9,b 10,b 9\n7,u,2,1,4,3\n8,v,,5,,6\n")
    found = read_series_file(path)
    assert [sequence.tolist() for sequence in found.sequences] == [[[1, 3], [2, 4]], [[5, 6]]]
    assert found.cases == ["7", "8"]
    found = read_series_file(path, columns=SeriesColumns(channels=["b"]))
    assert [sequence.tolist() for sequence in found.sequences] == [[[3], [4]], [[6]]]


@pytest.mark.parametrize(
    "times",
    [
        ["2", "10", "9"],
        ["2024-03-01", "2024-03-03", "2024-03-02"],
        ["2024-03-01T10:00Z", "2024-03-01T12:00+00:00", "2024-03-01T11:00"],
    ],
)
def test_times_are_numbers_or_dates(times, tmp_path):
    path = tmp_path / "series.csv"
    path.write_text("id;t;x\n" + "".join(f"a;{t};{v}\n" for t, v in zip(times, (1, 3, 2), strict=True)))
    found = read_series_file(path, columns=SeriesColumns(case="id", time="t"))
    assert found.sequences[0][:, 0].tolist() == [1, 2, 3]
    assert found.labels is None


def test_dates_of_parquet_are_dates(tmp_path):
    days = [datetime.date(2024, 3, 1), datetime.date(2024, 3, 3), datetime.date(2024, 3, 2)]
    rows = [[1, day, value] for day, value in zip(days, (1, 3, 2), strict=True)]
    path = write_parquet(tmp_path / "s.parquet", ["id", "t", "x"], rows)
    found = read_series_file(path, columns=SeriesColumns(case="id", time="t"))
    assert found.sequences[0][:, 0].tolist() == [1, 2, 3]


def test_gaps_inside_a_series_are_refused_or_filled(tmp_path):
    path = tmp_path / "series.csv"
    path.write_text("t0,t1,t2,t3\n1,NA,3,\n1,2,3,4\n")
    with pytest.raises(InputError, match=r"missing value \(NaN\) in case 0, channel 0, step 1"):
        read_series_file(path)
    filled = read_series_file(path, "interpolate").sequences
    assert [sequence[:, 0].tolist() for sequence in filled] == [[1, 2, 3], [1, 2, 3, 4]]


LONG_TEXT = "id,t,x,target\na,0,1,u\na,1,2,u\nb,0,3,v\n"
BY_TIME = SeriesColumns(case="id", time="t")


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("", None, "the first line must name the columns"),
        ("x0,target\n", None, "has no rows"),
        ("x0,x0\n1,2\n", None, "two columns are named 'x0'"),
        ("x0,x1\n1,2\n3\n", None, "line 3: 1 cells, the first line names 2 columns"),
        ("x0,x1\n1,2\n3,four\n", None, "line 3: 'four' in column 'x1' is not a number"),
        ("x0,x1\n1,1_0\n", None, "line 2: '1_0' in column 'x1' is not a number"),
        ('x0,x1\n1,"2\n', None, "line 2: unexpected end of data"),
        ("x0,x1\n1,2\n,\n", None, "line 3: no step of this case has a value"),
        ("x0,x1\n1,inf\n", None, "line 2: infinite value inf in column 'x1'"),
        ("x0,age\n1,2\n", None, "column 'age' has no number at its end"),
        ("x0,x00\n1,2\n", None, "columns 'x0' and 'x00' have the same number"),
        ("x0,x1,y0\n1,2,3\n", None, "channel 'x' has 2 numbered columns, channel 'y' 1"),
        ("x0,x1\n1,2\n", SeriesColumns(channels=["y"]), r"no column is named 'y' with .*: 'x'\)"),
        ("x0,target\n1,\n", None, "line 2: column 'target' is empty"),
        ("x0\n1\n", SeriesColumns(case="id"), "unknown column of .* 'id'"),
        (LONG_TEXT, SeriesColumns(layout="long"), "needs case_column"),
        (LONG_TEXT, SeriesColumns(case="id", time="tt"), "unknown column of .* 'tt'; did you mean 't'"),
        (LONG_TEXT, SeriesColumns(case="id", time="t", target="x", channels=["x"]), "no column is left|x"),
        (LONG_TEXT.replace("a,1", "a,0"), BY_TIME, "line 3: case 'a' has the time 0 twice"),
        (LONG_TEXT.replace("a,1", "a,one"), BY_TIME, "line 3: the time 'one' in column 't' is not a number"),
        (LONG_TEXT.replace("2,u", "2,w"), BY_TIME, "line 3: case 'a' has the target 'w' here and 'u' before"),
        (LONG_TEXT.replace("b,", ","), BY_TIME, "line 4: column 'id' is empty"),
    ],
)
def test_tables_that_mean_nothing_are_refused(text, columns, message, tmp_path):
    path = tmp_path / "series.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        read_series_file(path, columns=columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "x0\n1\n2\n",
            {},
            r"has no labels to learn: no column 'target' \(it has: x0\); target_column names it",
        ),
        (
            "x0,target\n1,a\n2,b\n",
            {},
            "cannot hold out 0.2 of 2 cases: no class has two cases; name a test_f",
        ),
        ("x0,target\n1,a\n2,a\n", {}, "all 2 cases have the label 'a'"),
        (
            "x0,target\n1,a\n2,b\n",
            {"target_type": "value"},
            "the target 'a' of case 0 is not a finite number",
        ),
        ("x0,target\n1,a\n2,b\n", {"test_file": "more.csv"}, "labels c were not seen in training"),
        (
            "x0,y0,target\n1,1,a\n2,1,c\n",
            {"test_file": "more.csv"},
            r"more.csv: the channels are not those of own.csv \(missing: 'y'\); accepted: 'x', 'y'",
        ),
    ],
)
def test_data_sets_that_cannot_be_learnt_are_refused(text, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text(text)
    (tmp_path / "more.csv").write_text("x0,target\n1,a\n2,c\n")
    with pytest.raises(InputError, match=message):
        load_series_files("own.csv", **options)


def test_damaged_files_are_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"a.parquet is not a readable Parquet file \(.*\)$"):
        read_series_file(tmp_path / "a.parquet")
    path = write_parquet(tmp_path / "b.parquet", ["x0", "x1"], [[1.0, "two"], [2.0, "three"]])
    with pytest.raises(InputError, match=r"b.parquet: column 'x1' holds string, not numbers"):
        read_series_file(path)
    (tmp_path / "c.csv").write_bytes("x0,x1\n1,ü\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"c.csv is not text in UTF-8"):
        read_series_file(tmp_path / "c.csv")
    X = np.zeros((6, 2))
    for lengths in ([2, 3], [6, 0], [2.0, 4.0], [[2, 4]]):
        np.savez(tmp_path / "d.npz", X=X, lengths=lengths)
        with pytest.raises(InputError, match=re.escape("d.npz: with lengths, X must have shape")):
            read_series_file(tmp_path / "d.npz")


MARKS = ("", " ", "NA", "NaN", "nan", "-nan", "NaT", "null", "NULL", "None", "<NA>", "N/A", "#N/A", "?")
ROLES = {
    "case": ("id", BY_TIME, "column 'id' is empty, or has a mark of missing values"),
    "time": ("t", BY_TIME, "column 't' is empty, or has a mark of missing values"),
    "target": ("target", BY_TIME, "column 'target' is empty, or has a mark of missing values"),
    "channel": ("x", BY_TIME, r"missing value \(NaN\) in case"),
}


@pytest.mark.parametrize("role", ROLES)
@settings(max_examples=20)
@given(row=st.integers(0, 5), mark=st.sampled_from(MARKS), kind=st.sampled_from(["csv", "parquet"]))
def test_a_mark_of_missing_values_is_one_in_every_column(role, row, mark, kind, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marks")
    name, columns, message = ROLES[role]
    rows = [[case, float(t), 0.5 * t, "u" if case == "a" else "v"] for case in "ab" for t in range(3)]
    names = ["id", "t", "x", "target"]
    place = names.index(name)
    if kind == "csv":
        rows[row][place] = mark
        path, where = write_csv(folder / "s.csv", names, rows), f"line {row + 2}"
    else:
        rows[row][place] = mark if isinstance(rows[row][place], str) else np.nan
        path, where = write_parquet(folder / "s.parquet", names, rows), f"row {row + 1}"
    with pytest.raises(InputError, match=message) as caught:
        read_series_file(path, columns=columns)
    assert role == "channel" or where in str(caught.value)


@pytest.mark.parametrize("mark", [None, np.nan])
@pytest.mark.parametrize("name", ["id", "t", "target"])
def test_null_of_parquet_is_missing_in_every_column(name, mark, tmp_path):
    names = ["id", "t", "x", "target"]
    rows = [[float(case), float(t), 0.5 * t, float(case)] for case in range(2) for t in range(3)]
    rows[4][names.index(name)] = mark
    path = write_parquet(tmp_path / "s.parquet", names, rows)
    with pytest.raises(InputError, match=f"row 5: column '{name}' is empty"):
        read_series_file(path, columns=BY_TIME)


@pytest.mark.parametrize(
    "y", [np.array([0.5, np.nan] * 5), np.array(["a", "NA"] * 5), np.array([0, np.nan] * 5)]
)
def test_a_missing_label_of_arrays_is_no_class(y, tmp_path):
    np.savez(tmp_path / "s.npz", X=np.zeros((10, 1, 3)), y=y)
    with pytest.raises(InputError, match="the label of case 1 is missing"):
        load_series_files(str(tmp_path / "s.npz"))


def test_a_class_of_a_ts_file_may_be_called_none(tmp_path):
    path = tmp_path / "own.ts"
    labels = ["none", "crack"] * 5
    path.write_text("@classLabel true none crack\n@data\n" + "".join(f"1,2:{label}\n" for label in labels))
    assert load_series_files(str(path)).class_names == ("crack", "none")


@pytest.mark.parametrize("value", ["inf", "-Infinity", "1e39", "-4e38"])
@pytest.mark.parametrize("kind", ["csv", "npz", "ts"])
def test_targets_are_finite_in_the_precision_of_training(value, kind, tmp_path):
    path = tmp_path / f"s.{kind}"
    targets = [f"{i / 7:.3f}" for i in range(9)] + [value]
    if kind == "csv":
        path.write_text("t0,t1,target\n" + "".join(f"1,2,{target}\n" for target in targets))
    elif kind == "npz":
        np.savez(path, X=np.zeros((10, 1, 3)), y=np.array(targets, float))
    else:
        path.write_text("@targetLabel true\n@data\n" + "".join(f"1,2:{target}\n" for target in targets))
    with pytest.raises(InputError, match=r"target .*is not a finite number \(float32 is used\)"):
        load_series_files(str(path))


@pytest.mark.parametrize(("offset", "scale"), [(1e9, 1.0), (-1e8, 0.3), (0.0, 1e-46)])
def test_targets_that_float32_merges_are_refused(offset, scale, tmp_path):
    y = offset + scale * np.linspace(0, 1, 20)
    np.savez(tmp_path / "s.npz", X=np.zeros((20, 1, 3)), y=y)
    with pytest.raises(InputError, match="float32 cannot tell the targets apart"):
        load_series_files(str(tmp_path / "s.npz"), target_type="value")


@pytest.mark.parametrize(
    "times",
    [
        ["2024-03-31T00:00:00.000000100", "2024-03-31T00:00:00.000000200"],
        ["2024-03-31T00:00:00.100000000+01:00", "2024-03-30T23:00:00.100000001Z"],
        ["1711846200000000000", "1711846200000000001"],
        ["0.10000000000000000001", "0.10000000000000000002"],
        ["Jan 2023", "Feb 2023"],
        ["2022Q4", "2023Q1"],
        ["31/12/2022", "01/02/2023"],
    ],
)
def test_times_keep_all_their_digits(times, tmp_path):
    path = tmp_path / "s.csv"
    for rows in ((0, 1), (1, 0)):
        path.write_text("id;t;x\n" + "".join(f"a;{times[row]};{row}\n" for row in rows))
        assert read_series_file(path, columns=SeriesColumns(case="id", time="t")).sequences[0].tolist() == [
            [0],
            [1],
        ]


def test_times_whose_order_is_not_clear_are_refused(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("id;t;x\na;05/01/2023;1\na;04/02/2023;2\n")
    with pytest.raises(InputError, match="can be read in two orders"):
        read_series_file(path, columns=SeriesColumns(case="id", time="t"))


@pytest.mark.parametrize(
    "kind", [pyarrow.timestamp("ns"), pyarrow.timestamp("ns", "UTC"), pyarrow.duration("ns")]
)
def test_times_of_parquet_have_nanoseconds(kind, tmp_path):
    moments = pyarrow.array([1711846200000000002, 1711846200000000000, 1711846200000000001]).cast(kind)
    table = {"id": moments, "t": moments, "x": [2.0, 0.0, 1.0], "one": ["a"] * 3}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "s.parquet")
    columns = SeriesColumns(case="one", time="t", channels=["x"])
    assert read_series_file(tmp_path / "s.parquet", columns=columns).sequences[0].tolist() == [[0], [1], [2]]
    columns = SeriesColumns(layout="long", case="id", channels=["x"])
    assert len(set(read_series_file(tmp_path / "s.parquet", columns=columns).cases)) == 3


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([2**53 + 1, 2**62, None]),
        pyarrow.array([2**64 - 1, 0, None], pyarrow.uint64()),
        pyarrow.array([True, False, None]),
        pyarrow.array([1.5, -2, None], pyarrow.float32()),
        pyarrow.array(["1.25", "3", None]).cast(pyarrow.decimal128(9, 3)),
        pyarrow.array([7, 8, None]).dictionary_encode(),
    ],
    ids=lambda values: str(values.type),
)
def test_numbers_of_parquet_are_those_of_csv(values, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"u0": [1.0] * 3, "u1": values}), tmp_path / "s.parquet")
    cells = [0 if cell is False else 1 if cell is True else cell for cell in values.to_pylist()]
    write_csv(tmp_path / "s.csv", ["u0", "u1"], [[1.0, cell] for cell in cells])
    found, expected = (read_series_file(tmp_path / f"s.{end}").sequences for end in ("parquet", "csv"))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_channels_of_a_test_file_are_found_by_their_names(tmp_path):
    rows = [f"{i},{-i},{10 * i},{'ab'[i % 2]}" for i in range(8)]
    (tmp_path / "train.csv").write_text("x0,y0,z0,target\n" + "\n".join(rows))
    (tmp_path / "test.csv").write_text("y0,z0,x0,target\n-1,10,1,a\n-2,20,2,b\n")
    data = load_series_files(str(tmp_path / "train.csv"), test_file=str(tmp_path / "test.csv"))
    assert data.channel_names == ("x", "y", "z")
    assert [sequence.tolist() for sequence in data.test.sequences] == [[[1, -1, 10]], [[2, -2, 20]]]


def test_wide_tables_have_many_columns(tmp_path):
    path = tmp_path / "wide.csv"
    names = [f"x{step}" for step in range(30000)]
    path.write_text(",".join(names) + "\n" + ",".join(map(str, range(30000))) + "\n")
    start = process_time()
    assert read_series_file(path).sequences[0][:, 0].tolist() == list(range(30000))
    assert process_time() - start < 8  # with a list of the names before each it took a minute


@pytest.mark.parametrize("index", ["", "__index_level_0__"])
def test_the_index_of_a_frame_is_no_channel(index, tmp_path):
    rows = [[i, i // 2, float(i), 2.0 * i] for i in range(6)]
    long = write_parquet(tmp_path / "long.parquet", [index, "id", "x", "y"], rows)
    found = read_series_file(long, columns=SeriesColumns(layout="long", case="id"))
    assert (found.channels, found.cases) == (["x", "y"], ["0", "1", "2"])
    wide = write_parquet(tmp_path / "wide.parquet", ["x0", "x1", index], [[1.0, 2.0, 7], [3.0, 4.0, 8]])
    assert read_series_file(wide).cases == ["7", "8"]
