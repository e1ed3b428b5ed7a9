"""The kinds of tasks, a file each: settings, data, loss, metrics, and the facts for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names

if TYPE_CHECKING:
    from kernel_attention_lab.tasks.experiment import Experiment, Metric
    from kernel_attention_lab.tasks.recipe import PROTOCOLS, BaseRecipe, EpochRecipe, StepRecipe
    from kernel_attention_lab.tasks.registry import make_recipe, register_task, task_names
    from kernel_attention_lab.tasks.time_series import Recipe

__all__ = [
    "PROTOCOLS",
    "BaseRecipe",
    "EpochRecipe",
    "Experiment",
    "Metric",
    "Recipe",
    "StepRecipe",
    "make_recipe",
    "register_task",
    "task_names",
]

# A task's file brings torch, which takes seconds to import, and some commands only read recipes.
__getattr__ = lazy_names(
    __name__,
    experiment=("Experiment", "Metric"),
    recipe=("PROTOCOLS", "BaseRecipe", "EpochRecipe", "StepRecipe"),
    registry=("make_recipe", "register_task", "task_names"),
    time_series=("Recipe",),
)
