"""The tables and the diagram of docs/time-series.md follow from records in results/series."""

from __future__ import annotations

import importlib.util
import inspect
import json
from pathlib import Path

from declared import draw, rows_of

ROOT = Path(__file__).parents[2]
FIGURE = Path("docs/figures/ranks-series.svg")
PAGE = "docs/time-series.md"


SETS = (
    "ArticularyWordRecognition", "BasicMotions", "FingerMovements", "Handwriting", "JapaneseVowels", "LSST",
    "SelfRegulationSCP1", "SpokenArabicDigits", "UWaveGestureLibrary", "AtrialFibrillation", "StandWalkJump",
)  # fmt: skip


def write(root, name, accuracies, left_out=()):
    """Records with this accuracy of every classifier and seed, a little different for each set."""
    path = root / "results" / "series" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "dataset": data, "classifier": classifier, "number": seed, "accuracy": accuracy + index / 1000,
            "log_loss": 0.5, "calibration_error": 0.1, "fit_seconds": 12.0, "predict_seconds": 1.0,
        }
        for classifier, by_seed in accuracies.items()
        for seed, accuracy in enumerate(by_seed)
        for index, data in enumerate(SETS)
        if (classifier, data, seed) not in left_out
    ]  # fmt: skip
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def by_name(lines):
    """The cells of a table's rows, by the first cell."""
    return {row[0]: row[1:] for row in rows_of(lines)}


def test_seeds_have_a_mean_and_a_deviation(tmp_path):
    write(tmp_path, "test", {"ours": [0.80, 0.82, 0.84], "dtw": [0.7]})
    lines = draw(PAGE, tmp_path)[0]["series-test"]
    rows = by_name(lines)
    assert rows["ours"][0] == "82.0 ± 2.0"
    assert rows["ours"][11] == "82.4 ± 2.0"  # the mean over nine sets, 0.0 to 0.8 higher
    assert rows["dtw"][0] == "70.0"
    assert lines[-2] == "Mean ± standard deviation over seeds. ours: 3 seeds; dtw: one seed."


def test_one_seed_has_no_deviation(tmp_path):
    write(tmp_path, "test", {"ours": [0.80], "dtw": [0.7]})
    lines = draw(PAGE, tmp_path)[0]["series-test"]
    assert "±" not in "".join(lines)
    assert lines[-2] == "dtw, ours: one seed."


def test_a_seed_that_lacks_a_set_is_told(tmp_path):
    write(tmp_path, "test", {"ours": [0.80, 0.84]}, left_out={("ours", "LSST", 1)})
    lines = draw(PAGE, tmp_path)[0]["series-test"]
    assert by_name(lines)["ours"][11] == "82.2"  # the mean of the sets' means; no deviation of it
    assert lines[-2].endswith("ours: 1 to 2 seeds.")


def test_published_figures_stand_last_with_their_source(tmp_path):
    write(tmp_path, "test", {"ours": [0.80]})
    whole = dict.fromkeys(SETS, 0.9)
    reports = {
        "theirs": {"source": "a paper, table 3", "accuracy": whole},
        "partial": {"source": "a page", "accuracy": {"LSST": 0.95}},
        "of other sets": {"source": "a book", "accuracy": {"Coffee": 1.0}},
    }
    path = tmp_path / "results/reported/series_classifiers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(reports))
    lines = draw(PAGE, tmp_path)[0]["series-test"]
    rows = by_name(lines)
    assert list(rows) == ["classifier", "ours", "theirs \\*", "partial \\*"]
    assert rows["theirs \\*"][11:] == ["90.0", "–", "–", "–"]
    assert rows["partial \\*"][5] == "95.0"
    assert rows["partial \\*"][11] == "–"
    assert "theirs: a paper, table 3. partial: a page." in lines[-2]


def test_three_classifiers_have_a_diagram_of_their_ranks(tmp_path):
    accuracies = {"ours": [0.9], "second": [0.8], "third": [0.7], "short": [0.6]}
    write(tmp_path, "test", accuracies, left_out={("short", "LSST", 0)})
    regions, figures = draw(PAGE, tmp_path)
    svg = figures[FIGURE]
    assert all(f"<!-- {name}" in svg for name in ("ours", "second", "third"))
    assert "<!-- short" not in svg
    assert "figures/ranks-series.svg" in regions["series-ranks"][1]


def test_two_classifiers_have_none(tmp_path):
    write(tmp_path, "test", {"ours": [0.9], "second": [0.8]})
    regions, figures = draw(PAGE, tmp_path)
    assert FIGURE not in figures
    assert regions["series-ranks"][1].endswith("needs 3 classifiers with every set.")


def test_the_ablation_has_its_table(tmp_path):
    write(tmp_path, "ablation", {"whole": [0.80, 0.82], "without positions": [0.78, 0.8]})
    rows = by_name(draw(PAGE, tmp_path)[0]["series-ablation"])
    assert list(rows) == ["classifier", "whole", "without positions"]
    assert rows["whole"][0] == "81.0"  # folds are no repetitions, and have no deviation
    assert rows["classifier"][-1] == "p against whole"
    # A difference of one sign on all nine sets: 2 of the 2^9 assignments of signs are as far from the mean.
    assert rows["without positions"][-1] == f"{2 / 2**9:.2g}"


def test_the_ablation_switches_off_what_the_defaults_have():
    """Every part is a parameter of four members alone, which have another value of it."""
    from kernel_attention.estimators import AttentionClassifier

    path = ROOT / "benchmarks" / "series_classifiers.py"
    spec = importlib.util.spec_from_file_location("series_classifiers", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    defaults = inspect.signature(AttentionClassifier).parameters
    assert script.ABLATION["whole"] == {}
    for name, changes in script.ABLATION.items():
        assert len(changes) == (name != "whole")
        whole = {key: script.MEMBERS.get(key, defaults[key].default) for key in changes}
        assert all(whole[key] != value for key, value in changes.items())
