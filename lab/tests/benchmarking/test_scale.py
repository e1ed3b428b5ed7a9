"""Scale on paper: the arithmetic of collectives, and the bytes that two processes hand over."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = """
dataset: noise
attention: {primal: {rank: 3, eta: 0.1}}
embed_dim: 16
num_heads: 2
num_layers: 2
feedforward_dim: 32
dropout: 0.0
positions: none
pooling: mean
batch_size: 1
epochs: 1
accelerator: cpu
threads: 1
"""


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("scale")
    for name in ("scale", "long_encoder", "processes"):
        sys.modules.pop(name, None)


def test_a_ring_sends_twice_the_tensor_but_for_its_own_part(scale):
    machine = scale.Machine(near=100.0, far=10.0, latency=0.5, node=8)
    assert scale.seconds([("all_reduce", 800)], 8, machine) == pytest.approx(0.5 + 2 * 7 / 8 * 800 / 100)
    assert scale.seconds([("all_reduce", 800)], 16, machine) == pytest.approx(0.5 + 2 * 15 / 16 * 800 / 10)
    # A part counted on two processes is half of what is gathered.
    assert scale.seconds([("all_gather_single", 400)], 4, machine) == pytest.approx(0.5 + 3 / 4 * 800 / 100)
    assert scale.seconds([("reduce_scatter_single", 800)], 4, machine) == pytest.approx(
        0.5 + 3 / 4 * 800 / 100
    )


def test_what_overlaps_with_the_backward_pass_costs_nothing(scale):
    assert scale.efficiency(3.0, 2.0, 0.0) == (1.0, 3 / 5)
    assert scale.efficiency(3.0, 4.0, 1.0) == (0.5, 3 / 8)


@pytest.mark.slow
def test_the_gradients_are_the_bytes_of_the_weights_and_shards_gather_them_twice(tmp_path):
    """Those of the head are gathered once: they stay whole from the forward to the backward pass."""
    recipe = tmp_path / "small.yaml"
    recipe.write_text(SMALL)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "scale.py", "--recipe", recipe, "--port", "29617"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    rows = {
        (strategy, kind): int(size.replace(",", ""))
        for strategy, kind, size in re.findall(r"\| (\w+) \| `(\w+)` \| \d+ \| ([\d,]+) \|", done.stdout)
    }
    weights = rows["ddp", "all_reduce"]
    gathered, scattered = (
        sum(size for (name, kind), size in rows.items() if name == "fsdp" and kind.startswith(start))
        for start in ("all_gather", "reduce_scatter")
    )
    assert weights == pytest.approx(scattered, rel=0.05)
    assert weights / 2 < gathered <= 1.05 * weights
    assert rows["sequence_shards", "all_gather"] < 1000
