"""The course of a training, as its task and its observers see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.training.processes import Processes
from kernel_attention.training.progress import ProgressBar
from kernel_attention.training.settings import TrainSettings


class Course(Protocol):
    """A training that is going on.

    Attributes:
        settings: of the loop.
        processes: that train together.
        bar: the progress bar.
        round: rounds done.
        step: steps done.
        steps_in_round: of these, since the last whole round.
        steps_per_round: steps of a round.
        total_steps: steps of all rounds.
        replicas: the group of processes with other sequences, over which J is averaged; None for none.
        should_stop: set by a task or an observer to end training.
    """

    settings: TrainSettings
    processes: Processes
    bar: ProgressBar
    round: int
    step: int
    steps_in_round: int
    steps_per_round: int
    total_steps: int
    replicas: SequenceGroup | None
    should_stop: bool

    def counted(self, cases: int) -> int:
        """The cases of the batch at hand, or 0 where it only keeps this process in step with the others."""
        ...

    def figures(self) -> dict[str, float]:
        """The means of what the tasks of all processes have logged in this round."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The evaluated weights under the model's own names. All processes must call it."""
        ...

    def save(self, path: Path, more: dict[str, Any]) -> None:
        """Write a checkpoint with ``more`` in it. All processes must call it; the first one writes."""
        ...
