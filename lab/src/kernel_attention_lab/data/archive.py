"""The place of a data set: the data root, aeon itself, the cache, or the archive behind aeon."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernel_attention.errors import InputError, reading
from kernel_attention.files import cache_folder, expand_home
from kernel_attention_lab.data.fetching import require_download

DATA_ROOT_VARIABLE = "KERNEL_ATTENTION_DATA"
# The archive's variants of a set (equal lengths, gaps filled) are in the folder of the set.
_VARIANTS = re.compile(r"(_eq|_nmv)+$")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetInfo:
    """A data set on this machine.

    source: "data root", "cache", "aeon" (bundled) or "generated"; path: folder or archive, None where the
    data are generated.
    """

    name: str
    source: str
    path: Path | None


@dataclass(frozen=True)
class Location:
    """Two `.ts` files, or two members of one zip file when `zip_path` is set."""

    train: Path
    test: Path
    zip_path: Path | None = None


def resolve_root(data_root: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the argument, else of the environment variable; None where neither is given."""
    given, origin = data_root, "data_root"
    if given is None:
        given, origin = os.environ.get(DATA_ROOT_VARIABLE), f"environment variable {DATA_ROOT_VARIABLE}"
    if not given:
        return None
    with reading(f"{origin} {str(given)!r}"):
        root = expand_home(given)
        is_folder = root.is_dir()
    if not is_folder:
        kind = "is not a folder" if root.exists() else "does not exist"
        raise InputError(f"{origin} {str(given)!r} {kind}; accepted: the folder that holds the data sets")
    return root


def bundled_folder() -> Path | None:
    """The folder of the sets bundled with aeon, found without importing aeon (which takes seconds)."""
    spec = importlib.util.find_spec("aeon")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data"
    return folder if folder.is_dir() else None


def list_time_series(data_root: str | os.PathLike[str] | None = None) -> list[DatasetInfo]:
    """The sets that can be loaded without a download, sorted by name. Only folders are read.

    A name in several places is listed once, with the place that `load_time_series` reads.
    """
    found: dict[str, DatasetInfo] = {}
    for source, folder in _places(resolve_root(data_root)):
        for name, path in _scan(folder):
            found.setdefault(name, DatasetInfo(name, source, path))
    return sorted(found.values(), key=lambda info: info.name.lower())


def _places(root: Path | None) -> list[tuple[str, Path]]:
    places = [] if root is None else [("data root", root), ("data root", root / "uea")]
    bundled = bundled_folder()
    places += [] if bundled is None else [("aeon", bundled)]
    with contextlib.suppress(InputError):  # no home folder, so nothing in it
        places.append(("cache", cache_folder()))
    return places


def _scan(folder: Path) -> list[tuple[str, Path]]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        if entry.is_dir() and (entry / f"{entry.name}_TRAIN.ts").is_file():
            if (entry / f"{entry.name}_TEST.ts").is_file():
                found.append((entry.name, entry))
        elif entry.name.endswith("_TRAIN.ts") and entry.is_file():
            name = entry.name.removesuffix("_TRAIN.ts")
            if (folder / f"{name}_TEST.ts").is_file():
                found.append((name, folder))
        elif entry.suffix == ".zip" and entry.is_file():
            found.append((entry.stem, entry))
    return found


def locate(name: str, data_root: str | os.PathLike[str] | None = None) -> Location:
    """Find a set by name; download it as the last resort.

    Raises InputError for a data root that does not exist, an unknown name (with the nearest known names), a
    set with only one of its two files, or a download that failed.
    """
    root = resolve_root(data_root)
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.\-]{0,99}", name):
        raise InputError(f"dataset {name!r} is not the name of a data set (letters, digits, '_', '-', '.')")
    for _, folder in _places(root):
        try:
            location = _find(name, folder)
        except OSError as error:
            raise InputError(
                f"cannot look for dataset {name!r} in {folder}: {error.strerror or error}"
            ) from None
        if location is not None:
            return location
    return _download(name, root)


def _find(name: str, folder: Path) -> Location | None:
    base = _VARIANTS.sub("", name)
    train, test = f"{name}_TRAIN.ts", f"{name}_TEST.ts"
    for place in dict.fromkeys((folder / name, folder / base, folder)):
        present = [(place / file).is_file() for file in (train, test)]
        if any(present):
            if not all(present):
                raise InputError(f"dataset {name!r}: {place} has no {test if present[0] else train}")
            return Location(place / train, place / test)
    for zip_path in dict.fromkeys((folder / f"{name}.zip", folder / f"{base}.zip")):
        if zip_path.is_file():
            return Location(Path(train), Path(test), zip_path)
    return None


def _archive_names() -> dict[str, str]:
    """The name and task of every set that aeon can download; empty without aeon."""
    try:
        from aeon.datasets.tsc_datasets import tsc_zenodo
        from aeon.datasets.tser_datasets import tsr_zenodo
    except ImportError:
        return {}
    return {**dict.fromkeys(tsc_zenodo, "classification"), **dict.fromkeys(tsr_zenodo, "regression")}


def _download(name: str, root: Path | None) -> Location:
    archive = _archive_names()
    base = _VARIANTS.sub("", name)
    if base not in archive:
        raise _unknown_dataset(name, root, archive)
    require_download(name)
    destination = cache_folder() if root is None or not os.access(root, os.W_OK) else root
    place = f"a folder {base} of the data root (--data-root or {DATA_ROOT_VARIABLE})"
    how = f"put {name}_TRAIN.ts and {name}_TEST.ts (or {base}.zip) into {root / base if root else place}"
    from aeon.datasets import load_classification, load_regression

    load = load_classification if archive[base] == "classification" else load_regression
    logger.warning("downloading %s from the archive at zenodo.org into %s", base, destination / base)
    try:
        destination.mkdir(parents=True, exist_ok=True)
        # On the same disk as its destination, so that one rename moves all of the set or nothing.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=destination) as folder:
            load(base, split="train", extract_path=folder)
            if not (destination / base).exists():
                shutil.move(Path(folder) / base, destination / base)
    except (OSError, ValueError) as error:
        looked = ", ".join(str(folder) for _, folder in _places(root))
        reason = " ".join(str(error).split())
        raise InputError(
            f"dataset {name!r} is not in {looked} and its download failed ({reason}); {how}"
        ) from None
    location = _find(name, destination)
    if location is None:
        raise InputError(
            f"dataset {name!r} is not among the files of {base} in the archive ({destination / base})"
        )
    return location


def _unknown_dataset(name: str, root: Path | None, archive: dict[str, str]) -> InputError:
    for _, folder in _places(root):
        if (place := folder / name).is_dir():
            held = sorted(path.name for path in place.iterdir())
            shown = ", ".join([*held[:6], *(["..."] if len(held) > 6 else [])]) or "nothing"
            return InputError(
                f"dataset {name!r}: {place} has no {name}_TRAIN.ts and {name}_TEST.ts (it has: {shown})"
            )
    at_hand = [info.name for info in list_time_series(root)]
    by_lower = {known.lower(): known for known in (*archive, *at_hand)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(by_lower[match]) for match in near)}?" if near else ""
    more = "; more with aeon: pip install 'kernel-attention-lab[timeseries]'"
    if archive:
        more = f", and {len(archive)} sets of the archive by download"
    return InputError(f"unknown dataset {name!r}{hint} (at hand: {', '.join(at_hand) or 'none'}{more})")
