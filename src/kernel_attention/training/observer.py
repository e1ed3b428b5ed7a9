"""The interface of what watches a training."""

from __future__ import annotations

from typing import Any, ClassVar

from kernel_attention.training.course import Course


class Observer:
    """A watcher of a training. Nothing here does anything; a subclass does.

    Every process has observers of its own.
    """

    can_resume: ClassVar[bool] = False
    """True where it writes checkpoints, so that a signal may stop training after a step."""

    def on_train_start(self, training: Course) -> None:
        """Before the first step, or before the first after a checkpoint."""

    def on_round_start(self, training: Course) -> None:
        """Before the first step of a round, or before the first after a checkpoint."""

    def on_step_start(self, training: Course) -> None:
        """Before a step; its batches have been read."""

    def on_step_end(self, training: Course, batches: list[Any]) -> None:
        """After a step, with the batches that this process has read for it."""

    def on_round_end(self, training: Course) -> None:
        """After a round and its evaluation; ``training.round`` counts it."""

    def on_stop(self, training: Course) -> None:
        """After a step inside a round, when a signal ends training there."""

    def restore(self, state: dict[str, Any]) -> None:
        """Read its part of a checkpoint, before anything else does.

        Raises:
            InputError: for the checkpoint of another run.
        """
