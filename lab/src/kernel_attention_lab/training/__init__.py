"""Recipes, runs, and run folders. Needs the extras ``train`` and ``timeseries``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names
from kernel_attention_lab.training.recipe import (
    PROTOCOLS,
    BaseRecipe,
    StepRecipe,
    make_recipe,
)
from kernel_attention_lab.training.recipe_files import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.training.time_series_recipe import Recipe

if TYPE_CHECKING:
    from kernel_attention_lab.training.evaluation import evaluate_split
    from kernel_attention_lab.training.experiment import Experiment, Metric
    from kernel_attention_lab.training.recorder import RunRecorder
    from kernel_attention_lab.training.run import train

__all__ = [
    "PROTOCOLS",
    "BaseRecipe",
    "Experiment",
    "Metric",
    "Recipe",
    "RunRecorder",
    "StepRecipe",
    "evaluate_split",
    "list_recipes",
    "make_recipe",
    "read_recipe",
    "recipe_text",
    "train",
]

# torch, Lightning and scikit-learn take seconds to import, and some commands only read recipes.
__getattr__ = lazy_names(
    __name__,
    evaluation=("evaluate_split",),
    experiment=("Experiment", "Metric"),
    recorder=("RunRecorder",),
    run=("train",),
)
