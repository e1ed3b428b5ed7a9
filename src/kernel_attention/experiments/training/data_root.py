"""Where a run's data lie: found at its start, kept with the run, replaced by whoever says otherwise."""

from __future__ import annotations

from pathlib import Path

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.archive import resolve_root
from kernel_attention.experiments.run_folder import read_json


def find_data_root(dataset: str, data_root: str | Path | None) -> str | None:
    """The folder that a run's data set is found under, as an absolute path; None where none is needed.

    A path that was given relative to the working folder is found under that.
    """
    root = resolve_root(data_root)
    if root is None and not Path(dataset).is_absolute() and Path(dataset).exists():
        root = Path()
    return None if root is None else str(root.resolve())


def recorded_data_root(folder: Path, given: str | Path | None = None) -> str | Path | None:
    """``given``, or else the data root that a run keeps, as long as it is a folder of this machine."""
    if given is not None:
        return given
    try:
        kept = read_json(folder / "versions.json")
    except InputError:  # says how the run was made, and nothing that opening it must have
        return None
    root = kept.get("data_root") if isinstance(kept, dict) else None
    return root if isinstance(root, str) and Path(root).is_dir() else None
