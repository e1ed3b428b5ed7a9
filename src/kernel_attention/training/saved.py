"""A run folder read back: the trained model of a seed, without executing anything from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kernel_attention.errors import InputError, unknown
from kernel_attention.models import SequenceClassifier
from kernel_attention.training.files import read_json, read_weights
from kernel_attention.training.recipe import Recipe, recipe_fields
from kernel_attention.training.run import build_model


class SavedRun(NamedTuple):
    """``recipe`` and ``facts`` (``data.json``) of a run folder, and its trained seeds."""

    folder: Path
    recipe: Recipe
    facts: dict[str, Any]
    seeds: list[int]

    @property
    def is_regression(self) -> bool:
        """Whether the model gives values instead of classes."""
        return self.facts["task"] == "regression"

    def model(self, seed: int | None = None) -> SequenceClassifier:
        """The best model of ``seed``, by default the first one."""
        seed = self.seeds[0] if seed is None and self.seeds else seed
        if seed not in self.seeds:
            raise InputError(f"seed={seed} is not in {self.folder} (trained: {self.seeds or 'none'})")
        model = build_model(self.recipe, self.facts)
        path = self.folder / f"seed-{seed}" / "best.safetensors"
        try:
            model.load_state_dict(read_weights(path))
        except RuntimeError as error:
            raise InputError(f"{path}: does not fit the run's recipe ({str(error).splitlines()[0]})") from None
        return model.eval()


def load_run(folder: str | Path) -> SavedRun:
    """Read a run folder.

    Raises:
        InputError: where it is missing, incomplete or damaged.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise InputError(f"run {folder}: no run folder (it has no config.yaml)")
    recipe, facts = read_config(folder), read_json(folder / "data.json")
    seeds = [seed for seed in recipe.seeds if (folder / f"seed-{seed}" / "best.safetensors").is_file()]
    return SavedRun(folder, recipe, facts, seeds)


def read_config(folder: Path) -> Recipe:
    """The resolved recipe of a run folder."""
    try:
        values = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{folder / 'config.yaml'}: not readable ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict) or "dataset" not in values:
        raise InputError(f"{folder / 'config.yaml'}: not a resolved recipe")
    for key in values:
        if key not in recipe_fields():
            raise unknown(f"key of {folder / 'config.yaml'}", key, recipe_fields())
    return Recipe(**values)
