"""What a benchmark records, and how it is shown."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import (
    Plan,
    Setting,
    contenders,
    machine,
    plan_from_options,
    run_benchmark,
)
from kernel_attention_lab.evidence.benchmarks import is_paper_record, paper_ratios, write_benchmark

SMALL = {"length": (8, 16), "embed_dim": (8,), "num_heads": (2,), "batch_size": (2,), "threads": (1,)}
FIGURES = {"seconds", "lower", "median", "upper", "ratio_lower", "ratio_median", "ratio_upper"}


@pytest.fixture(scope="module")
def record():
    """Of two contenders, one that fails and one that is not installed. Only to be read."""

    def fail(setting):
        raise RuntimeError("too [large]")

    absent = {"package": "no_such_package_anywhere"}
    primal = {"primal": {"rank": 2, "eta": 0.1}}
    plan = Plan(
        title="small", contenders=("sdpa", primal, "fails", "absent"), grid=SMALL, rounds=2, memory=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_LARGE", 16)
        patch.setattr(machine, "_COPIED", 1 << 12)
        for name, facts in (("fails", {}), ("absent", absent)):
            patch.setitem(contenders.CONTENDERS, name, contenders.Contender(name, fail, **facts))
        return run_benchmark(dataclasses.replace(plan, roofline=True))


def test_the_record_is_json_and_says_what_it_measured(record):
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record) == {"format", "machine", "plan", "absent", "cells"}
    assert {"processor", "cores", "torch", "date", "load_before", "load_after"} <= set(record["machine"])
    assert record["plan"]["contenders"] == ["sdpa", "primal (rank 2, eta 0.1)", "fails", "absent"]
    assert [entry["contender"] for entry in record["absent"]] == ["absent"]
    assert [Setting(**cell["setting"]) for cell in record["cells"]] == [
        Setting(length=length, embed_dim=8, num_heads=2, batch_size=2, threads=1) for length in (8, 16)
    ]
    for cell in record["cells"]:
        assert [sorted(order) for order in cell["orders"]] == [["primal (rank 2, eta 0.1)", "sdpa"]] * 2
        sdpa, primal, fails = cell["rows"]
        assert fails == {"contender": "fails", "failed": "RuntimeError: too [large]"}
        for row in (sdpa, primal):
            assert set(row) == {"contender", "time", "operations", "parameters"}
            assert all(set(row["time"][kind]) == FIGURES for kind in ("forward", "step"))
            assert all(len(row["time"][kind]["seconds"]) == 2 for kind in ("forward", "step"))
        assert sdpa["time"]["step"]["ratio_median"] == 1.0
        assert sdpa["parameters"] == 4 * (8 * 8 + 8)
        assert set(cell["ceilings"]) == {"large_product", "slice_product", "copy"}
        assert [line["pass"] for line in cell["roofline"]] == ["forward", "step"]


def test_the_record_is_kept_after_every_setting(tiny_plan):
    kept = []
    plan = dataclasses.replace(tiny_plan, grid={**tiny_plan.grid, "length": (8, 16)})
    record = run_benchmark(plan, kept=lambda record: kept.append(json.dumps(record)))
    assert [len(json.loads(text)["cells"]) for text in kept] == [1, 2]
    assert json.loads(kept[-1]) == record


def test_the_folder(record, tmp_path):
    files = write_benchmark(record, tmp_path / "bench")
    assert [path.name for path in files] == ["benchmark.json", "tables.md", "benchmark.svg"]
    assert json.loads(files[0].read_text()) == record
    assert "<svg" in files[2].read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_benchmark(record, tmp_path / "file" / "bench")


def test_the_papers_figures_are_ratios_of_its_contenders(tmp_path):
    plan = plan_from_options(
        "primal-dual", (), {"length": [32], "embed_dim": [8], "rounds": 1, "memory": False, "threads": [1]}
    )
    record = run_benchmark(plan)
    assert is_paper_record(record)
    by_hand = (8 * 8 * 8 + 4 * 32 * 8 * 0.75) / (8 * 8 * 8 + 4 * 32 * 8)  # keys are pooled after projecting
    for contender in ("eager scaled_heads", "eager batch_norm_scaled_heads"):
        ((width, length, ratio),) = paper_ratios(record, contender, "eager", "operations", "step")
        assert (width, length) == (8, 32)
        assert ratio == pytest.approx(by_hand)
    assert list(paper_ratios(record, "eager scaled_heads", "eager", "memory", "step")) == []
    assert [path.name for path in write_benchmark(record, tmp_path)][-1] == "primal-dual-figures.svg"


def test_what_is_given_replaces_the_suites_own():
    plan = plan_from_options(
        "primal", ("linear",), {"length": [8], "rounds": 2, "passes": ["step"], "dtype": None}, True
    )
    assert plan.contenders == ("sdpa", "linear")
    assert list(plan.settings()) == [Setting(length=8, threads=2, is_causal=True)]
    assert (plan.rounds, plan.passes, plan.memory) == (2, ("step",), True)
    assert plan_from_options(None, ("sdpa",), {}).contenders == ("sdpa",)
    own = next(plan_from_options(None, ("linear",), {}).settings())
    assert own.threads == torch.get_num_threads()


def test_long_settings_have_fewer_rounds():
    plan = Plan(title="", contenders=("sdpa",), rounds=9, rounds_at={100: 5, 1000: 2})
    rounds = [plan.rounds_of(Setting(length=length)) for length in (99, 100, 999, 1000, 5000)]
    assert rounds == [9, 5, 5, 2, 2]
    assert dataclasses.replace(plan, rounds=3).rounds_of(Setting(length=100)) == 3, "never more than asked"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": (0,)}, "length=0 must be at least 1"),
        ({"embed_dim": (9,)}, "embed_dim=9 must be divisible by num_heads=2"),
        ({"dtype": ("float31",)}, "unknown dtype 'float31'; did you mean 'float32'"),
        ({"device": ("tpu",)}, "unknown device 'tpu'"),
        ({"lengths": (8,)}, "unknown size 'lengths'; did you mean 'length'"),
    ],
)
def test_sizes_that_cannot_be(tiny_plan, changed, said):
    with pytest.raises(InputError, match=said):
        run_benchmark(dataclasses.replace(tiny_plan, grid={**tiny_plan.grid, **changed}))


@pytest.mark.parametrize(
    "changed", [{"rounds": 0}, {"passes": ()}, {"contenders": ()}, {"passes": ("back",)}]
)
def test_plans_that_measure_nothing(tiny_plan, changed):
    with pytest.raises(InputError):
        run_benchmark(dataclasses.replace(tiny_plan, **changed))
    with pytest.raises(InputError, match="warmup=-1"):
        run_benchmark(tiny_plan, warmup=-1)
