"""Recipes, the run, and what it leaves behind. Needs the extras ``train`` and ``timeseries``."""

from kernel_attention.training.evaluation import evaluate_split, predict_outputs
from kernel_attention.training.fit import Interrupted, fit
from kernel_attention.training.module import SequenceTask
from kernel_attention.training.recipe import PROTOCOLS, Recipe, list_recipes, read_recipe
from kernel_attention.training.recorder import RunRecorder
from kernel_attention.training.run import train

__all__ = [
    "PROTOCOLS",
    "Interrupted",
    "Recipe",
    "RunRecorder",
    "SequenceTask",
    "evaluate_split",
    "fit",
    "list_recipes",
    "predict_outputs",
    "read_recipe",
    "train",
]
