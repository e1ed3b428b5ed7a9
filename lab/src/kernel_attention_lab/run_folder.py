"""The reader of run folders, for reports, opened models and resumed runs.

It executes nothing from a folder, and it reports every defect: an absent file is ``None``, and a file that
cannot be used raises an ``InputError`` with its name. Callers that can do without a file catch the error.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from kernel_attention.errors import InputError, reading, require_file
from kernel_attention_lab.plain_yaml import read_yaml

_MAPS = ("labels", "predictions")  # of the examples of a segmentation


@dataclass(frozen=True)
class RunFolder:
    """The files of a run by their meaning. Each call reads the file again.

    Args:
        path: the folder that ``train`` wrote.
    """

    path: Path

    @property
    def config_path(self) -> Path:
        """The file of the resolved recipe. A folder with this file is a run."""
        return self.path / "config.yaml"

    def config(self) -> dict[str, Any] | None:
        """The keys of the resolved recipe."""
        return _object(self.config_path, read_yaml) if self.config_path.is_file() else None

    def config_text(self) -> str | None:
        """The text of the resolved recipe."""
        if not self.config_path.is_file():
            return None
        try:
            return self.config_path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"{self.config_path}: cannot be read ({error})") from None

    def data(self) -> dict[str, Any] | None:
        """The facts about the data that the model depends on."""
        return self._object("data.json")

    def versions(self) -> dict[str, Any] | None:
        """The command, the versions of the software, and the machine."""
        return self._object("versions.json")

    def summary(self) -> dict[str, Any] | None:
        """The figures of all seeds, written when the last seed is evaluated."""
        return self._object("summary.json")

    def seeds(self) -> list[int]:
        """The seeds that have started, in order."""
        found = (re.fullmatch(r"seed-(\d+)", child.name) for child in self.path.iterdir() if child.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def seed_path(self, seed: int) -> Path:
        """The folder of a seed."""
        return self.path / f"seed-{seed}"

    def weights_path(self, seed: int) -> Path:
        """The weights of a seed's chosen epoch or step."""
        return self.seed_path(seed) / "best.safetensors"

    def kept_weights(self, seed: int) -> dict[int, Path]:
        """The copies of a seed's weights by epoch, in order; 0 is the untrained model."""
        found = self.seed_path(seed).glob("epoch-*.safetensors")
        numbers = ((re.fullmatch(r"epoch-(\d+)", path.stem), path) for path in found)
        return dict(sorted((int(match[1]), path) for match, path in numbers if match))

    def metrics(self, seed: int) -> list[dict[str, Any]] | None:
        """One row per epoch, or per ``evaluate_every`` steps; a figure that diverged is None."""
        return self._read(f"seed-{seed}/metrics.json", _check_rows)

    def evaluation(self, seed: int) -> dict[str, Any] | None:
        """The figures of the test split."""
        return self._object(f"seed-{seed}/evaluation.json")

    def spectra(self, seed: int) -> dict[str, Any] | None:
        """Singular values of every layer's kernel."""
        return self._read(f"seed-{seed}/spectra.json", _check_spectra)

    def diagnostics(self, seed: int) -> dict[str, Any] | None:
        """The figures of ``analyze``."""
        return self._read(f"seed-{seed}/diagnostics.json", _check_diagnostics)

    def diagnostics_over_training(self, seed: int) -> dict[str, Any] | None:
        """The figures of ``analyze --over_training``."""
        return self._read(f"seed-{seed}/diagnostics_over_training.json", _check_course)

    def robustness_path(self, seed: int) -> Path:
        """The file of ``attack``."""
        return self.seed_path(seed) / "robustness.json"

    def robustness(self, seed: int) -> dict[str, Any] | None:
        """The results of ``attack``."""
        return self._read(f"seed-{seed}/robustness.json", _check_robustness)

    def examples(self, seed: int) -> dict[str, np.ndarray] | None:
        """The images that the report of a run on images shows: ``examples.npz``."""
        path = self.seed_path(seed) / "examples.npz"
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                content = {name: arrays[name] for name in arrays.files}
            _check_examples(content)
        except KeyError as error:
            raise InputError(f"{path}: has no {error}") from None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
            raise InputError(f"{path}: not readable as examples ({error})") from None
        return content

    def episode(self, seed: int) -> dict[str, Any] | None:
        """The record of the episode of ``play``."""
        return self._object(f"seed-{seed}/episode.json")

    def film(self, seed: int) -> bytes | None:
        """The pictures of ``play``, a GIF."""
        path = self.seed_path(seed) / "episode.gif"
        if not path.is_file():
            return None
        with reading(path):
            content = path.read_bytes()
        if not content.startswith((b"GIF87a", b"GIF89a")):
            raise InputError(f"{path}: not a GIF")
        return content

    def diagnostics_arrays_path(self, seed: int) -> Path:
        """The file with all arrays of ``analyze``."""
        return self.seed_path(seed) / "diagnostics.npz"

    def _object(self, name: str) -> dict[str, Any] | None:
        return self._read(name, _check_object)

    def _read(self, name: str, check: Callable[[Any], None]) -> Any:
        path = self.path / name
        if not path.is_file():
            return None
        content = read_json(path)
        try:
            check(content)
        except KeyError as error:
            raise InputError(f"{path}: has no {error}") from None
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InputError(f"{path}: {error}") from None
        return content


def kept_weights_path(seed_folder: Path, epoch: int) -> Path:
    """The copy of a seed's weights after an epoch."""
    return seed_folder / f"epoch-{epoch:03d}.safetensors"


def read_json(path: Path) -> Any:
    """The content of a JSON file; InputError where it is missing or not JSON."""
    require_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None


def _object(path: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    content = read(path)
    try:
        _check_object(content)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return content


def _check_object(content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"expected named values, found {type(content).__name__}")


def _check_rows(content: Any) -> None:
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError("expected a list of rows of named values")
    for number, row in enumerate(content):
        for key, value in row.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{key} of row {number} is {value!r}, not a number")


def _check_spectra(content: Any) -> None:
    _check_object(content)
    for entry in content["layers"]:
        int(entry["layer"])
        if not all(isinstance(head, list) for head in entry["singular_values"]):
            raise ValueError("singular_values must be one list a head")


def _check_diagnostics(content: Any) -> None:
    _check_object(content)
    for entry in content["layers"]:
        str(entry["name"]), str(entry["mechanism"])
        curves = [entry.get("explained_variance", []), *entry.get("mode_explained_variance", [])]
        numbers = [*entry["summary"].values(), *(value for curve in curves for value in curve)]
        numbers += [value for values in entry["by_head"].values() for value in values if value is not None]
        numbers += [
            value for values in entry.get("gamma", {}).values() for value in values if value is not None
        ]
        if not isinstance(entry["notes"], list) or not all(map(is_number, numbers)):
            raise ValueError(f"the figures of layer {entry['name']} are not numbers")


def _check_examples(content: dict[str, np.ndarray]) -> None:
    if "labels" in content:
        _check_label_maps(content)
        return
    images, count = content["images"], len(content["targets"])
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[::3] != (count, 3):
        raise ValueError(f"images are {images.dtype} of shape {images.shape}")
    for name in ("targets", "predictions"):
        if content[name].shape != (count,) or content[name].dtype.kind not in "iu":
            raise ValueError(f"{name} are not {count} whole numbers")
    if content["probabilities"].shape != (count,) or not np.isfinite(content["probabilities"]).all():
        raise ValueError(f"probabilities are not {count} numbers")
    maps = content.get("attention")
    if maps is not None and (maps.ndim != 4 or len(maps) != count or not np.isfinite(maps).all()):
        raise ValueError(f"attention has shape {maps.shape}, or numbers that are not finite")
    if content["attention_text"].shape != ():
        raise ValueError("attention_text is not one text")


def _check_label_maps(content: dict[str, np.ndarray]) -> None:
    images = content["images"]
    for name, shape in (("images", (*images.shape[:3], 3)), *((n, images.shape[:3]) for n in _MAPS)):
        array = content[name]
        if images.ndim != 4 or not images.size or array.dtype != np.uint8 or array.shape != shape:
            raise ValueError(f"{name} are {array.dtype} of shape {array.shape}")


def _check_course(content: Any) -> None:
    _check_object(content)
    names = None
    for entry in content["epochs"]:
        if not isinstance(entry["epoch"], int) or entry["epoch"] < 0:
            raise ValueError(f"epoch is {entry['epoch']!r}, not a whole number")
        _check_diagnostics(entry)
        found = [layer["name"] for layer in entry["layers"]]
        if names is not None and found != names:
            raise ValueError(f"the layers of epoch {entry['epoch']} are not those of the first entry")
        names = found


def _check_robustness(content: Any) -> None:
    _check_object(content)
    str(content["weights"])
    for entry in content["attacks"]:
        _check_object(entry)
        str(entry["attack"]), str(entry["protocol"]), bytes.fromhex(entry["bits"]), bool(entry["transferred"])
        if not isinstance(entry["cases"], int) or not is_number(entry["accuracy"]):
            raise ValueError(f"the figures of attack {entry['attack']} are not numbers")
        if not isinstance(entry["distances"], dict) or not is_number(entry["seconds"]):
            raise ValueError(f"the distances of attack {entry['attack']} are missing")
        if not isinstance(entry["options"], dict) or not (entry["eps"] is None or is_number(entry["eps"])):
            raise ValueError(f"the options of attack {entry['attack']} are not those of an attack")
    for part in ("uncertainty", "ensemble"):
        for method, figures in content.get(part, {"methods": {}})["methods"].items():
            known = figures["known"]
            lists = (*known["reliability"].values(), known["risk"])
            numbers = (known["accuracy"], known["ece"], *(value for each in lists for value in each))
            if not all(map(is_number, numbers)):
                raise ValueError(f"the figures of {part}, {method}, are not numbers")


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is a finite number (bool, None, NaN and infinities are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
