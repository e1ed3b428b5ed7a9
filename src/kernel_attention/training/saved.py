"""A run folder read back: the trained model of a seed, without executing anything from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.data import SequenceSplit, load_time_series
from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.training.facts import describe_data, read_facts, require_same_data
from kernel_attention.training.files import read_weights
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

    def test_split(self, data_root: str | Path | None = None) -> SequenceSplit:
        """The test split of the run's data set; InputError where the data has changed since training."""
        data = load_time_series(self.recipe.dataset, data_root=data_root, missing=self.recipe.missing)
        require_same_data(describe_data(data), self.facts)
        return data.test

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
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: does not fit the run's recipe ({reason})") from None
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
