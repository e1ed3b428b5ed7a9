"""The figures of tables follow from the answers in the records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from evidence.conftest import attack_entry, corruption_entry

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.comparison import Measurement, compare_rows, spread
from kernel_attention_lab.evidence.robustness import (
    attack_curves,
    corruption_figures,
    relative_corruption_errors,
    robustness_columns,
    variant_columns,
)
from kernel_attention_lab.evidence.statistics import holm, paired_bootstrap, sign_flip_test
from kernel_attention_lab.packing import pack_bits, pack_levels
from kernel_attention_lab.robustness import detection_figures, score_levels


def answers(accuracy, cases=40, seed=0):
    return np.random.default_rng(seed).random(cases) < accuracy


def measured(*rows):
    """Seeds 0, 1, .. with these answers."""
    return {seed: Measurement(float(row.mean()), row[None]) for seed, row in enumerate(rows)}


def test_the_spread_is_over_the_seeds_that_are_there():
    values = {2: Measurement(0.5), 0: Measurement(0.3), 7: Measurement(0.4)}
    assert spread(values) == (pytest.approx(0.4), pytest.approx(0.1), (0, 2, 7))
    assert spread({4: Measurement(0.5)}) == (0.5, None, (4,))


def test_a_comparison_is_the_tests_on_common_seeds():
    ours = [answers(0.6, seed=seed) for seed in range(3)]
    theirs = [answers(0.4, seed=seed) for seed in range(5, 7)]
    (found,) = compare_rows({"a": {"fgsm": measured(*ours)}, "b": {"fgsm": measured(*theirs)}}, {"a": "b"})
    first, second = np.stack(ours[:2]), np.stack(theirs)
    assert (found.row, found.baseline, found.column, found.seeds) == ("a", "b", "fgsm", (0, 1))
    assert found.p_value == found.adjusted == sign_flip_test(first, second)
    assert found.interval == paired_bootstrap(first, second)
    assert found.by_seed == {seed: sign_flip_test(first[seed], second[seed]) for seed in (0, 1)}


def test_the_adjustment_is_over_all_comparisons():
    table = {
        name: {column: measured(answers(accuracy, seed=number)) for number, column in enumerate("xyz")}
        for name, accuracy in {"base": 0.3, "a": 0.5, "b": 0.8}.items()
    }
    found = compare_rows(table, {"a": "base", "b": "base"})
    assert [(each.row, each.column) for each in found] == [(row, column) for row in "ab" for column in "xyz"]
    assert [each.adjusted for each in found] == holm([each.p_value for each in found])
    assert compare_rows(table, {"a": "absent"}) == []
    several = compare_rows(table, {"b": ["base", "a"]})
    assert [(each.baseline, each.column) for each in several] == [
        (row, at) for row in ("base", "a") for at in "xyz"
    ]
    assert [each.interval for each in several[:3]] == [each.interval for each in found[3:]]


def test_what_cannot_be_compared_is_left_out():
    bare = {0: Measurement(0.5)}
    table = {"a": {"aupr": bare, "fgsm": measured(answers(0.5))}, "b": {"aupr": bare}}
    assert compare_rows(table, {"a": "b"}) == []


def test_other_cases_cannot_be_compared():
    table = {"a": {"x": measured(answers(0.5, 40))}, "b": {"x": measured(answers(0.5, 48))}}
    with pytest.raises(InputError, match=r"a and b in x: measured on different cases, \(1, 40\), \(1, 48\)"):
        compare_rows(table, {"a": "b"})


def test_the_plain_attack_on_the_most_images_is_the_column(make_record):
    clean, fgsm = answers(0.7, 64), answers(0.5, 64, seed=1)
    record = make_record(
        "softmax",
        3,
        attacks=[
            attack_entry("clean", clean, eps=None),
            attack_entry("fgsm", fgsm[:16]),
            attack_entry("fgsm", fgsm),
            attack_entry("fgsm", fgsm[:32]),
            attack_entry("fgsm", answers(0.2, 64), eps=2 / 255),
            attack_entry("fgsm", answers(0.1, 64), protocol="paper"),
            attack_entry("fgsm", answers(0.1, 128), transferred=True),
            attack_entry("pgd", answers(0.1, 128), options={"restarts": 5}),
            attack_entry("pgd", answers(0.1, 128), options={"restarts": 1, "gradient": "smooth"}),
        ],
        out_of_distribution={"aupr": 0.4},
    )
    (row,) = robustness_columns([record]).values()
    assert set(row) == {"test", "clean", "fgsm", "aupr"}
    np.testing.assert_array_equal(row["clean"][3].correct, [clean])
    np.testing.assert_array_equal(row["fgsm"][3].correct, [fgsm])
    assert row["aupr"][3].value == 0.4
    assert row["aupr"][3].correct is None
    paper = robustness_columns([record], protocol="paper")["softmax"]
    assert set(paper) == {"test", "fgsm", "aupr"}
    others = variant_columns([record])["softmax"]
    assert set(others) == {"FGSM, transferred", "PGD, 5 restarts", "PGD, smooth gradient"}
    curve = attack_curves([record], "pixel", "fgsm")["softmax"]
    assert list(curve) == [1 / 255, 2 / 255]
    assert curve[2 / 255][3].value == answers(0.2, 64).mean()


def test_corruptions_are_trials_of_a_case(make_record):
    correct = {name: np.stack([answers(0.5, 30, seed) for seed in range(5)]) for name in ("fog", "snow")}
    record = make_record("softmax", 0, corruptions=corruption_entry(correct))
    found = robustness_columns([record])["softmax"]["corruptions"][0]
    np.testing.assert_array_equal(found.correct, np.concatenate([correct["fog"], correct["snow"]]))
    assert found.value == pytest.approx(found.correct.mean())


def test_corruption_errors_are_relative_to_the_baseline_of_the_same_seed(make_record):
    def record(label, seed, fog, snow):
        """Errors in quarters of four images."""
        rows = {name: np.arange(4) >= wrong for name, wrong in {"fog": fog, "snow": snow}.items()}
        return make_record(
            label, seed, corruptions=corruption_entry({k: np.tile(v, (5, 1)) for k, v in rows.items()})
        )

    records = [record("a", 0, 1, 3), record("b", 0, 2, 2), record("a", 1, 1, 1), record("b", 2, 4, 4)]
    found = relative_corruption_errors(records, {"a": "b"})
    assert {seed: each.value for seed, each in found["a"].items()} == {0: pytest.approx((0.5 + 1.5) / 2)}
    assert {seed: each.value for seed, each in found["b"].items()} == {0: 1.0, 2: 1.0}


def detected(seed, shift=0.0, cases=(300, 200)):
    """The entry of detection of an imaginary model, with levels."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(0, 1, cases[0]), generator.normal(0.3 + shift, 1, cases[1])
    texts = [pack_levels(levels) for levels in score_levels(*scores)]
    sizes = {"in_cases": cases[0], "out_cases": cases[1]}
    return detection_figures(*scores) | sizes | {"levels": dict(zip(("in", "out"), texts, strict=True))}


def test_detection_is_compared_by_the_levels_of_scores(make_record):
    records = [make_record("a", seed, out_of_distribution=detected(seed, 1.0)) for seed in (0, 1)]
    records += [make_record("b", seed, out_of_distribution=detected(seed + 7)) for seed in (0, 1)]
    columns = {row: {"aupr": found["aupr"]} for row, found in robustness_columns(records).items()}
    (found,) = compare_rows(columns, {"a": "b"})
    exact = [record.figures["robustness"]["out_of_distribution"]["aupr"] for record in records]
    # 500 images in 64 levels: the lowest holds 16 of them, 3 % of the area at most.
    assert found.interval.difference == pytest.approx(np.mean(exact[:2]) - np.mean(exact[2:]), abs=0.01)
    assert found.interval.low > 0
    assert found.p_value < 1e-4
    assert found.by_seed == {}
    other = make_record("b", 0, out_of_distribution=detected(3, cases=(300, 199)))
    with pytest.raises(InputError, match=r"on different cases, \(300, 199\), \(300, 200\)"):
        compare_rows(robustness_columns([records[0], other]), {"a": "b"})


def test_records_without_levels_have_no_paired_test(make_record):
    old = {key: value for key, value in detected(0).items() if key != "levels"}
    records = [
        make_record("a", 0, out_of_distribution=old),
        make_record("b", 0, out_of_distribution=detected(1)),
    ]
    assert compare_rows(robustness_columns(records), {"a": "b"}) == []


def test_mean_corruption_errors_are_compared_image_by_image(make_record):
    rng = np.random.default_rng(0)
    hard = rng.random(80)
    corrupted = {
        (row, seed): {name: rng.random((5, 80)) > hard * share for name in ("fog", "snow")}
        for row, share in (("a", 0.5), ("b", 1.0))
        for seed in (0, 1)
    }
    records = [
        make_record(row, seed, corruptions=corruption_entry(correct))
        for (row, seed), correct in corrupted.items()
    ]
    columns = {row: {"mce": cells} for row, cells in corruption_figures(records).items()}
    (found,) = compare_rows(columns, {"a": "b"})
    ratios = relative_corruption_errors(records, {"a": "b"})["a"]
    expected = np.mean([each.value for each in ratios.values()]) - 1
    assert found.interval.difference == pytest.approx(expected, rel=1e-12)
    assert found.interval.low < expected < found.interval.high < 0
    assert found.p_value < 1e-3
    assert compare_rows(columns, {"a": "a"})[0].p_value == 1


def test_the_test_split_is_compared_where_its_answers_are_kept(make_record):
    def with_answers(row, accuracy):
        correct = answers(accuracy, 60, seed=len(row))
        figures = {"accuracy": float(correct.mean()), "cases": 60, "correct_bits": pack_bits(correct)}
        return replace(make_record(row, 0), figures={"evaluation": figures})

    records = [with_answers("a", 0.9), with_answers("bb", 0.2)]
    (found,) = compare_rows(robustness_columns(records), {"a": "bb"})
    assert (found.column, found.by_seed[0]) == ("test", found.p_value)
    assert compare_rows(robustness_columns([records[0], make_record("bb", 0)]), {"a": "bb"}) == []


def test_records_of_different_images_are_refused(make_record):
    first = make_record("a", 0, images={"split": "test"})
    other = make_record("b", 0, images={"split": "train"})
    with pytest.raises(InputError, match=r"a-0\.json and b-0\.json were attacked on different images"):
        robustness_columns([first, other])
    robustness_columns([first, make_record("b", 0)])
