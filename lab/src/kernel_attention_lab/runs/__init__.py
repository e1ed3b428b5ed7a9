"""Runs: a recipe trained into a folder, and what is done with a trained one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention_lab import lazy_names

if TYPE_CHECKING:
    from kernel_attention_lab.runs.recipe_files import list_recipes, read_recipe, recipe_text
    from kernel_attention_lab.runs.recorder import RunRecorder
    from kernel_attention_lab.runs.run import train
    from kernel_attention_lab.runs.saved import SavedRun, load_run

__all__ = ["RunRecorder", "SavedRun", "list_recipes", "load_run", "read_recipe", "recipe_text", "train"]

# torch, Lightning and scikit-learn take seconds to import, and some commands only read recipes.
__getattr__ = lazy_names(
    __name__,
    recipe_files=("list_recipes", "read_recipe", "recipe_text"),
    recorder=("RunRecorder",),
    run=("train",),
    saved=("SavedRun", "load_run"),
)
