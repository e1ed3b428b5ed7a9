"""The settings of the training loop, and the schedule of its learning rate."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, NonNegative, Positive, check_fields

Processes = Annotated[int, Field(ge=1, le=4096)]
Threads = Annotated[int, Field(ge=0, le=4096)]  # a system that cannot start them ends the process
OptimizerName = Literal["radam", "adam", "adamw", "sgd"]
Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "gpu", "cuda", "mps"]
Strategy = Literal["auto", "ddp", "fsdp"]


@dataclass(frozen=True)
class TrainSettings:
    """All that the loop needs to know of a training.

    Args:
        rounds: passes over the training batches, each of which ends in a row of metrics.
        rounds_per_evaluation: rounds from one evaluation to the next.
        optimizer: radam, adam, adamw or sgd (with momentum 0.9).
        learning_rate: the constant rate, or the largest of the task's schedule.
        weight_decay: weight decay of the optimizer.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        auxiliary_reduction: sum or mean over the layers of eta J^2.
        precision: 32-true, a mixed precision, or auto: bf16-mixed where the processor has it.
        accelerator: where the model is trained; auto takes the fastest one available.
        devices: processes on every machine, each with a device of its own.
        num_nodes: machines.
        strategy: ddp, each process with a copy of the model; fsdp, each with a part of every weight; or auto,
            which is ddp.
        accumulate: passes in every step, whose gradients add up.
        sequence_shards: processes that share every sequence; divides their number.
        threads: CPU threads of PyTorch; 0 leaves the choice to PyTorch.
        leaves_unused: whether a step may leave parameters without a gradient, as mixtures of experts do.

    Raises:
        InputError: for a value of the wrong type or out of its range.
    """

    rounds: Count
    rounds_per_evaluation: Count = 1
    optimizer: OptimizerName = "adamw"
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    gradient_clip: NonNegative = 0.0
    auxiliary_reduction: Literal["sum", "mean"] = "sum"
    precision: Precision = "32-true"
    accelerator: Accelerator = "auto"
    devices: Processes = 1
    num_nodes: Processes = 1
    strategy: Strategy = "auto"
    accumulate: Count = 1
    sequence_shards: Count = 1
    threads: Threads = 0
    leaves_unused: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.processes % self.sequence_shards:
            raise InputError(
                f"sequence_shards={self.sequence_shards} must divide the number of processes, "
                f"{self.processes} (devices={self.devices}, num_nodes={self.num_nodes})"
            )

    @property
    def processes(self) -> int:
        """Processes that train one model together."""
        return self.devices * self.num_nodes


def scheduled_factor(
    schedule: Literal["constant", "cosine"], step: int, warmup: int, steps: int, least: float = 0.0
) -> float:
    """The factor of the learning rate at step number ``step``, counted from 0.

    It grows linearly from ``least`` / 10 in ``warmup`` steps; then it is 1, or falls along a cosine to
    ``least`` at the end of ``steps``.
    """
    if step < warmup:
        return least / 10 + (1 - least / 10) * (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
