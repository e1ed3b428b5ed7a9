"""Classification of single positions of generated sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.fields import Count
from kernel_attention.models.tokens import PositionClassifier
from kernel_attention.series.outputs import batch_outputs
from kernel_attention.training.task import SameLossTask
from kernel_attention_lab.data.positions import make_position_task
from kernel_attention_lab.data.positions.task import (
    PositionBatch,
    PositionTask,
    fixed_positions,
    training_positions,
)
from kernel_attention_lab.data.texts.text import IGNORED
from kernel_attention_lab.tasks.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.tasks.recipe import StepRecipe
from kernel_attention_lab.tasks.registry import register_task

_DIAGNOSED_AT_ONCE = 4


@dataclass(frozen=True)
class PositionRecipe(StepRecipe):
    """Classification of single positions of generated sequences.

    Args:
        dataset: mqar, induction_heads, selective_copying, long_range_copy, majority, parity or
            noisy_retrieval.
        options: options of the data set, such as {vocabulary: 256}.
        train_at: options of the training batches; every step draws one entry. None: ``options`` alone.
        test_at: options of the validation and test sets, one set an entry. None: as ``train_at``.
        is_causal: whether a position reads only those up to it.
        tied: whether the classifier has the weights of the embedding, for data sets whose classes are tokens.
        evaluation_cases: sequences of each validation and each test set.

    The other keys are those of ``StepRecipe``.
    """

    task_name: ClassVar[str] = "sequence_labels"

    attention: Any = "softmax"
    norm_first: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    train_at: list[dict[str, Any]] = field(default_factory=list)
    test_at: list[dict[str, Any]] = field(default_factory=list)
    is_causal: bool = True
    tied: bool = False
    evaluation_cases: Count = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol != "holdout":
            raise InputError(
                f"protocol={self.protocol!r}: a generated data set has a validation set, use holdout"
            )
        tasks = [*self.train_tasks(), *self.test_tasks().values()]
        if len({(task.in_features, task.num_outputs) for task in tasks}) > 1:
            raise InputError(
                "train_at and test_at change the number of tokens, channels or classes; all sets of a model "
                "must agree on it"
            )

    @property
    def protocol_text(self) -> str:
        return "the best step is chosen on the validation sets; the test sets are read once, at the end"

    def train_tasks(self) -> list[PositionTask]:
        """The tasks that training batches are drawn from."""
        return [self._task(entry) for entry in self.train_at or [{}]]

    def test_tasks(self) -> dict[str, PositionTask]:
        """The task of every test set by the set's name, such as ``length_64_items_4``."""
        entries = self.test_at or self.train_at or [{}]
        tasks = {point_name(entry): self._task(entry) for entry in entries}
        if len(tasks) < len(entries):
            raise InputError("test_at (or train_at, where it is not given) has an entry twice")
        return tasks

    def _task(self, entry: dict[str, Any]) -> PositionTask:
        return make_position_task(self.dataset, self.options | entry)


def point_name(entry: dict[str, Any]) -> str:
    """``length_64_items_4`` for {length: 64, items: 4}; ``all`` for no option."""
    return "_".join(f"{key}_{value}" for key, value in entry.items()) or "all"


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
        metrics = {f"{stage}_loss": loss.detach(), f"{stage}_accuracy": accuracy}
        self.log_dict(metrics, len(targets))
        return loss


@register_task(PositionRecipe)
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

    def evaluate(self, model: PositionClassifier) -> dict[str, Any]:
        """``accuracy`` and ``loss``, means over the test sets, and ``accuracy_NAME`` of every set.

        ``positions_NAME`` is the number of labelled positions of a set.
        """
        metrics: dict[str, Any] = {}
        losses, accuracies = [], []
        for name, task in self.recipe.test_tasks().items():
            batches = fixed_positions([task], "test", self.recipe.evaluation_cases, self.recipe.batch_size)
            loss, accuracy, count = measure_positions(model, batches, self.recipe.precision)
            losses.append(loss)
            accuracies.append(accuracy)
            metrics |= {f"accuracy_{name}": accuracy, f"positions_{name}": count}
        means = {"accuracy": sum(accuracies) / len(accuracies), "loss": sum(losses) / len(losses)}
        return means | metrics

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
