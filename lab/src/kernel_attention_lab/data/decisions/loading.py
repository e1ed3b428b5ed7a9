"""Data sets of decisions by name: Minari's, several of them joined with +, and the HDF5 files of D4RL."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.archive import resolve_root
from kernel_attention_lab.data.decisions.d4rl import read_d4rl
from kernel_attention_lab.data.decisions.episodes import Episodes
from kernel_attention_lab.data.decisions.sets import DecisionData, list_decision_sets, read_minari

JOINED_BY = "+"
_HDF5 = (".hdf5", ".h5")

REFERENCE_RETURNS = {
    "HalfCheetah": (-280.178953, 12135.0),
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
}
"""D4RL's returns of a random and of an expert policy, which a normalised score of 0 and 100 stand for."""

_OF_FILES = {"halfcheetah": "HalfCheetah-v5", "hopper": "Hopper-v5", "walker2d": "Walker2d-v5"}


def load_decisions(
    name: str, data_root: str | os.PathLike[str] | None = None, environment: str = ""
) -> DecisionData:
    """A data set by its name.

    Args:
        name: a Minari data set such as ``mujoco/hopper/medium-v0``, or an HDF5 file of D4RL, by its path or
            below the data root. Several are joined with ``+``.
        data_root: the folder that is searched first.
        environment: gymnasium's name of the environment instead of the data set's own.

    Raises:
        InputError: for an unknown name (with those that are there), a damaged file, and sets that do not fit
            together.
    """
    root = resolve_root(data_root)
    parts = [_read(part.strip(), root) for part in name.split(JOINED_BY)]
    first = parts[0]
    for part in parts[1:]:
        _require_alike(first, part)
    episodes = first.episodes if len(parts) == 1 else _joined([part.episodes for part in parts])
    environment = environment or first.environment
    return replace(
        first,
        name=name,
        episodes=episodes,
        environment=environment,
        environment_options=first.environment_options if environment == first.environment else {},
        reference=first.reference or REFERENCE_RETURNS.get(environment.partition("-")[0]),
    )


def _read(name: str, root: Path | None) -> DecisionData:
    if not name.endswith(_HDF5):
        return read_minari(name, root)
    path = _file(name, root)
    episodes = read_d4rl(path)
    if episodes.is_discrete:
        actions: dict[str, Any] = {"action_dim": int(episodes.actions.max()) + 1}
    else:
        width = episodes.actions.shape[1]
        actions = {"action_dim": width, "low": (-1.0,) * width, "high": (1.0,) * width}
    kind = path.name.replace("-", "_").partition("_")[0].lower()
    return DecisionData(name, episodes, environment=_OF_FILES.get(kind, ""), **actions)


def _file(name: str, root: Path | None) -> Path:
    places = [Path(name)] if root is None else [root / name, root / "d4rl" / name, Path(name)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = ", ".join(str(place) for place in places)
        there = ", ".join(one.name for one in list_decision_sets(root)) or "none"
        raise InputError(f"dataset {name!r}: no such file ({looked}; Minari data sets at hand: {there})")
    return found


def _joined(parts: list[Episodes]) -> Episodes:
    offsets = np.cumsum([0, *(part.steps for part in parts[:-1])])
    return Episodes(
        np.concatenate([part.states for part in parts]),
        np.concatenate([part.actions for part in parts]),
        np.concatenate([part.rewards for part in parts]),
        np.concatenate([part.ends + offset for part, offset in zip(parts, offsets, strict=True)]),
    )


def _require_alike(first: DecisionData, other: DecisionData) -> None:
    """InputError for sets of different environments or spaces."""
    described = [
        {
            "environment": one.environment,
            "state_dim": one.episodes.states.shape[1],
            "action_dim": one.action_dim,
            "discrete": one.episodes.is_discrete,
            "low": one.low,
            "high": one.high,
        }
        for one in (first, other)
    ]
    for key, value in described[0].items():
        if described[1][key] != value:
            raise InputError(
                f"datasets {first.name} and {other.name} cannot be joined: {key} is {value} and "
                f"{described[1][key]}"
            )
