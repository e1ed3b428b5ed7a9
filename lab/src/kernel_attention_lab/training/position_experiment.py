"""Classification of single positions of generated sequences: the data, the model, the figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.models.positions import PositionClassifier
from kernel_attention.series.outputs import batch_outputs
from kernel_attention.training.task import SameLossTask
from kernel_attention_lab.data.positions.task import (
    PositionBatch,
    fixed_positions,
    training_positions,
)
from kernel_attention_lab.data.texts.text import IGNORED
from kernel_attention_lab.training.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.training.position_recipe import PositionRecipe
from kernel_attention_lab.training.step_recorder import StepRecorder

_DIAGNOSED_AT_ONCE = 4


class PositionLearning(SameLossTask):
    """The cross-entropy of the labelled positions. It logs the loss, the accuracy and each J."""

    def weight(self, batch: PositionBatch) -> int:
        """The labelled positions."""
        return int((batch.targets != IGNORED).sum())

    def _log_step(self, stage: str, batch: PositionBatch) -> Tensor:
        assert isinstance(self.model, PositionClassifier)
        labelled = batch.targets != IGNORED
        logits, targets = self.model.logits_at(batch.inputs, labelled).float(), batch.targets[labelled]
        loss = F.cross_entropy(logits, targets)
        accuracy = (logits.argmax(dim=-1) == targets).float().mean()
        figures = {f"{stage}_loss": loss.detach(), f"{stage}_accuracy": accuracy}
        self.log_dict(figures, len(targets))
        return loss


class PositionExperiment(Experiment):
    """Classification of single positions of generated sequences, described by a ``PositionRecipe``."""

    recipe: PositionRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("in_features", "num_outputs", "max_len")

    @staticmethod
    def build_model(recipe: PositionRecipe, facts: dict[str, Any]) -> PositionClassifier:
        return PositionClassifier(
            facts["in_features"],
            facts["num_outputs"],
            facts["max_len"],
            is_real=recipe.train_tasks()[0].is_real,
            is_causal=recipe.is_causal,
            tied=recipe.tied,
            **recipe.encoder_options(),
        )

    @property
    def metric(self) -> Metric:
        return Metric("accuracy", True)

    def facts(self) -> dict[str, Any]:
        trained, tested = self.recipe.train_tasks(), self.recipe.test_tasks()
        return {
            "dataset": self.recipe.dataset,
            "task": "sequence_labels",
            "in_features": trained[0].in_features,
            "num_outputs": trained[0].num_outputs,
            "max_len": max(task.length for task in [*trained, *tested.values()]),
            "test_sets": list(tested),
        }

    def loaders(self, seed: int) -> Loaders:
        recipe = self.recipe
        train = training_positions(recipe.train_tasks(), recipe.effective_batch, recipe.steps_per_round, seed)
        tested = list(recipe.test_tasks().values())
        return train, fixed_positions(tested, "validation", recipe.evaluation_cases, recipe.effective_batch)

    def task(self, model: Any) -> PositionLearning:
        return PositionLearning(model, self.recipe.train_settings(), self.recipe.learning_rate_factor)

    def recorder(self, folder: Any, seed: int) -> StepRecorder:
        return StepRecorder(folder, self.recipe)

    def evaluate(self, model: PositionClassifier) -> dict[str, Any]:
        """``accuracy`` and ``loss``, means over the test sets, and ``accuracy_NAME`` of every set.

        ``positions_NAME`` is the number of labelled positions of a set.
        """
        figures: dict[str, Any] = {}
        losses, accuracies = [], []
        for name, task in self.recipe.test_tasks().items():
            batches = fixed_positions([task], "test", self.recipe.evaluation_cases, self.recipe.batch_size)
            loss, accuracy, count = measure_positions(model, batches, self.recipe.precision)
            losses.append(loss)
            accuracies.append(accuracy)
            figures |= {f"accuracy_{name}": accuracy, f"positions_{name}": count}
        means = {"accuracy": sum(accuracies) / len(accuracies), "loss": sum(losses) / len(losses)}
        return means | figures

    def batches(self, cases: int) -> Iterable[tuple[Tensor]]:
        """The first cases of every test set, as many of one as of another."""
        tasks = list(self.recipe.test_tasks().values())
        each = max(min(cases // len(tasks), self.recipe.evaluation_cases), 1)
        return [
            (inputs,)
            for task in tasks[:cases]
            for inputs in task.fixed("test", self.recipe.evaluation_cases)
            .inputs[:each]
            .split(_DIAGNOSED_AT_ONCE)
        ]


def measure_positions(
    model: PositionClassifier, batches: Iterable[PositionBatch], precision: str = "32-true"
) -> tuple[float, float, int]:
    """Mean loss and accuracy of the labelled positions, and their number."""
    loss, right, count = 0.0, 0, 0
    for logits, batch in batch_outputs(model, batches, precision):
        labelled = batch.targets != IGNORED
        chosen, targets = logits[labelled], batch.targets[labelled]
        loss += F.cross_entropy(chosen, targets, reduction="sum").item()
        right += int(torch.sum(chosen.argmax(dim=-1) == targets))
        count += len(targets)
    return loss / count, right / count, count
