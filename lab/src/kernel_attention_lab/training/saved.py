"""Open a run folder and the trained model of a seed, without executing anything from the folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError
from kernel_attention.fields import field_names
from kernel_attention.series import SequenceSplit
from kernel_attention.training.devices import training_device
from kernel_attention.weights import read_weights
from kernel_attention_lab.families import read_keys
from kernel_attention_lab.run_folder import RunFolder
from kernel_attention_lab.training.experiment import Experiment
from kernel_attention_lab.training.facts import read_facts, recorded_data_root, require_same_data
from kernel_attention_lab.training.recipe import BaseRecipe, make_recipe
from kernel_attention_lab.training.run import build_model
from kernel_attention_lab.training.tasks import experiment_class
from kernel_attention_lab.training.time_series_experiment import TimeSeriesExperiment


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
