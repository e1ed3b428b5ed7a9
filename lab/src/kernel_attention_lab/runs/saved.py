"""Open a run folder and the trained model of a seed, without executing anything from the folder."""

from __future__ import annotations

import dataclasses
import os
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError
from kernel_attention.fields import field_names
from kernel_attention.series import SequenceSplit
from kernel_attention.training.processes import training_device
from kernel_attention.weights import read_weights
from kernel_attention_lab.data.archive import resolve_root
from kernel_attention_lab.families import read_keys
from kernel_attention_lab.run_folder import RunFolder, read_json
from kernel_attention_lab.tasks.experiment import Experiment
from kernel_attention_lab.tasks.recipe import BaseRecipe
from kernel_attention_lab.tasks.registry import build_model, experiment_class, make_recipe
from kernel_attention_lab.tasks.time_series import TimeSeriesExperiment


class SavedRun(NamedTuple):
    """``recipe`` and ``facts`` (``data.json``) of a run folder, and its trained seeds."""

    folder: Path
    recipe: BaseRecipe
    facts: dict[str, Any]
    seeds: list[int]

    def experiment(self, data_root: str | Path | None = None) -> Experiment:
        """The run's task with its data loaded, by default from the folder used in training.

        InputError where the data have changed since training.
        """
        root = recorded_data_root(self.folder, data_root)
        experiment = experiment_class(self.recipe.task_name)(self.recipe, root)
        require_same_data(experiment.facts(), self.facts)
        return experiment

    def with_keys(self, keys: dict[str, Any]) -> SavedRun:
        """The same run with other values of its recipe's keys; InputError for those it does not have."""
        for name in keys:
            if name not in field_names(type(self.recipe)):
                raise InputError(f"--{name} is not for runs of task {self.recipe.task_name}")
        return self._replace(recipe=dataclasses.replace(self.recipe, **keys))

    def evaluate(
        self, file: str | None = None, data_root: str | Path | None = None, split: str | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(seed, figures) of every trained seed on the test split, another split, or a labelled file."""
        if file is not None and split is not None:
            raise InputError(f"evaluate takes a file or a split, not both (file {file}, split {split!r})")
        if file is None:
            experiment = self.experiment(data_root)
            if split is not None:
                yield from (
                    (seed, experiment.evaluate_split(self.fast_model(seed), split)) for seed in self.seeds
                )
                return
            yield from ((seed, experiment.evaluate(self.fast_model(seed))) for seed in self.seeds)
            return
        task = experiment_class(self.recipe.task_name)
        for seed in self.seeds:
            yield seed, task.evaluate_file(self.model(seed), Path(file), self.recipe, self.facts)

    def predict(self, file: str | Path, seed: int | None = None) -> list[dict[str, Any]]:
        """One record per case of an unlabelled file, from the model of ``seed`` (by default the first)."""
        task = experiment_class(self.recipe.task_name)
        return task.predict(self.model(seed), Path(file), self.recipe, self.facts)

    def generate(self, prompt: str, model_seed: int | None = None, **choices: Any) -> str:
        """The continuation of a prompt; ``choices`` are those of ``Experiment.generate``."""
        task = experiment_class(self.recipe.task_name)
        return task.generate(self.model(model_seed), prompt, self.recipe, self.facts, **choices)

    def test_split(self, data_root: str | Path | None = None) -> SequenceSplit:
        """The cases that a run on time series reports; InputError where the data have changed."""
        experiment = self.experiment(data_root)
        if not isinstance(experiment, TimeSeriesExperiment):
            raise InputError(f"run {self.folder}: task {self.recipe.task_name} has no split of time series")
        return experiment.test

    def model(self, seed: int | None = None, epoch: int | None = None) -> Any:
        """The best model of ``seed`` (by default the first), or the copy kept of an ``epoch``."""
        if not self.seeds:
            raise InputError(f"run {self.folder}: no trained seed in it yet")
        seed = self.seeds[0] if seed is None else seed
        if seed not in self.seeds:
            raise InputError(f"seed={seed} is not in {self.folder} (trained: {self.seeds})")
        path = RunFolder(self.folder).weights_path(seed)
        if epoch is not None:
            kept = self.kept_epochs(seed)
            if epoch not in kept:
                raise InputError(f"epoch={epoch} of seed {seed} is not in {self.folder} (kept: {kept})")
            path = RunFolder(self.folder).kept_weights(seed)[epoch]
        model = build_model(self.recipe, self.facts)
        try:
            model.load_state_dict(read_weights(path))
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"{path}: does not fit the run's recipe ({reason})") from None
        return model.eval()

    def fast_model(self, seed: int | None = None) -> Any:
        """As ``model``, where the run's recipe would train on this machine."""
        return self.model(seed).to(training_device(self.recipe.accelerator))

    def kept_epochs(self, seed: int) -> list[int]:
        """The epochs of which a seed's weights were kept; 0 is the untrained model."""
        return list(RunFolder(self.folder).kept_weights(seed))


def load_run(folder: str | Path) -> SavedRun:
    """Read a run folder.

    Raises:
        InputError: where it is missing, incomplete or damaged.
    """
    folder = Path(folder)
    recipe = read_config(folder)
    facts = read_facts(folder, recipe.task_name)
    seeds = [seed for seed in recipe.seeds if RunFolder(folder).weights_path(seed).is_file()]
    return SavedRun(folder, recipe, facts, seeds)


def read_config(folder: Path) -> BaseRecipe:
    """The resolved recipe of a run folder."""
    path = RunFolder(folder).config_path
    if not path.is_file():
        raise InputError(f"run {folder}: not a run folder (it has no config.yaml)")
    values = read_keys(path)
    if "dataset" not in values:
        raise InputError(f"{path}: has no key dataset")
    try:
        return make_recipe(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


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
