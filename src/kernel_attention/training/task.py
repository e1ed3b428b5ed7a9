"""A task of training: its loss plus the layers' auxiliary loss, and the figures of a round."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kernel_attention.core.objective import ObjectiveCollector, average_objectives, collect_objectives
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.errors import InputError
from kernel_attention.training.course import Course
from kernel_attention.training.processes import Processes
from kernel_attention.training.settings import TrainSettings

# A small model on a CPU has more calls than arithmetic in an optimizer that takes one tensor after another.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "radam": functools.partial(torch.optim.RAdam, foreach=True),
    "adam": functools.partial(torch.optim.Adam, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
}


class Figures:
    """Sums of figures and of their weights, in float64 where the device has it.

    They stay on the device until they are read, so that a step does not wait for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.counts = True
        """True where what is logged counts; not for a batch that only keeps a process in step with others."""

    @torch.no_grad()
    def add(self, name: str, value: Tensor | float, weight: float = 1) -> None:
        """Add a value with its weight."""
        value = torch.as_tensor(value).detach()
        value = value.to(_accumulator(value.device))
        if not self.counts:
            value, weight = torch.zeros_like(value), 0
        pair = torch.stack([value * weight, torch.full_like(value, weight)])
        # Sums that a resumed run goes on from are on its GPU, also where a figure is counted on the CPU.
        self._sums[name] = self._sums[name].to(pair.device) + pair if name in self._sums else pair

    def state(self) -> dict[str, list[float]]:
        """(sum, weight) of every figure."""
        return {name: pair.tolist() for name, pair in self._sums.items()}

    def restore(self, state: Mapping[str, list[float]], device: torch.device) -> None:
        """Go on from these sums."""
        self._sums = {
            name: torch.tensor(pair, dtype=_accumulator(device), device=device)
            for name, pair in state.items()
        }

    def clear(self) -> None:
        """Begin a new round."""
        self._sums = {}

    def means(self, processes: Processes) -> dict[str, float]:
        """The weighted mean of every figure over the batches of all processes, in the order of the names."""
        own = self.state()
        names = sorted(own)
        sums = processes.total([number for name in names for number in own[name]])
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return {
            name: value / weight if weight else float("nan")
            for name, (value, weight) in zip(names, pairs, strict=True)
        }


def _accumulator(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class TrainingTask(nn.Module):
    """The common part of tasks: optimizer, schedule, figures, and J of the layers.

    A subclass has ``training_step(batch)``, which returns the task's own loss, and
    ``validation_step(batch)``. Both log their figures.

    Args:
        model: a model that has ``layers``, or whose ``encoder`` has them; each has an ``attention``.
        settings: of the loop.
        schedule: the factor of the learning rate at a step, counted from 0; None: a constant rate.

    Attributes:
        trainer: the loop that trains the task, while it does.
        figures: sums of what has been logged in this round.
        share: what the task's own loss counts for in the step. It is 1 where a step has one batch in one
            process. Otherwise the loop sets it, so that the parts of a batch count by their ``weight``.
    """

    trainer: Course
    share: float = 1.0

    def __init__(
        self, model: nn.Module, settings: TrainSettings, schedule: Callable[[int], float] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.schedule = schedule
        self.figures = Figures()
        self.objectives = {
            f"objective_layer_{index}": layer.attention
            for index, layer in enumerate(getattr(model, "encoder", model).layers)  # type: ignore[arg-type]
            if isinstance(layer.attention, PenalizedAttention)
        }

    @abstractmethod
    def training_step(self, batch: Any) -> Tensor:
        """The task's loss of a batch, without the layers' penalties."""

    @abstractmethod
    def validation_step(self, batch: Any) -> None:
        """Log the figures of a batch."""

    def forward(self, batch: Any) -> Tensor:
        """The loss of a step on a batch, by the name that data parallelism calls."""
        with collect_objectives() as objectives:
            loss = self.training_step(batch)
        return self.objective(loss, batch, objectives)

    def weight(self, batch: Any) -> int:
        """How many terms the task's loss of this batch is the mean of: its cases, tokens or pixels."""
        return self.cases(batch)

    def cases(self, batch: Any) -> int:
        """The sequences or images of a batch."""
        return len(batch[0])

    def part(self, batch: Any, number: int, parts: int) -> Any:
        """The tokens of part ``number`` of the sequences of a batch, of ``parts`` consecutive ones."""
        raise InputError(
            f"sequence_shards={parts}: {type(self).__name__} has no sequences that can be divided"
        )

    def log(self, name: str, value: Tensor | float, weight: float = 1) -> None:
        """Add a figure to the round's weighted mean."""
        self.figures.add(name, value, weight)

    def log_dict(self, figures: Mapping[str, Tensor | float], weight: float = 1) -> None:
        """``log`` each of these."""
        for name, value in figures.items():
            self.log(name, value, weight)

    def objective(self, loss: Tensor, batch: Any, objectives: ObjectiveCollector) -> Tensor:
        """The loss of a step: loss + sum over layers of eta J^2 (Primal-Attention, eq. 10). Logs each J.

        Where several processes train, J is the mean over all of their sequences.
        """
        cases = self.cases(batch)
        replicas = self.trainer.replicas if hasattr(self, "trainer") else None
        if replicas is not None:
            average_objectives(objectives, self.trainer.counted(cases), replicas)
        for name, layer in self.objectives.items():
            if found := objectives.of(layer):
                self.log(name, torch.stack(found).mean(), cases)
        penalty = objectives.total(self.settings.auxiliary_reduction)
        return self.share * loss + penalty / self.settings.accumulate

    @property
    def evaluated(self) -> nn.Module:
        """The model whose weights are evaluated and saved."""
        return self.model

    def parameter_groups(self) -> Any:
        """Arguments of the optimizer: parameters, or groups of them with options of their own."""
        return self.model.parameters()

    def learning_rate_factor(self) -> Callable[[int], float] | None:
        """The factor of the learning rate at a step, counted from 0; None for a constant rate."""
        return self.schedule

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR | None]:
        """The optimizer, and its schedule where the rate is not constant."""
        settings = self.settings
        optimizer = OPTIMIZERS[settings.optimizer](
            self.parameter_groups(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        factor = self.learning_rate_factor()
        return optimizer, None if factor is None else torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def after_step(self) -> None:
        """Act after each step of the optimizer."""

    def on_train_start(self) -> None:
        """Act before the first step of this process."""

    def on_validation_epoch_start(self) -> None:
        """Act before an evaluation."""

    def on_validation_epoch_end(self) -> None:
        """Act after an evaluation: on figures of all its cases together, say."""


class AveragedTask(TrainingTask):
    """A task that may evaluate an exponential moving average of its weights instead of the weights."""

    average: AveragedModel | None

    def start_average(self, decay: float) -> None:
        """Average with this decay; 0 evaluates the weights themselves."""
        self.average = None
        if decay:
            average = get_ema_multi_avg_fn(decay)
            self.average = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
            self.average.requires_grad_(False)  # no gradient reaches it, and no process waits for one

    @property
    def evaluated(self) -> nn.Module:
        """The moving average of the weights, where there is one."""
        return self.model if self.average is None else self.average.module

    def after_step(self) -> None:
        """Move the average."""
        if self.average is not None:
            self.average.update_parameters(self.model)


class SameLossTask(TrainingTask):
    """A task that measures the batches of training and of evaluation in the same way."""

    def training_step(self, batch: Any) -> Tensor:
        """The task's loss."""
        return self._log_step("train", batch)

    def validation_step(self, batch: Any) -> None:
        """Log the figures of a batch."""
        self._log_step("val", batch)

    @abstractmethod
    def _log_step(self, stage: str, batch: Any) -> Tensor:
        """The task's loss, logged with the task's other figures under names that begin with the stage."""
