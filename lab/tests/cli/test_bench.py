"""`kernel-attention bench`."""

from __future__ import annotations

import json
import re

import pytest
import torch

from kernel_attention_lab.benchmarking import machine

TINY = "--length 8 16 --embed-dim 8 --batch-size 2 --threads 1 --rounds 1 --memory false".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(machine, "load", lambda: [0.0, 0.0, 0.0])
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_contenders_and_sizes_of_ones_own(cli, here):
    code, out, err = cli("bench", "linear", "{primal: {rank: 2}}", *TINY, "--output", "out")
    assert code == 0
    assert re.fullmatch(
        r"(\d\d:\d\d:\d\d length 8, [^\n]+: sdpa: warm-up\n)(\d\d:\d\d:\d\d length [^\n]+\n)*", err
    )
    assert "primal (rank 2)" in out
    assert "written: out/benchmark.json" in out
    record = json.loads((here / "out/benchmark.json").read_text())
    assert record["plan"]["contenders"] == ["sdpa", "linear", "primal (rank 2)"]
    assert [cell["setting"]["length"] for cell in record["cells"]] == [8, 16]
    assert sorted(path.name for path in here.iterdir()) == ["out"]


def test_a_suite(cli, here):
    sizes = ("--length", 32, "--rounds", 1, "--threads", 1, "--memory", "false")
    code, out, _ = cli("bench", "--suite", "rpc", "{rpc: {iterations: 2}}", *sizes)
    assert code == 0
    assert "time / symmetric" in out
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("bench-rpc-")
    cell = json.loads((folder / "benchmark.json").read_text())["cells"][0]
    assert [row["contender"] for row in cell["rows"]] == ["symmetric", "rpc (iterations 2)"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sdpaa"], "unknown contender 'sdpaa'; did you mean 'sdpa'"),
        (["{primal: {ranks: 3}}"], "unknown option of contender 'primal' 'ranks'"),
        (["--suite", "primal-duel"], "unknown suite 'primal-duel'; did you mean 'primal-dual'"),
        (["sdpa", "--length", "0"], "length=0 must be at least 1"),
        (["sdpa", "--length", "many"], "--length 'many'"),
        (["sdpa", "--lengths", "8"], "bench has no option --lengths; did you mean --length"),
        (["sdpa", "--rounds", "0"], "rounds=0"),
        (["sdpa", "--warmup", "-1"], "warmup=-1 must be 0 or more"),
        (["sdpa", "--dtype", "float31"], "unknown dtype 'float31'"),
        (["sdpa", "--passes", "back"], "unknown pass 'back'"),
        (["sdpa", "--against", "HEAD", "--rounds", "3"], "rounds=3 must be at least 7 with --against"),
        (["sdpaa", "--against", "HEAD"], "unknown contender 'sdpaa'; did you mean 'sdpa'"),
        (["sdpa", "--against", "no-such-revision"], "--against"),
    ],
    ids=str,
)
def test_bad_arguments(refused, arguments, said):
    assert said in refused("bench", *arguments)
