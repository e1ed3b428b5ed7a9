"""The primal-dual recipes and the suites of their variants: betas and factors are the tables'."""

from __future__ import annotations

import pytest

from kernel_attention_lab.evidence.suite import Cell, Suite, read_suite
from kernel_attention_lab.runs import list_recipes, read_recipe
from kernel_attention_lab.tasks import Recipe

FACTORS = [1, 1, 2, 2, 4, 4, 8, 8]
NAMES = [name for name in list_recipes() if name.startswith("primal_dual/")]
# Table 13: Attention-BN, Attention-BN+SH.
BETA = {
    "EthanolConcentration": (0.25, 0.15), "FaceDetection": (0.6, 0.6), "Handwriting": (0.65, 0.25),
    "Heartbeat": (0.55, 0.85), "JapaneseVowels": (0.6, 0.6), "PEMS-SF": (0.25, 0.35),
    "SelfRegulationSCP1": (0.5, 0.85), "SelfRegulationSCP2": (1.2, 0.9), "SpokenArabicDigits": (0.65, 0.6),
    "UWaveGestureLibrary": (0.1, 0.2), "ArticularyWordRecognition": (0.2, 0.6), "BasicMotions": (0.1, 0.1),
    "Epilepsy": (0.3, 0.2), "ERing": (0.1, 0.9), "FingerMovements": (1.0, 0.3), "Libras": (0.3, 0.7),
    "NATOPS": (1.0, 0.4), "RacketSports": (1.0, 0.4), "AtrialFibrillation": (0.9, 0.6), "Cricket": (0.2, 1.0),
    "StandWalkJump": (1.0, 0.6), "HandMovementDirection": (0.5, 0.5), "LSST": (0.3, 0.2),
    "DuckDuckGeese": (0.6, 0.3), "MotorImagery": (0.2, 0.3), "AppliancesEnergy": (0.4, 0.2),
    "BenzeneConcentration": (0.2, 0.1), "BeijingPM10Quality": (0.1, 0.5), "BeijingPM25Quality": (0.1, 0.2),
    "LiveFuelMoistureContent": (0.1, 0.3), "IEEEPPG": (0.4, 0.2),
}  # fmt: skip
# Table 12: linear BN, linear BN+SH, sparse BN, sparse BN+SH.
OTHER_KERNELS = {
    "EthanolConcentration": (0.15, 0.95, 0.8, 0.2), "FaceDetection": (0.6, 0.6, 0.6, 0.6),
    "Handwriting": (0.25, 0.3, 0.3, 0.3), "Heartbeat": (0.6, 0.15, 0.4, 0.5),
    "JapaneseVowels": (0.6, 0.6, 0.6, 0.6), "PEMS-SF": (0.35, 0.65, 0.5, 0.6),
    "SelfRegulationSCP1": (0.35, 0.25, 0.1, 0.9), "SelfRegulationSCP2": (0.75, 0.15, 0.5, 0.3),
    "SpokenArabicDigits": (0.6, 0.6, 0.6, 0.6), "UWaveGestureLibrary": (0.65, 0.55, 0.9, 0.3),
}  # fmt: skip


SUITES = ("primal_dual_uea", "primal_dual_uea_more", "primal_dual_regression")


def attention_of(suite: Suite, row: str, dataset: str) -> object:
    return suite.recipe(Cell(row, dataset, 0))[1].attention


def test_there_is_a_recipe_for_every_task_of_table_13():
    assert {read_recipe(name)[1]["dataset"] for name in NAMES} == set(BETA)
    assert len(NAMES) == len(BETA)


@pytest.mark.parametrize("name", NAMES)
def test_betas_and_factors_are_the_papers(name):
    recipe = Recipe(**read_recipe(name)[1])
    assert recipe.attention == {
        "batch_norm_scaled_heads": {"beta": BETA[recipe.dataset][1], "factors": FACTORS}
    }
    assert recipe.num_heads == 8


@pytest.mark.parametrize("suite", SUITES)
def test_the_suites_have_the_betas_of_table_13(suite):
    suite = read_suite(suite)
    for dataset in suite.columns:
        beta, beta_of_both = BETA[dataset]
        assert attention_of(suite, "softmax", dataset) == "softmax"
        assert attention_of(suite, "batch_norm", dataset) == {"batch_norm": {"beta": beta}}
        assert attention_of(suite, "scaled_heads", dataset) == {"scaled_heads": {"factors": FACTORS}}
        both = {"beta": beta_of_both, "factors": FACTORS}
        assert attention_of(suite, "batch_norm_scaled_heads", dataset) == {"batch_norm_scaled_heads": both}


@pytest.mark.parametrize(("kernel", "place"), [("linear", 0), ("sparse", 2)])
def test_the_suites_of_other_kernels_have_the_betas_of_table_12(kernel, place):
    suite = read_suite(f"primal_dual_uea_{kernel}")
    assert set(suite.columns) == set(OTHER_KERNELS)
    for dataset, betas in OTHER_KERNELS.items():
        beta, beta_of_both = betas[place : place + 2]
        assert attention_of(suite, kernel, dataset) == kernel
        norm = {"kernel": kernel, "beta": beta}
        assert attention_of(suite, "batch_norm", dataset) == {"batch_norm": norm}
        both = {"kernel": kernel, "beta": beta_of_both, "factors": FACTORS}
        assert attention_of(suite, "batch_norm_scaled_heads", dataset) == {"batch_norm_scaled_heads": both}
