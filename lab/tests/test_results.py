"""The pages of results are what the records say, and their tables say what was measured."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkout import ROOT
from declared import NOT_YET, draw, rows_of
from evidence.conftest import attack_entry, corruption_entry, make_record  # noqa: F401

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import write_records
from kernel_attention_lab.evidence.pages import write_pages
from kernel_attention_lab.evidence.tables import draw_table
from kernel_attention_lab.robustness import CORRUPTIONS

PAGE, RECORDS = "docs/robustness-results.md", "results/vision/cifar10_robustness"
FIGURE = Path("docs/figures/robustness-curves.svg")


@pytest.fixture
def root(tmp_path, make_record):  # noqa: F811
    """A root with records of unfinished rows: softmax has two seeds, symmetric and rpc have one of them."""

    def right(count, cases=40):
        return np.arange(cases) < count

    def corrupted(count):
        return corruption_entry({name: np.tile(right(count, 20), (5, 1)) for name in CORRUPTIONS})

    def record(label, seed, clean, fgsm, corruptions, curve=()):
        attacks = [attack_entry("clean", right(clean), eps=None), attack_entry("fgsm", right(fgsm))]
        attacks += [attack_entry("pgd", right(fgsm - 2), options={"restarts": 5, "gradient": "exact"})]
        attacks += [attack_entry("fgsm", right(count), eps=(2 + at) / 255) for at, count in enumerate(curve)]
        attacks += [attack_entry("pgd", right(count), eps=(1 + at) / 255, protocol="paper")
                    for at, count in enumerate(curve)]  # fmt: skip
        warnings = ["square breaks more than pgd"] if label == "symmetric" else []
        return make_record(
            label, seed, warnings=warnings, attacks=attacks, corruptions=corrupted(corruptions),
            out_of_distribution={"aupr": 0.25 + seed / 100},
        )  # fmt: skip

    records = [
        record("softmax", 0, 30, 10, 10, curve=(8, 4)),
        record("softmax", 1, 32, 12, 12),
        record("symmetric", 1, 31, 3, 16),
        record("rpc_first_layer", 1, 32, 24, 18),
    ]
    write_records(records, tmp_path / RECORDS)
    shutil.copytree(ROOT / "results/reported", tmp_path / "results/reported")
    return tmp_path


def cells(lines: list[str], row: str) -> list[str]:
    """The cells of a row of a table."""
    (line,) = (line for line in lines if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_committed_pages_are_those_that_make_results_writes(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    code = write_pages(["--check"])
    assert (code, capsys.readouterr().out) == (0, "")


def test_no_verdict_on_rows_of_a_suite_is_written_by_hand():
    """The tests' verdicts stand between marks, where they follow from the records."""
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    by_hand = re.sub(r"<!-- ([\w-]+): begin.*?<!-- \1: end -->", "", page, flags=re.DOTALL)
    words = r"[^.]*(?:\b(?:better|worse) than\b|\bis worse\b|found to be|o difference[^.]* found)[^.]*\."
    assert re.findall(words, by_hand) == []


def test_the_robustness_table(root):
    lines = draw(PAGE, root)[0]["robustness"]
    assert "4 models, 900 s of training each, x86_64, 2 cores" in lines[1]
    assert "Test images: 20 for corrupted; 40 for clean, FGSM." in lines[1]
    assert cells(lines, "attention") == [
        "seeds",
        "test split",
        "clean",
        "FGSM",
        "corrupted",
        "mCE / baseline",
        "AUPR",
    ]
    assert cells(lines, "softmax") == [
        "2",
        "60.0 ± 0.0",
        "77.5 ± 3.5",
        "27.5 ± 3.5",
        "55.0 ± 7.1",
        "100.0 ± 0.0",
        "25.5 ± 0.7",
    ]
    # Against softmax with seed 1: 4 of 20 images wrong instead of 8.
    assert cells(lines, "symmetric") == ["1", "60.0", "77.5", "7.5 ↓", "80.0", "50.0", "26.0"]
    # Against symmetric: 21 of 40 images more under FGSM, p = 2^-20; 2 of 20 wrong instead of 4.
    rpc = cells(lines, "rpc, 4 iterations, first layer")
    assert rpc == ["1", "60.0", "80.0", "60.0 ↑", "90.0", "50.0", "26.0"]


def test_the_differences(root):
    lines = draw(PAGE, root)[0]["comparisons"]
    rows = rows_of(lines)[1:]
    columns = ["test split", "clean", "FGSM", "corrupted", "mCE / baseline", "AUPR"]
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        (label, baseline, column, "1")
        for label, baseline in (("symmetric", "softmax"), ("rpc, 4 iterations, first layer", "symmetric"))
        for column in columns
    ]
    by_column = {(row[0], row[2]): row[4:] for row in rows}
    # 9 of 40 images right only for softmax: p = 2^-8, times 7 that are left after the smallest.
    fgsm = by_column["symmetric", "FGSM"]
    assert (fgsm[0], *fgsm[2:]) == ("−22.5", "0.0039", "0.027", "0.0039")
    fgsm = by_column["rpc, 4 iterations, first layer", "FGSM"]
    assert (fgsm[0], *fgsm[2:]) == ("+52.5", "< 0.0001", "< 0.0001", "< 0.0001")
    assert by_column["symmetric", "corrupted"][4] == "", "several trials of an image: no McNemar's test"
    # Half the errors of softmax under every corruption, in an interval that is below 1 throughout.
    mce = by_column["symmetric", "mCE / baseline"]
    assert mce[0] == "−50.0"
    assert "+" not in mce[1]
    assert float(mce[2]) < float(mce[3])
    untested = ["no paired test", "", "", ""]
    assert by_column["symmetric", "test split"] == ["+0.0", *untested]
    assert by_column["symmetric", "AUPR"] == ["+0.0", *untested]


def test_a_cell_says_which_seeds_it_has():
    row = [{"seed": seed, "value": seed / 10 + 0.5} for seed in (0, 1, 2)]
    spec = {"rows": "'row'", "columns": [{"title": "", "value": "value if seed in kept", "as": "spread .1p"}]}

    def cell(*kept: int) -> str:
        return draw_table(spec, [each | {"kept": kept} for each in row])[-1].strip("| ")

    assert cell(0, 2) == "60.0 ± 14.1 (seeds 0, 2)"
    assert cell(2) == "70.0 (seed 2)"
    assert cell() == ""


def test_the_other_tables(root):
    regions, figures = draw(PAGE, root)
    assert cells(regions["paper-protocol"], "softmax") == ["1", "20.0", "10.0"]
    assert cells(regions["paper-protocol"], "attention") == ["seeds", "PGD 1/255", "PGD 2/255"]
    corruptions = regions["corruptions"]
    assert cells(corruptions, "corruption")[:2] == ["softmax (2)", "symmetric (1)"]
    assert cells(corruptions, "gaussian noise") == ["55.0 ± 7.1", "80.0", "90.0"]
    assert len([line for line in corruptions if line.startswith("| ")]) == 16
    assert cells(regions["masking"], "attention") == ["seeds", "PGD, 5 restarts"]
    assert cells(regions["masking"], "symmetric") == ["1", "2.5"]
    assert regions["masking"][-2:] == ["* symmetric, seed 1: square breaks more than pgd.", ""]
    reported = cells(regions["reported"], "SymViT")
    assert reported[:3] == ["70.44", "23.38", "4.98"]
    (path, svg), = figures.items()  # fmt: skip
    assert path == FIGURE
    assert svg.startswith("<?xml")
    assert svg == draw(PAGE, root)[1][path], "the same records give the same file"
    assert path.name in "".join(regions["curves"])


@pytest.mark.parametrize(
    ("label", "key", "value"), [("scaled", "epochs", 20), ("softmax", "attention", "rpc")]
)
def test_records_of_other_recipes_are_refused(root, make_record, label, key, value):  # noqa: F811
    other = make_record(label, 7)
    other.config[key] = value
    write_records([other], root / RECORDS)
    with pytest.raises(InputError, match=rf"records .* and .* differ in {key}"):
        draw(PAGE, root)


def test_a_row_that_is_not_known_is_refused(root, make_record):  # noqa: F811
    write_records([make_record("rcp", 0)], root / RECORDS)
    with pytest.raises(InputError, match="suite cifar10_robustness has no row rcp"):
        draw(PAGE, root)


def test_the_page_says_first_what_the_comparisons_found(root):
    (_, line, _) = draw(PAGE, root, "found")[0]["found"]
    # The differences with arrows in the table of these records.
    assert "8 comparisons of 4 small vision transformers with their baselines found " in line
    assert "found *rpc, 4 iterations, first layer* (FGSM) better, *symmetric* (FGSM) worse. " in line
    assert "We have found no other difference so far." in line
    for name in ("rpc_first_layer-1", "symmetric-1"):
        (root / RECORDS / f"{name}.json").unlink()
    (_, line, _) = draw(PAGE, root, "found")[0]["found"]
    assert line == "On attacked and corrupted CIFAR-10 images nothing has been compared yet."


def timed(seconds: list[float], baseline: list[float]) -> dict[str, object]:
    low, middle, high = np.quantile(seconds, [0.25, 0.5, 0.75])
    ratios = np.quantile(np.divide(seconds, baseline), [0.25, 0.5, 0.75])
    named = dict(zip(("ratio_lower", "ratio_median", "ratio_upper"), map(float, ratios), strict=True))
    return {"seconds": seconds, "median": middle, "lower": low, "upper": high, **named}


def layer_record(plan: str, steps: dict[str, list[float]], lengths=(256, 4096)) -> dict[str, object]:
    """What ``kernel-attention bench`` writes of layers whose forward pass takes half of a step."""
    machine = {
        "processor": "A Processor", "cores": 2, "instructions": "AVX2", "torch": "2.13.0",
        "date": "2026-11-22T12:00:00+00:00", "revision": "0123456789abcdef", "load_before": [0.1, 0.1, 0.1],
        "load_after": [1.5, 1.0, 0.5],
    }  # fmt: skip
    baseline = steps["sdpa"]
    rows = [
        {
            "contender": name,
            "time": {
                "step": timed(own, baseline),
                "forward": timed([s / 2 for s in own], [s / 2 for s in baseline]),
            },
            "memory": {"step": 40e6 if name == "sdpa" else 10e6},
        }
        for name, own in steps.items()
    ]
    rows.append({"contender": "another library", "failed": "it broke"})
    setting = {"threads": 2, "embed_dim": 64, "num_heads": 2}
    cells = [{"setting": setting | {"length": n}, "rounds": 3, "rows": rows} for n in lengths]
    return {"machine": machine, "plan": {"title": plan, "baseline": "sdpa"}, "absent": [], "cells": cells}


def test_the_performance_tables_are_the_records(tmp_path):
    assert draw("docs/performance.md", tmp_path, "primal") == ({"primal": NOT_YET}, {})
    steps = {"sdpa": [0.3, 0.4, 0.5], "primal (rank 30, eta 0.1)": [0.02, 0.02, 0.01],
             "primal (rank 30, eta 0.1, impl native)": [0.01, 0.01, 0.01],
             "multilinear (eta 0.1)": [0.01, 0.01, 0.01]}  # fmt: skip
    folder = tmp_path / "results/benchmarks"
    folder.mkdir(parents=True)
    for name in ("primal", "multilinear"):
        (folder / f"{name}.json").write_text(json.dumps(layer_record(name, steps)), encoding="utf-8")
    regions, figures = draw("docs/performance.md", tmp_path)
    measured = {mark for mark, lines in regions.items() if lines != NOT_YET}
    assert measured == {
        "primal", "multilinear", "processors-primal", "processors-multilinear", "predicted"
    }  # fmt: skip
    assert figures[Path("docs/figures/time-against-length.svg")].count("<svg") == 1
    assert regions["primal"][1] == (
        "A Processor, 2 cores, AVX2, torch 2.13.0, 2026-11-22, revision 0123456, load 0.1 before and 1.5 "
        "after; threads 2; 3 rounds."
    )
    # The median of the rounds' own ratios, 0.02 / 0.4, and not the ratio of the medians.
    row = "| primal (rank 30, eta 0.1) | 4096 | 10.0 | 20.0 | 15.0–20.0 | 0.050 | 20.0 | 10.0 |"
    assert row in regions["primal"]
    assert len([line for line in regions["primal"] if line.startswith("| ")]) == 1 + 2 * len(steps)
    ((_, speed),) = [row[:2] for row in rows_of(draw("README.md", tmp_path, "numbers")[0]["numbers"])[1:]]
    assert speed == "**20.0 times as fast** in 0.25 of the memory, 40.0 times in C++"
