"""The recipe of the classification of positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from kernel_attention.errors import InputError
from kernel_attention.fields import Count
from kernel_attention_lab.data.positions import make_position_task
from kernel_attention_lab.data.positions.task import PositionTask
from kernel_attention_lab.training.recipe import StepRecipe


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
