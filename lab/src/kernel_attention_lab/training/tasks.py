"""The tasks of recipes: for each, the class of its recipe and the class of its experiment."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_attention.errors import unknown

if TYPE_CHECKING:
    from kernel_attention_lab.training.experiment import Experiment
    from kernel_attention_lab.training.recipe import BaseRecipe

DEFAULT_TASK = "time_series"


class _Task(NamedTuple):
    """Two ``module:class`` below this package, so that commands that only read recipes import no trainer."""

    recipe: str
    experiment: str


TASKS = {
    "time_series": _Task("time_series_recipe:Recipe", "time_series_experiment:TimeSeriesExperiment"),
    "images": _Task("image_recipe:ImageRecipe", "image_experiment:ImageExperiment"),
    "segmentation": _Task(
        "segmentation_recipe:SegmentationRecipe", "segmentation_experiment:SegmentationExperiment"
    ),
    "language": _Task("language_recipe:LanguageRecipe", "language_experiment:LanguageExperiment"),
    "tokens": _Task("token_recipe:TokenRecipe", "token_experiment:TokenExperiment"),
    "decisions": _Task("decision_recipe:DecisionRecipe", "decision_experiment:DecisionExperiment"),
    "sequence_labels": _Task("position_recipe:PositionRecipe", "position_experiment:PositionExperiment"),
}


def recipe_class(task: Any) -> type[BaseRecipe]:
    """The class of the recipes of a task; InputError for an unknown one."""
    return _load(_task(task).recipe)


def experiment_class(task: Any) -> type[Experiment]:
    """The class of the experiments of a task; InputError for an unknown one."""
    return _load(_task(task).experiment)


def _task(name: Any) -> _Task:
    if not isinstance(name, str) or name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"kernel_attention_lab.training.{module}"), name)
