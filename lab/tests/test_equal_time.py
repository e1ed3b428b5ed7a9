"""The page of equal times is what the records say; the suites' models can be trained."""

from __future__ import annotations

from pathlib import Path

from declared import NOT_YET, draw, rows_of
from suite_records import suite_record

from kernel_attention_lab.evidence import Cell, Places, ResultRecord, read_suite, write_records
from kernel_attention_lab.evidence.findings import suite_records

ROOT = Path(__file__).parents[2]
PAGE = "docs/equal-time.md"
SUITE, SEARCH = read_suite("equal_time"), read_suite("equal_time_search")


def record(suite, row, column, seed, course, accuracy=0.5, learnt=None) -> ResultRecord:
    """``learnt``: the accuracies on the training batches, which older records lack."""
    seconds, values = zip(*course, strict=True)
    return suite_record(
        suite,
        row,
        column,
        seed,
        budget={"steps": 100 * len(course), "seconds": 3000.0, "threads": 1},
        figures={
            "evaluation": {"accuracy": accuracy, "cases": 2000},
            "course": {
                "step": [100 * (at + 1) for at in range(len(course))],
                "training_seconds": list(seconds),
                "val_accuracy": list(values),
                **({"train_accuracy": learnt} if learnt else {}),
            },
        },
    )


def write(root, suite, column, *records):
    write_records(records, root / "results" / suite.records / column)


def rate_of(row: str, column: str) -> str:
    """The learning rate of the suite."""
    return f"{SUITE.recipe(Cell(row, column, 0))[1].learning_rate:g}"


def test_the_accuracy_within_a_time_is_the_best_so_far(tmp_path):
    """40 minutes: columns at 5, 10, 20 and 40; the last evaluation may come after the end.

    The shortest training has 200 steps, and a column too.
    """
    softmax = [(500.0, 0.2), (1100.0, 0.35), (1900.0, 0.3), (2450.0, 0.4)]
    write(
        tmp_path, SUITE, "Image", record(SUITE, "softmax", "Image", 0, softmax, 0.39),
        record(SUITE, "softmax", "Image", 1, [(250.0, 0.1), (2400.0, 0.5)], 0.41, [0.9, 0.6]),
        record(SUITE, "linear", "Image", 0, [(100.0, 0.3), (2401.0, 0.2)], 0.28),
    )  # fmt: skip
    regions, figures = draw(PAGE, tmp_path)
    head, *rows = rows_of(regions["equal-time-image"])
    assert head[4:] == [
        "validation, 5 min",
        "validation, 10 min",
        "validation, 20 min",
        "validation, 40 min",
        "validation, 200 steps",
        "training, at the end",
        "test",
    ]
    assert rows[0] == [
        "`softmax`", "2", rate_of("softmax", "Image"), "200 to 400",
        "10.0 (seed 1)", "15.0 ± 7.1", "22.5 ± 17.7", "45.0 ± 7.1", "42.5 ± 10.6", "60.0 (seed 1)",
        "40.0 ± 1.4",
    ]  # fmt: skip
    assert rows[1] == [
        "`linear`", "1", rate_of("linear", "Image"), "200", "30.0", "30.0", "30.0", "30.0", "30.0", "",
        "28.0",
    ]  # fmt: skip
    (path, svg), = figures.items()  # fmt: skip
    assert path.name == "equal-time-image.svg"
    assert svg.startswith("<?xml")
    assert regions["equal-time-text"] == NOT_YET


def test_the_search_chooses_the_best_rate_of_those_that_were_all_tried(tmp_path):
    found = {"0.0003": 0.2, "0.001": 0.3, "0.003": 0.25}
    for rate, value in found.items():
        write(tmp_path, SEARCH, "Text", record(SEARCH, f"softmax_{rate}", "Text", 0, [(240.0, value)]))
    write(tmp_path, SEARCH, "Text", record(SEARCH, "linear_0.003", "Text", 0, [(100.0, 0.6), (240.0, 0.1)]))
    for rate, value in zip(found, (0.5, 0.6, 0.7), strict=True):
        write(tmp_path, SEARCH, "Text", record(SEARCH, f"primal_{rate}", "Text", 0, [(240.0, value)]))
    lines = draw(PAGE, tmp_path)[0]["equal-time-search"]
    assert rows_of(lines) == [
        ["task", "attention", "0.0003", "0.001", "0.003"],
        ["Text", "`softmax`", "20.0", "**30.0**", "25.0"],
        ["Text", "`primal`", "50.0", "60.0", "**70.0**"],
        ["Text", "`linear`", "", "", "60.0"],
    ]


# First trained before the search, which the page says, and how little these rates differ.
KEPT = {("primal_last_layer", "Text"): 0.0003, ("primal_last_layer", "ListOps-100"): 0.003}


def test_the_suite_has_the_rates_that_the_search_chose():
    """Of the records in this repository; without any there is nothing to choose."""
    tried = suite_records(SEARCH, Places(ROOT / "runs", ROOT / "results"))
    found: dict[tuple[str, str], dict[float, float]] = {}
    for name, cells in tried.items():
        row, _, rate = name.rpartition("_")
        for column, (record,) in ((column, each.values()) for column, each in cells.items()):
            found.setdefault((row, column), {})[float(rate)] = record.single_figures[SEARCH.metric]
    differing = {}
    for (row, column), by_rate in found.items():
        own, best = float(rate_of(row, column)), max(by_rate.values())
        if len(by_rate) == 3 and by_rate[own] < best:
            differing[row, column] = next(rate for rate, value in by_rate.items() if value == best)
    assert differing == KEPT
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    said = ", ".join(f"`{row}` on {column} ({rate:g})" for (row, column), rate in KEPT.items())
    assert f"The suite does not have the rate that the search chose for {said}." in page


def test_search_and_suite_differ_in_time_evaluations_and_rate_alone():
    for cell in SEARCH.cells():
        row, rate = cell.row.rsplit("_", 1)
        searched = SEARCH.recipe(cell)[1].keys()
        kept = SUITE.recipe(Cell(row, cell.column, 0))[1].keys()
        differing = {key for key in searched if searched[key] != kept[key]}
        assert differing <= {"max_seconds", "evaluate_every", "evaluation_cases", "learning_rate"}
        assert searched["learning_rate"] == float(rate)
