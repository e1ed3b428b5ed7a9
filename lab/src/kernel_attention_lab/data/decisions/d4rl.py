"""The HDF5 files of D4RL: flat arrays, cut into episodes; and their conversion into a Minari data set."""

from __future__ import annotations

import os
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, require_file
from kernel_attention.limits import require_memory
from kernel_attention_lab.data.decisions.episodes import Episode, Episodes, join_episodes
from kernel_attention_lab.data.decisions.sets import check_environment_name

_PARTS = ("observations", "actions", "rewards", "terminals")
_ENDS = ("terminals", "timeouts")
_LONGEST = 1000  # steps of an episode where the file does not say which ones were cut off


def read_d4rl(path: str | os.PathLike[str]) -> Episodes:
    """The episodes of a D4RL file: actions (T,) are discrete, actions (T, a) continuous, from -1 to 1.

    An episode ends at a terminal state, or where ``timeouts`` say so; a file without them has episodes of at
    most 1000 steps. The steps after the last end are left out, as in the decision transformer's code: their
    return is not known.

    Raises:
        InputError: for a file that cannot be read, or is no D4RL file.
    """
    path = Path(path)
    require_file(path)
    import h5py

    try:
        with h5py.File(path, "r") as file:
            missing = [part for part in _PARTS if part not in file]
            if missing:
                raise InputError(f"{path}: not a D4RL file (it has no {', '.join(missing)})")
            found = _arrays(file, path)
    except InputError:
        raise
    except Exception as error:  # h5py raises many kinds for a damaged file
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(f"{path}: truncated or not an HDF5 file ({reason})") from None
    lengths = sorted({len(array) for array in found.values()})
    if len(lengths) > 1:
        raise InputError(f"{path}: its arrays have different lengths ({lengths})")
    states, actions = found["observations"], found["actions"]
    rewards = _flat(found["rewards"], "rewards", path)
    ends = _ends(*(_flat(found[part], part, path).astype(bool) for part in _ENDS if part in found))
    if not len(ends):
        raise InputError(f"{path}: no episode in it ends")
    cut = [slice(start, end) for start, end in pairwise([0, *ends])]
    episodes = join_episodes([Episode(states[one], actions[one], rewards[one]) for one in cut], str(path))
    largest = 0.0 if episodes.is_discrete else float(np.abs(episodes.actions).max())
    if largest > 1.0:
        raise InputError(f"{path}: an action is {largest:g}, expected actions between -1 and 1, as D4RL's")
    return episodes


def _arrays(file: Any, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that is open, with an axis of steps each."""
    import h5py

    held = {part: file[part] for part in dict.fromkeys((*_PARTS, *_ENDS)) if part in file}
    for part, array in held.items():
        if not isinstance(array, h5py.Dataset) or not array.ndim or array.dtype.kind not in "biuf":
            raise InputError(f"{path}: not a D4RL file (its {part} are no array of numbers)")
    require_memory(f"{path}", sum(array.nbytes for array in held.values()), "take a smaller file")
    return {part: np.asarray(array) for part, array in held.items()}


def _flat(array: np.ndarray, part: str, path: Path) -> np.ndarray:
    if array.size != len(array):
        raise InputError(f"{path}: its {part} have the shape {array.shape}, expected one number a step")
    return array.reshape(-1)


def _ends(terminals: np.ndarray, timeouts: np.ndarray | None = None) -> list[int]:
    """One past the last step of every episode."""
    if timeouts is not None:
        return (np.flatnonzero(terminals | timeouts) + 1).tolist()
    ends, start = [], 0
    for step, is_terminal in enumerate(terminals):
        if is_terminal or step + 1 - start == _LONGEST:
            start = step + 1
            ends.append(start)
    return ends


def convert_d4rl(
    path: str | os.PathLike[str], dataset_id: str, environment: str, folder: str | os.PathLike[str]
) -> Path:
    """Write the episodes of a D4RL file as a Minari data set, and return the folder of the set.

    D4RL's files lack the state after the last step of an episode; the last one stands for it twice.

    Args:
        path: the HDF5 file.
        dataset_id: Minari's name of the new set, such as ``d4rl/hopper/medium-v0``.
        environment: gymnasium's name of its environment, such as ``Hopper-v5``.
        folder: of Minari's data sets; created if missing.

    Raises:
        InputError: for a file that cannot be read, a name that is not Minari's, a set that is there already,
            and an environment that does not exist.
    """
    episodes = read_d4rl(path)
    check_environment_name(environment, "convert_d4rl")
    import gymnasium
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.dataset.minari_storage import MinariStorage

    try:
        parse_dataset_id(dataset_id)
        spec = gymnasium.spec(environment)
    except (ValueError, TypeError, gymnasium.error.Error) as error:
        raise InputError(f"convert_d4rl: {' '.join(str(error).split())}") from None
    target = Path(folder) / dataset_id / "data"
    if target.exists():
        raise InputError(f"convert_d4rl: {target} is there already")
    width, bounded = episodes.states.shape[1], episodes.actions.ndim == 2
    states = gymnasium.spaces.Box(-np.inf, np.inf, (width,), np.float32)
    actions: gymnasium.Space = gymnasium.spaces.Discrete(int(episodes.actions.max()) + 1)
    if bounded:
        actions = gymnasium.spaces.Box(-1.0, 1.0, episodes.actions.shape[1:], np.float32)
    folder = target.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as unfinished:
        written = Path(unfinished) / folder.name / "data"
        written.mkdir(parents=True)
        _write(MinariStorage.new(written, states, actions, spec), episodes, dataset_id, Path(path).name)
        shutil.move(written.parent, folder)
    return folder


def _write(storage: Any, episodes: Episodes, dataset_id: str, source: str) -> None:
    """Fill a new Minari storage."""
    from minari import __version__
    from minari.data_collector import EpisodeBuffer

    buffers = []
    for number, (start, end) in enumerate(zip(episodes.starts, episodes.ends, strict=True)):
        seen = episodes.states[start:end]
        last = np.arange(end - start) == end - start - 1
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.concatenate([seen, seen[-1:]]),
                actions=episodes.actions[start:end],
                rewards=episodes.rewards[start:end].tolist(),
                terminations=np.zeros_like(last).tolist(),
                truncations=last.tolist(),
            )
        )
    storage.update_episodes(buffers)
    described = f"converted from the D4RL file {source}"
    storage.update_metadata(
        {"dataset_id": dataset_id, "minari_version": __version__, "description": described}
    )
