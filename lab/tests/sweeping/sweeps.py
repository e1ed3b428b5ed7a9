"""Small sweeps, and what their studies say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.trial import Trial, TrialState

from kernel_attention_lab.runs.run import train  # noqa: F401  (heavy; imported once)
from kernel_attention_lab.sweeping import SweepFolder, make_plan, open_sweep, read_space, start_sweep
from kernel_attention_lab.tasks.time_series import Recipe

Figure: TypeAlias = Callable[[dict[str, Any]], float]


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


def endings(folder: Path, state: TrialState = TrialState.COMPLETE) -> dict[int, int]:
    """How many trials of each point ended in a state, by the study itself."""
    sweep = open_sweep(folder)
    found = Counter(trial.user_attrs.get("point") for trial in sweep.study.get_trials(states=[state]))
    return {number: found[number] for number in range(sweep.plan.points)}


def run_all(sweep: SweepFolder, figure: Figure, count: int | None = None) -> list[dict[str, Any]]:
    """The keys of points that are run as a worker runs them, but with a figure and nothing trained."""
    tried: list[dict[str, Any]] = []
    while len(tried) != count and sweep.offer():
        sweep.study.optimize(_objective(sweep, figure, tried), n_trials=1)
    return tried


def run_in_memory(sweep: SweepFolder, figure: Figure) -> list[dict[str, Any]]:
    """The same for all points, with a study that no file holds, which is faster."""
    tried: list[dict[str, Any]] = []
    sweep.study = optuna.create_study(sampler=sweep.study.sampler, direction="maximize")
    for number in range(sweep.plan.points):
        sweep.study.enqueue_trial(sweep._known(number), {"point": number})
    sweep.study.optimize(_objective(sweep, figure, tried), n_trials=sweep.plan.points)
    return tried


def _objective(sweep: SweepFolder, figure: Figure, tried: list[dict[str, Any]]) -> Callable[[Trial], float]:
    def objective(trial: Trial) -> float:
        tried.append(sweep.choose(trial))
        trial.set_user_attr("values", [figure(tried[-1])])
        return figure(tried[-1])

    return objective
