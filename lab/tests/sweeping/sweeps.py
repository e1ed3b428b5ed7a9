"""Small sweeps, and what a journal says of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from kernel_attention_lab.runs.run import train  # noqa: F401  (heavy; imported once)
from kernel_attention_lab.sweeping import SweepFolder, make_plan, read_space, start_sweep
from kernel_attention_lab.tasks.time_series import Recipe

CREATE, SET_STATE = 4, 6  # operations of the journal
COMPLETE, FAILED = 1, 3  # states of a trial


def small_sweep(
    folder: Path, root: Path, grid: list[str], ranges: list[str] = (), **options: Any
) -> SweepFolder:
    """An open sweep of the tiny data set, with one or more epochs and nothing trained."""
    keys = {
        "dataset": "Waves", "attention": "softmax", "embed_dim": 8, "num_heads": 2, "num_layers": 1,
        "feedforward_dim": 8, "epochs": 1, "batch_size": 7, "accelerator": "cpu", "threads": 1,
    } | options.pop("keys", {})  # fmt: skip
    space = read_space(Recipe, grid, ranges)
    return start_sweep(make_plan("small", keys, space, data_root=str(root), **options), folder)


def endings(folder: Path, state: int = COMPLETE) -> Counter[int]:
    """How often each trial was set to a final state, by the lines of the journal itself."""
    lines = [json.loads(line) for line in (folder / "study.journal").read_text().splitlines()]
    created = sum(line["op_code"] == CREATE for line in lines)
    found = Counter(
        line["trial_id"] for line in lines if line["op_code"] == SET_STATE and line["state"] == state
    )
    return Counter({number: found[number] for number in range(created)})
