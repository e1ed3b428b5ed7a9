"""Series from files: what is read fits an estimator as it is, and what cannot be read names its place."""

import doctest
import re
import sys

import numpy as np
import pytest

import kernel_attention as ka
from kernel_attention.errors import InputError
from kernel_attention.series.files import reading

LONG = "who,t,left,right,kind\na,1,3,4,slow\na,0,1,2,slow\nb,0,5,6,fast\nb,1,,8,fast\n"
ROLES = {"case_column": "who", "time_column": "t", "target_column": "kind"}


def test_the_example_of_read_series_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder().find(ka.read_series, globs={"Path": reading.Path})
    assert not doctest.DocTestRunner().run(example).failed


def test_a_wide_table_is_the_long_one(tmp_path):
    (tmp_path / "long.csv").write_text(LONG)
    wide = "who,left_0,left_1,right_0,right_1,kind\na,1,3,2,4,slow\nb,5,,6,8,fast\n"
    (tmp_path / "wide.csv").write_text(wide)
    long = ka.read_series(tmp_path / "long.csv", **ROLES)
    wide = ka.read_series(tmp_path / "wide.csv", case_column="who", target_column="kind")
    np.testing.assert_array_equal(long.X, wide.X)
    assert (long.y.tolist(), long.cases, long.channels) == (wide.y.tolist(), wide.cases, wide.channels)


def test_series_of_a_file_train_a_classifier_and_those_of_another_are_predicted(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        f"{case},{t},{rng.normal() + 3 * (case % 2):.3f},{'uv'[case % 2]}"
        for case in range(12)
        for t in range(5 + case % 3)
    ]
    (tmp_path / "train.csv").write_text("case,t,x,target\n" + "\n".join(rows))
    (tmp_path / "new.csv").write_text("case,t,x,target\n" + "".join(f"7,{t},3.1,\n" for t in range(5)))
    roles = {"case_column": "case", "time_column": "t"}
    train = ka.read_series(tmp_path / "train.csv", **roles)
    new = ka.read_series(tmp_path / "new.csv", **roles, reads_target=False)
    assert (new.y, new.channels) == (None, ["x"])
    clf = ka.AttentionClassifier(closed_form=False, epochs=1, embed_dim=8, random_state=0)
    assert clf.fit(train.X, train.y).predict(new.X)[0] in ("u", "v")


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2"], np.array([1, -2])),
        (["0.5", "2"], np.array([0.5, 2.0])),
        (["01", "02"], np.array(["01", "02"])),
        (["a", "2"], np.array(["a", "2"])),
    ],
)
def test_labels_keep_what_they_say(cells, expected, tmp_path):
    (tmp_path / "s.csv").write_text("x0,target\n" + "".join(f"1,{cell}\n" for cell in cells))
    y = ka.read_series(tmp_path / "s.csv").y
    assert y.dtype.kind == expected.dtype.kind
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**ROLES, "target_column": "kin"}, "no column 'kin'; did you mean 'kind'"),
        ({**ROLES, "time_column": "left"}, "s.csv, line 5: column 'left' is empty"),
        ({**ROLES, "channel_columns": "left"}, "channel_columns='left' must be a list of names"),
        ({**ROLES, "layout": "tall"}, "unknown layout 'tall' (accepted: auto, long, wide)"),
        ({"target_column": "kind"}, "Then give layout: long, case_column and time_column"),
    ],
)
def test_columns_that_the_file_does_not_have_so_are_refused(options, message, tmp_path):
    (tmp_path / "s.csv").write_text(LONG)
    with pytest.raises(InputError, match=re.escape(message)):
        ka.read_series(tmp_path / "s.csv", **options)


def test_a_long_frame_given_to_fit_hears_of_read_series():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"who": ["a", "a", "b"], "t": [0, 1, 0], "x": [1.0, 2.0, 3.0]})
    with pytest.raises(InputError, match=r"column 'who' .*set_index\(\[case, time\]\).*read_series"):
        ka.AttentionClassifier().fit(frame, [0, 0, 1])


def test_a_parquet_file_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "s.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"s\.parquet needs pyarrow, .*'kernel-attention\[parquet\]'"):
        ka.read_series(tmp_path / "s.parquet")
