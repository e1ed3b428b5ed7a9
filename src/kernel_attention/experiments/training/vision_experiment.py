"""What the experiments with a vision transformer share: the classes of the data, and which cases train."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from kernel_attention.experiments.training.experiment import Experiment
from kernel_attention.experiments.training.image_recipe import VisionRecipe


class VisionExperiment(Experiment):
    """Learning from images, described by a ``VisionRecipe``.

    A subclass sets ``data``, with the splits ``train``, ``validation`` (or None) and ``test``, and ``test``,
    the test cases that are evaluated.
    """

    recipe: VisionRecipe
    has_classes: ClassVar[bool] = True
    data: Any
    test: Any

    @staticmethod
    @abstractmethod
    def hold_out(split: Any, fraction: float, seed: int) -> tuple[Any, Any]:
        """(the rest, about ``fraction`` of the cases), a function of ``seed``."""

    def split(self, seed: int) -> tuple[Any, Any]:
        """(training cases, cases that select the weights) under the recipe's protocol."""
        recipe, data = self.recipe, self.data
        if recipe.protocol == "paper":
            return data.train.evenly(recipe.train_cases), self.test
        if data.validation is not None:
            train, held_out = data.train, data.validation
        else:
            train, held_out = self.hold_out(data.train, recipe.validation_fraction, seed)
        return train.evenly(recipe.train_cases), held_out.evenly(recipe.evaluation_cases)
