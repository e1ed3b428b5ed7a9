"""One episode of a trained policy, with pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, writing
from kernel_attention_lab.control.environments import make_environment
from kernel_attention_lab.control.pictures import film, write_gif
from kernel_attention_lab.control.roll_outs import RollOuts, normalized_score, roll_out
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.runs.files import write_json
from kernel_attention_lab.runs.saved import SavedRun
from kernel_attention_lab.tasks.decisions import DecisionRecipe

FILM, RECORD = "episode.gif", "episode.json"
_MOST_FRAMES = 400


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played, and the file of its pictures.

    Args:
        record: the content of ``episode.json``.
        path: of the GIF.
    """

    record: dict[str, Any]
    path: Path


def play_run(
    run: SavedRun,
    *,
    seed: int | None = None,
    episode_seed: int = 0,
    target: float | None = None,
    memory: str | None = None,
    frames: int = 60,
    side: int = 240,
    output: Path | None = None,
) -> PlayedEpisode:
    """Play one episode and write its pictures, ``seed-K/episode.gif``, into the run and its report.

    Args:
        run: a run of the task ``decisions``.
        seed: of the model (default: the first of the run).
        episode_seed: of the episode's first state.
        target: the return that is asked for (default: the first of the recipe, or the data's largest).
        memory: sliding or recurrent (default: that of the recipe).
        frames: the most pictures, evenly spaced over the episode.
        side: pixels of a side of a picture.
        output: write to this folder instead of the run, which is then not changed.

    Raises:
        InputError: for a run of another task, an argument out of range, and an environment that cannot be
            made or drawn here.
    """
    recipe = run.recipe
    if not isinstance(recipe, DecisionRecipe):
        raise InputError(f"run {run.folder}: task {recipe.task_name} plays no episode (accepted: decisions)")
    if not 1 <= frames <= _MOST_FRAMES:
        raise InputError(f"frames={frames} must be a whole number between 1 and {_MOST_FRAMES}")
    if not 16 <= side <= 1024:
        raise InputError(f"side={side} must be a whole number between 16 and 1024")
    model, facts = run.model(seed), run.facts
    targets = recipe.target_returns or [facts["best_return"]]
    asked, remembered = targets[0] if target is None else target, memory or recipe.memory
    name, options = facts["environment"], facts["environment_options"]

    def play(environment: Any, seen: Callable[[int], None] | None = None) -> RollOuts:
        return roll_out(
            model, [environment], [episode_seed], asked, memory=remembered, context=recipe.evaluation_context,
            longest=facts["max_timestep"], seen=seen,
        )  # fmt: skip

    drawn = film(name, options, side)
    plain = make_environment(name, options)
    length = int(play(plain).lengths[0])  # without pictures, which take longer than the steps
    chosen = set(np.linspace(0, length - 1, min(frames, length)).round().astype(int).tolist())
    pictures: list[np.ndarray] = []

    def look(step: int) -> None:
        if step in chosen:
            pictures.append(_picture(drawn, name))

    found = play(drawn, look)
    seconds = length * float(getattr(drawn.unwrapped, "dt", 1.0 / (drawn.metadata.get("render_fps") or 30)))
    for each in (plain, drawn):
        each.close()
    chosen_seed = run.seeds[0] if seed is None else seed
    folder = (run.folder if output is None else output) / f"seed-{chosen_seed}"
    record = {
        "environment": name,
        "episode_seed": episode_seed,
        "target": float(asked),
        "memory": remembered,
        "episode_return": float(found.returns[0]),
        "length": length,
        "frames": len(pictures),
        "seconds": round(seconds, 3),
    }
    if facts["reference"] is not None:
        low, high = facts["reference"]
        record["normalized_score"] = float(normalized_score(found.returns, (low, high))[0])
    with writing(f"output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RECORD, record)
    write_gif(folder / FILM, pictures, seconds)
    if output is None:
        write_report(run.folder)
    return PlayedEpisode(record, folder / FILM)


def _picture(environment: Any, name: str) -> np.ndarray:
    """The environment's picture, (H, W, 3) uint8."""
    try:
        found = environment.render()
    except Exception as error:  # gymnasium's renderers raise many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"environment {name} cannot be drawn here: {reason}") from None
    if not isinstance(found, np.ndarray) or found.ndim != 3:
        raise InputError(f"environment {name} draws no pictures")
    return found.astype(np.uint8)
