"""One optimisation: a task, its batches, the loop over them.

Lightning Fabric gives the loop its device, precision and data parallelism. The loop itself is here, because
what a run promises depends on the order of its parts: a step is never half done, a checkpoint is of a whole
step, and several processes do what one would do with their batches together.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.core.sharding import ReadsSequence, shard_sequence
from kernel_attention.errors import InputError
from kernel_attention.training.checkpoint import StopRequest, read_state, write_state
from kernel_attention.training.course import Observer, ProgressBar
from kernel_attention.training.modes import get_generators, plain_modes, set_generators
from kernel_attention.training.processes import ALONE, Processes, ProcessPlace
from kernel_attention.training.samplers import Share, shared_loader
from kernel_attention.training.settings import TrainSettings
from kernel_attention.training.task import TrainingTask

if TYPE_CHECKING:  # Fabric takes seconds to import, and some programs train nothing
    from lightning_fabric import Fabric


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during training.

    It is a KeyboardInterrupt, so code that catches Exception does not catch it.
    """


def make_fabric(settings: TrainSettings, place: ProcessPlace) -> Fabric:
    """The device, the precision and the strategy of a training, for the process at this place.

    Raises:
        InputError: for an accelerator that this machine does not have.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    from kernel_attention.training.processes import resolve_precision
    from kernel_attention.training.strategies import PlaceEnvironment, make_strategy

    try:
        fabric = Fabric(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=make_strategy(settings),
            precision=resolve_precision(settings),
            plugins=[PlaceEnvironment(place)] if place.world > 1 else None,
        )
    except (MisconfigurationException, ImportError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        asked = f"accelerator={settings.accelerator!r}"
        if settings.processes > 1:
            asked += f" with devices={settings.devices} and strategy={settings.strategy!r}"
        raise InputError(f"{asked} cannot be used here: {reason}") from None
    # A model centres its input before autocast narrows it; Fabric would narrow input and targets first.
    fabric.strategy.precision.convert_input = lambda data: data  # type: ignore[method-assign]
    return fabric


def check_trainer(settings: TrainSettings, place: ProcessPlace | None = None) -> None:
    """InputError where this machine cannot train the settings."""
    make_fabric(settings, place or ProcessPlace(0, settings.processes, 0, settings.devices))


def fit(
    task: TrainingTask,
    train_batches: DataLoader,
    val_batches: DataLoader | None,
    *,
    observers: Sequence[Observer] = (),
    checkpoint: Path | None = None,
    processes: Processes = ALONE,
    progress: bool = True,
) -> None:
    """Train ``task``, from ``checkpoint`` where one is given.

    Args:
        task: the model with its loss.
        train_batches: a round of batches, each of the sequences of a step over all processes.
        val_batches: the batches of an evaluation; None: no round is evaluated.
        observers: what is told of the course of training, in this order.
        checkpoint: the state to go on from.
        processes: that train together.
        progress: show a progress bar.

    Raises:
        Interrupted: Ctrl-C or SIGTERM.
    """
    settings, place = task.settings, processes.place
    if settings.threads or place.world > 1:
        torch.set_num_threads(settings.threads or max((os.cpu_count() or 1) // place.local_world, 1))
    with plain_modes(), ProgressBar(shown=progress and place.is_first) as bar:
        training = Training(task, train_batches, val_batches, observers, processes, bar)
        try:
            if checkpoint is not None:
                training.restore(read_state(checkpoint))
            with training.stop.listening(any(observer.can_resume for observer in observers)):
                training.run()
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            training.close()


class Training:
    """The loop. A round is a pass over the training batches, with the evaluation behind it.

    A step reads one batch of all processes together. Each takes its share, in ``accumulate`` passes. Losses
    count by how many cases, tokens or pixels they are the mean of, so the sum of the gradients is that of one
    process with the whole batch. The attributes are those of ``Course``.
    """

    def __init__(
        self,
        task: TrainingTask,
        train_batches: DataLoader,
        val_batches: DataLoader | None,
        observers: Sequence[Observer],
        processes: Processes,
        bar: ProgressBar,
    ) -> None:
        self.task, self.settings = task, task.settings
        self.train_batches, self.val_batches = train_batches, val_batches
        self.observers, self.processes, self.bar = observers, processes, bar
        self.round = self.step = self.steps_in_round = 0
        self.steps_per_round = len(train_batches)
        self.total_steps = self.steps_per_round * self.settings.rounds
        self.should_stop = False
        self.stop = StopRequest()
        task.trainer = self
        self.fabric = make_fabric(self.settings, processes.place)
        self.fabric.launch()
        if processes.sharing is not None:
            shard_sequence(task, processes.sharing)
        self.replicas = None if processes.alike is None else SequenceGroup(processes.alike)
        self.module = self.fabric.setup_module(task)
        optimizer, self.schedule = task.make_optimizer()
        self.optimizer: Any = self.fabric.setup_optimizers(optimizer)
        self._counts = True

    def run(self) -> None:
        """Train to the last round, or until something stops it."""
        self.task.on_train_start()
        self._tell("on_train_start")
        while self.round < self.settings.rounds and not self.should_stop:
            self._train_round()
            if self.val_batches is not None and self.is_evaluated:
                self._evaluate()
            self.round, self.steps_in_round = self.round + 1, 0
            self._tell("on_round_end")
            self.should_stop, stopped = self._any(self.should_stop, self.stop.is_made)
            if stopped:
                raise Interrupted

    @property
    def is_evaluated(self) -> bool:
        """True where the evaluation belongs to the round that is being done."""
        return (self.round + 1) % self.settings.rounds_per_evaluation == 0

    def _train_round(self) -> None:
        self.task.train()
        if not self.steps_in_round:
            self.task.figures.clear()
        self._tell("on_round_start")
        sampler: Any = self.train_batches.sampler
        sampler.set_epoch(self.round)
        if self.steps_in_round:
            sampler.skip(self.steps_in_round, self.train_batches.batch_size or 1)
        self.bar.start_round(self.round, self.settings.rounds, self.steps_per_round, self.steps_in_round)
        shares = self._shares(self.train_batches, self.settings.accumulate)
        while passes := list(islice(shares, self.settings.accumulate)):
            weights = [self.task.weight(share.batch) if share.counts else 0 for share in passes]
            total, stopped, enough = self._sum(sum(weights), self.stop.is_made, self.should_stop)
            if stopped and self.steps_in_round:
                self._tell("on_stop")
                raise Interrupted
            if enough:
                return
            self._tell("on_step_start")
            self._step(passes, weights, total)
            self.step, self.steps_in_round = self.step + 1, self.steps_in_round + 1
            for observer in self.observers:
                observer.on_step_end(self, [share.batch for share in passes if share.counts])
            self.bar.advance()

    def _step(self, passes: list[Share], weights: list[int], total: float) -> None:
        """Gradients of every pass, and one step of the optimizer."""
        self.optimizer.zero_grad()
        for number, (share, weight) in enumerate(zip(passes, weights, strict=True), start=1):
            self._counts = self.task.figures.counts = share.counts
            is_shared = self.settings.processes * self.settings.accumulate > 1
            self.task.share = weight * self.processes.place.world / max(total, 1) if is_shared else 1.0
            with self.fabric.no_backward_sync(self.module, enabled=number < len(passes)):
                self.fabric.backward(self.module(self._on_device(share.batch)))
        if self.settings.gradient_clip:
            self.fabric.clip_gradients(
                self.module, self.optimizer, max_norm=self.settings.gradient_clip, error_if_nonfinite=False
            )
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.task.after_step()

    @torch.no_grad()
    def _evaluate(self) -> None:
        assert self.val_batches is not None
        self.task.eval()
        self.task.on_validation_epoch_start()
        for share in self._shares(self.val_batches):
            self._counts = self.task.figures.counts = share.counts
            with self.fabric.autocast():
                self.task.validation_step(self._on_device(share.batch))
        self.task.figures.counts = True
        self.task.on_validation_epoch_end()

    def _on_device(self, batch: Any) -> Any:
        """The batch, or this process's part of its sequences, on the device."""
        shards = self.settings.sequence_shards
        return self.fabric.to_device(
            batch if shards == 1 else self.task.part(batch, self.processes.shard, shards)
        )

    def counted(self, cases: int) -> int:
        """The cases of the batch at hand, or 0 where it only keeps this process in step with the others."""
        return cases if self._counts else 0

    def figures(self) -> dict[str, float]:
        """The means of what the tasks of all processes have logged in this round."""
        return self.task.figures.means(self.processes)

    def save(self, path: Path, more: dict[str, Any]) -> None:
        """Write the state that ``restore`` reads. All processes must call it; the first one writes.

        Args:
            path: of the checkpoint.
            more: what the caller keeps in it.
        """
        from kernel_attention.training.strategies import module_state, optimizer_state

        state = {
            "global_step": self.step,
            "round": self.round,
            "steps_in_round": self.steps_in_round,
            "figures": self.processes.gathered(self.task.figures.state()),
            "generators": self.processes.gathered(get_generators()),
            "state_dict": module_state(self.task),
            "optimizer": optimizer_state(self.optimizer.optimizer),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "precision": self.fabric.strategy.precision.state_dict(),
            **more,
        }
        if self.processes.is_first:
            write_state(path, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from this state, with the random numbers that the interrupted run would have had."""
        from kernel_attention.training.strategies import load_module_state, load_optimizer_state

        for observer in self.observers:
            observer.restore(state)
        rank = self.processes.place.rank
        self.step, self.round = state["global_step"], state["round"]
        self.steps_in_round = state["steps_in_round"]
        self.task.figures.restore(state["figures"][rank], self.fabric.device)
        load_module_state(self.task, state["state_dict"])
        load_optimizer_state(self.optimizer.optimizer, state["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        set_generators(state["generators"][rank])

    def weights(self) -> dict[str, torch.Tensor]:
        """The evaluated weights under the model's own names. All processes must call it."""
        from kernel_attention.training.strategies import module_state

        return module_state(self.task.evaluated)

    def close(self) -> None:
        """Give the task back as a plain module."""
        self.fabric.strategy.teardown()
        for module in self.task.modules():
            if isinstance(module, ReadsSequence):
                module.sequence_group = None
        del self.task.trainer
        self.task.share = 1.0
        del self.module, self.optimizer, self.schedule
        if self.processes.place.world > 1:
            gc.collect()  # a wrapper that outlives its process group waits for it forever

    def _shares(self, batches: DataLoader, passes: int = 1) -> Iterator[Share]:
        replicas = self.processes.replicas
        if replicas * passes == 1:
            return (Share(batch) for batch in batches)
        return iter(shared_loader(batches, self.processes.replica, replicas, passes))

    def _sum(self, weight: int, *flags: bool) -> tuple[float, ...]:
        """The sum of the weights over all processes, and of the flags. It is the same number on all."""
        return tuple(self.processes.total([float(number) for number in (weight, *flags)]))

    def _any(self, *flags: bool) -> tuple[bool, ...]:
        """True where a flag is set in any process."""
        return tuple(number > 0 for number in self._sum(0, *flags)[1:])

    def _tell(self, event: str) -> None:
        for observer in self.observers:
            getattr(observer, event)(self)
