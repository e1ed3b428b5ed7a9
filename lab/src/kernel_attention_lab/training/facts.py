"""The data of a run: the facts that a trained model depends on (``data.json``), and the folder.

The folder is found at the start of a run, recorded with it, and overridden by an option.
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError
from kernel_attention_lab.data.archive import resolve_root
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.run_folder import RunFolder, read_json
from kernel_attention_lab.training.tasks import experiment_class


def describe_data(data: TimeSeriesData) -> dict[str, Any]:
    """The facts about a data set."""
    return {
        "dataset": data.name,
        "task": data.task,
        "num_features": data.num_features,
        "max_len": data.max_len,
        "class_names": list(data.class_names),
        "train_cases": len(data.train),
        "test_cases": len(data.test),
    } | ({"channel_names": list(data.channel_names)} if data.channel_names else {})


def require_same_data(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """InputError where the data set of this name differs from the data that the run was trained on."""
    for key, value in expected.items():
        if found.get(key) != value and key.startswith("vocabulary"):
            raise InputError(
                f"dataset {expected.get('dataset')}: tokenizer mismatch, its training text does not give the "
                f"vocabulary of the run ({key} is {_short(found.get(key))}, was {_short(value)})"
            )
        if found.get(key) != value:
            now, then = (reprlib.repr(one) for one in (found.get(key), value))  # a vocabulary can be long
            raise InputError(
                f"dataset {expected.get('dataset')}: {key} is {now}, in the data of the run it was {then}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def check_facts(facts: Any, path: Path) -> None:
    """InputError where the content of a ``data.json`` does not describe time series."""
    names = facts.get("class_names") if isinstance(facts, dict) else None
    is_right = (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and facts.get("task") == ("classification" if names else "regression")
        and all(isinstance(facts.get(key), int) and facts[key] > 0 for key in ("num_features", "max_len"))
    )
    if not is_right:
        raise InputError(f"{path}: does not describe a data set (num_features, max_len, task, class_names)")
    channels = facts.get("channel_names")
    is_named = isinstance(channels, list) and all(isinstance(name, str) for name in channels)
    if channels is not None and not (
        is_named and len(set(channels)) == facts["num_features"] == len(channels)
    ):
        raise InputError(f"{path}: channel_names are not the names of {facts['num_features']} channels")


def read_facts(folder: Path, task: str) -> dict[str, Any]:
    """The facts in a run folder; InputError where they are missing, damaged or of another task."""
    path = folder / "data.json"
    facts = RunFolder(folder).data()
    if facts is None:
        raise InputError(f"{path}: is missing, and with it what the model depends on of its data")
    experiment_class(task).check_facts(facts, path)
    return facts


def find_data_root(dataset: str, data_root: str | Path | None) -> str | None:
    """The folder that a run's data set is found under, as an absolute path; None where none is needed.

    A path relative to the working folder is found there.
    """
    root = resolve_root(data_root)
    if root is None and not Path(dataset).is_absolute() and Path(dataset).exists():
        root = Path()
    return None if root is None else os.path.realpath(root)  # Path.resolve fails for a link to itself


def recorded_data_root(folder: Path, given: str | Path | None = None) -> str | Path | None:
    """``given``, or else the data root recorded in the run if it is a folder on this machine."""
    if given is not None:
        return given
    try:
        kept = read_json(folder / "versions.json")
    except InputError:  # the file only describes how the run was made; opening the run does not need it
        return None
    root = kept.get("data_root") if isinstance(kept, dict) else None
    return root if isinstance(root, str) and Path(root).is_dir() else None
