"""Run folders that the trainer wrote: small runs of every task, so that reports follow what runs hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs.small_runs import SMALL, make_waves
from tasks.decision_data import DECISIONS, make_decisions
from tasks.text_data import LANGUAGE, make_text
from tasks.token_data import TOKENS, make_tokens

from kernel_attention.training.loop import Interrupted, Training
from kernel_attention_lab.runs import run
from kernel_attention_lab.tasks import make_recipe

KINDS: dict[str, dict[str, Any]] = {
    "one seed": {},
    "several seeds": {"seeds": [0, 1, 2], "protocol": "paper", "epochs": 4, "evaluate_every": 2},
    "regression, several seeds": {"dataset": "Tides", "seeds": [0, 1]},
    "no objective": {"attention": "softmax"},
    "no kernel": {"attention": {"multilinear": {"rank": 3, "variant": "data_dependent"}}},
    "part of the test split": {"epochs": 1, "protocol": "thesis-3"},
    "more classes than names": {"dataset": "Many", "epochs": 1, "num_heads": 4, "num_layers": 1},
    "many of everything": {"seeds": list(range(9)), "num_layers": 2, "epochs": 1},
    "tokens": TOKENS | {"dataset": "sst2", "swap_rate": 0.5},
    "language": LANGUAGE,
    "language, several seeds": LANGUAGE | {"seeds": [0, 1], "attention": "softmax"},
    "language, no better than counts": LANGUAGE | {"steps": 1, "warmup_steps": 0, "evaluate_every": 1},
    "decisions": DECISIONS | {"curve_episodes": 1},
    "interrupted": {"seeds": [0, 1], "epochs": 5},
    "interrupted in the first epoch": {},
    "interrupted language": LANGUAGE,
}
STOPPED_AT = {"interrupted": 3, "interrupted in the first epoch": 0, "interrupted language": 2}
"""The epoch, or round of steps, in which Ctrl-C came."""


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Waves of three and of ninety-five classes, Tides (regression), sentences and a text."""
    root = make_waves(tmp_path_factory.mktemp("data"))
    make_waves(root, "Tides", regression=True)
    make_waves(root, "Many", names=[f"word_{index}" for index in range(95)])
    make_waves(root, "Hostile", names=["<script>alert(1)</script>", '"quoted"&$x_1$', "plain"])
    return make_decisions(make_text(make_tokens(root)))


@pytest.fixture(scope="session")
def finished(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``finished(kind, **changes)``: a run of that kind, trained once. Only to be read."""
    kept: dict[str, Path] = {}

    def of_kind(kind: str, **changes: Any) -> Path:
        key = repr((kind, sorted(changes.items())))
        if key not in kept:
            kept[key] = tmp_path_factory.mktemp("run") / "run"
            keys = KINDS[kind] if "task" in KINDS[kind] else SMALL | KINDS[kind]
            _train(keys | changes, kept[key], data_root, STOPPED_AT.get(kind))
        return kept[key]

    return of_kind


@pytest.fixture
def make_run(finished: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``make_run(kind, **changes)``: a copy of such a run, to be written into."""

    def copy(kind: str = "one seed", **changes: Any) -> Path:
        return shutil.copytree(finished(kind, **changes), tmp_path / "run")

    return copy


def _train(keys: dict[str, Any], folder: Path, root: Path, stopped_at: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "write_report", lambda folder: None)  # what these tests do themselves
        recipe = make_recipe(keys)
        if stopped_at is None:
            run.train(recipe, folder, name="small", data_root=root, progress=False)
            return
        step = Training._step

        def stopped(training: Training, *passes: Any) -> None:
            """Ctrl-C before the first step of a round."""
            if training.round == stopped_at:
                raise KeyboardInterrupt
            step(training, *passes)

        patch.setattr(Training, "_step", stopped)
        with pytest.raises(Interrupted):
            run.train(recipe, folder, name="small", data_root=root, progress=False)
