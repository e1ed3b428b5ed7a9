"""A run folder read back: the trained model of a seed, without executing anything from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.training.files import read_json, read_weights
from kernel_attention.training.recipe import Recipe, read_keys
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
    recipe, facts = read_config(folder), read_facts(folder)
    seeds = [seed for seed in recipe.seeds if (folder / f"seed-{seed}" / "best.safetensors").is_file()]
    return SavedRun(folder, recipe, facts, seeds)


def read_config(folder: Path) -> Recipe:
    """The resolved recipe of a run folder."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise InputError(f"run {folder}: not a run folder (it has no config.yaml)")
    values = read_keys(path)
    if "dataset" not in values:
        raise InputError(f"{path}: has no key dataset")
    try:
        return Recipe(**values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def read_facts(folder: Path) -> dict[str, Any]:
    """What the run's models depend on of its data: the content of ``data.json``, checked."""
    path = folder / "data.json"
    facts = read_json(path)
    names = facts.get("class_names") if isinstance(facts, dict) else None
    is_right = (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and facts.get("task") == ("classification" if names else "regression")
        and all(isinstance(facts.get(key), int) and facts[key] > 0 for key in ("num_features", "max_len"))
    )
    if not is_right:
        raise InputError(f"{path}: does not describe a data set (num_features, max_len, task, class_names)")
    return facts
