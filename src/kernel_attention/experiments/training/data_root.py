"""The folder of a run's data: found at its start, recorded with the run, overridden by an option."""

from __future__ import annotations

from pathlib import Path

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.archive import resolve_root
from kernel_attention.experiments.run_folder import read_json


def find_data_root(dataset: str, data_root: str | Path | None) -> str | None:
    """The folder that a run's data set is found under, as an absolute path; None where none is needed.

    A path relative to the working folder is found there.
    """
    root = resolve_root(data_root)
    if root is None and not Path(dataset).is_absolute() and Path(dataset).exists():
        root = Path()
    return None if root is None else str(root.resolve())


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
