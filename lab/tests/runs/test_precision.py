"""``precision: auto`` becomes what the processor multiplies fast, and what is slow is said."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import pytest
import torch
import yaml
from runs.small_runs import SMALL, train_small

from kernel_attention.training.processes import has_bfloat16, resolve_precision
from kernel_attention_lab.runs import list_recipes, read_recipe
from kernel_attention_lab.runs.launch import with_precision
from kernel_attention_lab.tasks import Recipe, make_recipe

CPUINFO = Path("/proc/cpuinfo")
LACKING = dict.fromkeys(("avx512_bf16", "amx_bf16", "avx512_f"), False)


@pytest.fixture(params=[None, "avx512_bf16", "amx_bf16"], ids=["without", "avx512", "amx"])
def processor(request, monkeypatch):
    """A processor with these instructions for bfloat16, or without any; whether it has some."""
    found = LACKING | ({request.param: True} if request.param else {})
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    return request.param is not None


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(), reason="the flags are those of Linux on x86"
)
def test_the_processor_is_asked():
    """Linux's own list of this processor's instructions says the same."""
    flags = CPUINFO.read_text().split()
    assert has_bfloat16(torch.device("cpu")) == ("avx512_bf16" in flags or "amx_bf16" in flags)


def test_auto_is_bfloat16_only_where_it_is_fast(processor):
    recipe = Recipe(**SMALL, precision="auto")
    assert resolve_precision(recipe) == ("bf16-mixed" if processor else "32-true")
    assert with_precision(recipe).precision == resolve_precision(recipe)


def test_a_choice_is_kept_and_a_slow_one_is_said(processor):
    for precision in ("32-true", "16-mixed", "bf16-mixed"):
        is_slow = precision == "bf16-mixed" and not processor
        recipe = Recipe(**SMALL, precision=precision)
        warned = pytest.warns(UserWarning, match="precision=bf16-mixed: this processor")
        with warned if is_slow else contextlib.nullcontext():
            assert with_precision(recipe) == recipe


def test_a_run_records_what_auto_became(processor, waves, tmp_path, brief):
    folder = train_small(tmp_path / "run", waves, precision="auto", epochs=1)
    expected = "bf16-mixed" if processor else "32-true"
    assert yaml.safe_load((folder / "config.yaml").read_text())["precision"] == expected
    checkpoint = torch.load(folder / "seed-0/last.ckpt", weights_only=True)
    assert checkpoint["recipe"]["precision"] == expected


def test_no_shipped_recipe_is_slow_anywhere():
    for name in list_recipes():
        assert make_recipe(read_recipe(name)[1]).precision in ("auto", "32-true"), name
