"""Minari's data sets: where they lie, which there are, and how one is read or downloaded.

The metadata of a data set can name Python code, as the entry point of its environment. None of it is run: the
environment is taken by its registered name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, nearest, note, require_file
from kernel_attention.files import expand_home
from kernel_attention.limits import require_memory
from kernel_attention_lab.data.archive import DatasetInfo
from kernel_attention_lab.data.decisions.episodes import Episode, Episodes, join_episodes
from kernel_attention_lab.data.fetching import require_download

PATH_VARIABLE = "MINARI_DATASETS_PATH"
_NAME = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")
_ENVIRONMENT = re.compile(r"(?:[\w.-]+/)?[\w.-]+")  # no `module:`, which gymnasium would import
_DEPTH = 4  # folders of a name


@dataclass(frozen=True)
class DecisionData:
    """Episodes, and the environment that they are from.

    Args:
        name: of the data set.
        episodes: all of them.
        action_dim: numbers of an action, or how many discrete actions there are.
        low: the least actions, (a,); empty where actions are discrete.
        high: the largest ones.
        environment: gymnasium's name, such as ``Hopper-v5``; empty where it is not known.
        environment_options: keyword arguments of ``gymnasium.make``.
        reference: the returns that normalised scores of 0 and 100 stand for; None where they are not known.
    """

    name: str
    episodes: Episodes
    action_dim: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    environment: str = ""
    environment_options: dict[str, Any] = field(default_factory=dict)
    reference: tuple[float, float] | None = None

    @property
    def state_dim(self) -> int:
        """Numbers of a state."""
        return int(self.episodes.states.shape[1])


def minari_folders(root: Path | None) -> list[tuple[str, Path]]:
    """The folders that are searched, with their names in a listing."""
    places = []
    if root is not None:
        places = [("data root", root / "minari" if (root / "minari").is_dir() else root)]
    given = os.environ.get(PATH_VARIABLE)
    with contextlib.suppress(InputError):  # no home folder, so nothing in it
        own = expand_home(given or "~/.minari/datasets")
        places.append((f"${PATH_VARIABLE}" if given else "cache", own))
    return places


def list_decision_sets(data_root: str | os.PathLike[str] | None = None) -> list[DatasetInfo]:
    """The Minari data sets on this machine, by name. Only folders are read."""
    found: dict[str, DatasetInfo] = {}
    for source, folder in minari_folders(None if data_root is None else Path(data_root)):
        for path in _sets_below(folder):
            name = path.relative_to(folder).as_posix()
            if _NAME.fullmatch(name):
                found.setdefault(name, DatasetInfo(name, source, path))
    return sorted(found.values(), key=lambda info: info.name.lower())


def _sets_below(folder: Path, depth: int = 0) -> Iterator[Path]:
    try:
        children = sorted(child for child in folder.iterdir() if child.is_dir())
    except OSError:
        return
    for child in children:
        if (child / "data" / "metadata.json").is_file():
            yield child
        elif depth + 1 < _DEPTH and not child.name.startswith("."):
            yield from _sets_below(child, depth + 1)


def read_minari(name: str, root: Path | None) -> DecisionData:
    """A Minari data set by name; downloaded where it is not on this machine.

    Raises:
        InputError: for an unknown name, a failed download, a damaged set, and spaces that the policies do
            not take.
    """
    folder = _find(name, root)
    if folder is None:
        _download(name, root)
        folder = _find(name, None)
        if folder is None:
            raise InputError(f"dataset {name!r}: the download left no data set")
    return _read(name, folder / "data")


def _find(name: str, root: Path | None) -> Path | None:
    if not _NAME.fullmatch(name):
        raise _unknown(name, root, "a name ends in -v and a number")
    folders = (folder / name for _, folder in minari_folders(root))
    return next((folder for folder in folders if (folder / "data" / "metadata.json").is_file()), None)


def _unknown(name: str, root: Path | None, reason: str) -> InputError:
    there = [info.name for info in list_decision_sets(root)]
    near = nearest(name, there)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    looked = ", ".join(str(folder) for _, folder in minari_folders(root))
    listed = ", ".join(there) or "none"
    return InputError(f"unknown dataset {name!r} ({reason}){hint} (at hand in {looked}: {listed})")


def _download(name: str, root: Path | None) -> None:
    """Fetch the set into Minari's own folder."""
    if name.startswith("mujoco-local/"):  # rolled out by whoever has them
        raise _unknown(name, root, "a data set of this machine, not one of Minari's server")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise _unknown(name, root, "not downloaded, as HF_HUB_OFFLINE is set")
    require_download(name)
    note(f"downloading {name} with Minari")
    with _quiet("huggingface_hub"):
        try:
            import minari

            minari.download_dataset(name)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the errors of the server's client are not documented
            reason = " ".join(str(error).split())[:200]
            raise _unknown(name, root, f"its download failed: {reason}") from None


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep the retries of a download off the screen."""
    found = logging.getLogger(logger)
    level = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(level)


def _read(name: str, folder: Path) -> DecisionData:
    metadata = _metadata(folder)
    # Without them Minari would make the environment, and with it import what the metadata name.
    for key in ("observation_space", "action_space"):
        if not isinstance(metadata.get(key), str):
            raise InputError(f"{folder / 'metadata.json'}: has no {key}")
    from minari.dataset.minari_storage import MinariStorage

    if metadata.get("data_format") == "hdf5":
        import h5py  # noqa: F401  (Minari would name its own extra)

    try:
        storage = MinariStorage.read(folder)
        states, actions = storage.observation_space, storage.action_space
    except Exception as error:
        raise _damaged(folder, error) from None
    range_of_actions = _check_spaces(name, states, actions)
    episodes = []
    try:
        _require_memory(name, folder)
        for one in storage.get_episodes(range(storage.total_episodes)):
            parts = (np.asarray(one[key]) for key in ("observations", "actions", "rewards"))
            episodes.append(Episode(*parts))
    except InputError:
        raise
    except Exception as error:  # h5py raises many kinds for a damaged file
        raise _damaged(folder, error) from None
    environment, options = _environment(folder, metadata)
    bounds = (metadata.get("ref_min_score"), metadata.get("ref_max_score"))
    joined = join_episodes(episodes, f"dataset {name}")
    _check_actions(name, joined, actions)
    return DecisionData(
        name,
        joined,
        environment=environment,
        environment_options=options,
        reference=_reference(bounds),
        **range_of_actions,
    )


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / "metadata.json"
    require_file(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: does not describe a data set")
    return found


def _damaged(folder: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return InputError(f"{folder}: truncated or not a Minari data set ({reason})")


def _require_memory(name: str, folder: Path) -> None:
    """Refuse arrays that no memory holds by the sizes in their file, before they are made."""
    file = folder / "main_data.hdf5"
    if not file.is_file():
        return
    import h5py

    sizes: list[int] = []
    with h5py.File(file, "r") as opened:
        opened.visititems(lambda _, found: sizes.append(getattr(found, "nbytes", 0)))
    require_memory(f"dataset {name}", sum(sizes), "take a smaller set")


def _check_spaces(name: str, states: Any, actions: Any) -> dict[str, Any]:
    """The actions' fields of a ``DecisionData``; InputError for spaces that the policies do not take."""
    from gymnasium.spaces import Box, Discrete

    if not isinstance(states, Box) or len(states.shape) != 1:
        raise InputError(f"dataset {name}: its states are {states}, accepted: a Box of one dimension")
    if isinstance(actions, Discrete):
        if actions.start != 0:
            raise InputError(f"dataset {name}: its actions are {actions}, accepted: those that start at 0")
        return {"action_dim": int(actions.n)}
    if not isinstance(actions, Box) or len(actions.shape) != 1:
        raise InputError(
            f"dataset {name}: its actions are {actions}, accepted: Discrete, or a Box of one dimension"
        )
    if actions.dtype.kind != "f":
        raise InputError(f"dataset {name}: its actions are {actions}, accepted: Discrete, or a Box of floats")
    low, high = (tuple(float(value) for value in bound) for bound in (actions.low, actions.high))
    if not np.isfinite([*low, *high]).all():
        raise InputError(f"dataset {name}: its actions {actions} have no bounds")
    return {"action_dim": len(low), "low": low, "high": high}


def _check_actions(name: str, episodes: Episodes, declared: Any) -> None:
    """InputError where the actions are other than the data set declares."""
    from gymnasium.spaces import Discrete

    if isinstance(declared, Discrete) != episodes.is_discrete:
        found = "(T,)" if episodes.is_discrete else f"(T, {episodes.actions.shape[1]})"
        raise InputError(f"dataset {name}: its actions are {declared}, and their arrays {found}")
    if episodes.is_discrete:
        if episodes.actions.max() >= declared.n:
            raise InputError(
                f"dataset {name}: has action {episodes.actions.max()}, and its actions are {declared}: 0 to "
                f"{declared.n - 1}"
            )
    elif episodes.actions.shape[1:] != declared.shape:
        raise InputError(
            f"dataset {name}: its actions are {declared}, and have {episodes.actions.shape[1]} numbers"
        )


def _environment(folder: Path, metadata: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and keyword arguments of the environment in which a policy is evaluated."""
    text = metadata.get("eval_env_spec") or metadata.get("env_spec")
    if text is None:
        return "", {}
    try:
        described = json.loads(text)
        name, options = described["id"], described.get("kwargs") or {}
        if not isinstance(options, dict):
            raise TypeError
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise InputError(f"{folder / 'metadata.json'}: env_spec does not describe an environment") from None
    check_environment_name(name, str(folder / "metadata.json"))
    return name, options


def check_environment_name(name: Any, source: str) -> None:
    """InputError for a name that is not of a registered environment, such as ``module:Name-v0``."""
    if not isinstance(name, str) or not _ENVIRONMENT.fullmatch(name):
        raise InputError(f"{source}: environment {name!r} is not the name of a registered environment")


def _reference(bounds: tuple[Any, Any]) -> tuple[float, float] | None:
    low, high = bounds
    if not all(isinstance(bound, int | float) and np.isfinite(bound) for bound in (low, high)):
        return None
    return (float(low), float(high)) if low < high else None
