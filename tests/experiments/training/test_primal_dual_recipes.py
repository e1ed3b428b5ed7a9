"""The primal-dual recipes: betas and factors are the tables', and every variant in a header builds."""

from __future__ import annotations

import re

import pytest
import yaml

from kernel_attention.experiments.training import Recipe, list_recipes, read_recipe
from kernel_attention.mechanisms import create_attention, layer_specs
from kernel_attention.mechanisms.support_vector.layer import SupportVectorAttention

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


def header(name: str) -> str:
    return "\n".join(
        line for line in list_recipes()[name].read_text("utf-8").splitlines() if line.startswith("#")
    )


def variants(name: str) -> dict[str, object]:
    """{what: attention} of the header's table."""
    rows = re.findall(r"^#   [\d.]+ ± [\d.]+ +(\S.*?)  +'?(\{.*\}|\w+)'?$", header(name), re.MULTILINE)
    return {what: yaml.safe_load(attention) for what, attention in rows}


def test_there_is_a_recipe_for_every_task_of_table_13():
    assert {read_recipe(name)[1]["dataset"] for name in NAMES} == set(BETA)
    assert len(NAMES) == len(BETA)


@pytest.mark.parametrize("name", NAMES)
def test_betas_and_factors_are_the_papers(name):
    recipe = Recipe(**read_recipe(name)[1])
    beta, beta_of_both = BETA[recipe.dataset]
    expected = {"beta": beta_of_both, "factors": [1, 1, 2, 2, 4, 4, 8, 8]}
    assert recipe.attention == {"batch_norm_scaled_heads": expected}
    assert recipe.num_heads == 8
    found = variants(name)
    assert found["Attention-BN"] == {"batch_norm": {"beta": beta}}
    for kernel, betas in zip(("linear", "sparse"), (slice(0, 2), slice(2, 4)), strict=True):
        if recipe.dataset in OTHER_KERNELS:
            beta, beta_of_both = OTHER_KERNELS[recipe.dataset][betas]
            title = kernel.capitalize()
            assert found[f"{title} Attention-BN"] == {"batch_norm": {"kernel": kernel, "beta": beta}}
            assert found[f"{title} Attention-BN+SH"] == {
                "batch_norm_scaled_heads": {"kernel": kernel, "beta": beta_of_both}
            }


@pytest.mark.parametrize("name", NAMES)
def test_the_header_names_its_command_and_variants_that_build(name):
    assert f"#   kernel-attention train {name} --protocol paper" in header(name)
    recipe = Recipe(**read_recipe(name)[1])
    for attention in (recipe.attention, *variants(name).values()):
        ((mechanism, options),) = layer_specs(attention, 1)
        layer = create_attention(mechanism, 16, recipe.num_heads, **options)
        if isinstance(layer, SupportVectorAttention) and "heads" in mechanism:
            assert layer.factors == (1, 1, 2, 2, 4, 4, 8, 8)
