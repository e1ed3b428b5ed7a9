"""What is told of the course of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kernel_attention_lab.training.fit import Training


class Observer:
    """Is told of the course of a training. Nothing here does anything; a subclass does.

    Every process tells its own observers.
    """

    can_resume: ClassVar[bool] = False
    """Whether it writes checkpoints, so that a signal may stop training after a step."""

    def on_train_start(self, training: Training) -> None:
        """Before the first step, or before the first after a checkpoint."""

    def on_round_start(self, training: Training) -> None:
        """Before the first step of a round, or before the first after a checkpoint."""

    def on_step_start(self, training: Training) -> None:
        """Before a step; its batches have been read."""

    def on_step_end(self, training: Training, batches: list[Any]) -> None:
        """After a step, with the batches that this process has read for it."""

    def on_round_end(self, training: Training) -> None:
        """After a round and its evaluation; ``training.round`` counts it."""

    def on_stop(self, training: Training) -> None:
        """After a step inside a round, when a signal ends training there."""

    def restore(self, state: dict[str, Any]) -> None:
        """Read its part of a checkpoint."""
