"""The saved state of an unfinished run, in words."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch


def saved_state(folder: Path) -> str:
    """The finished seeds of a run folder, and the points where the others would resume."""
    found = sorted(
        (int(path.name.removeprefix("seed-")), path)
        for path in folder.glob("seed-*")
        if path.name.removeprefix("seed-").isdecimal()
    )
    states = [f"seed {seed}: {state}" for seed, path in found if (state := _seed_state(path))]
    return "; ".join(states) or "its recipe, no checkpoint yet"


def _seed_state(folder: Path) -> str | None:
    if (folder / "evaluation.json").is_file():
        return "finished"
    if not (folder / "last.ckpt").is_file():
        return None
    step = _step(folder / "last.ckpt")
    if step is None:
        return "checkpoint"
    return f"checkpoint after step {step}" if step else "checkpoint of step 0, nothing trained yet"


def _step(checkpoint: Path) -> int | None:
    """Optimizer steps so far; None where the file cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Mapped, so that one number does not cost the reading of a large checkpoint.
            state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
        return int(state["global_step"])
    except Exception:  # this text reports another failure, which it must not hide
        return None
