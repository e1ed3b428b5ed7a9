"""One optimisation: a task, its loaders, a trainer."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernel_attention.errors import InputError

if TYPE_CHECKING:  # Lightning takes seconds to import, and some commands train nothing
    import lightning as L
    from lightning.pytorch.callbacks import Callback

    from kernel_attention.experiments.training.module import RecipeTask
    from kernel_attention.experiments.training.recipe import BaseRecipe

_one_at_a_time = threading.Lock()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during training.

    It is a KeyboardInterrupt, so code that catches Exception does not catch it.
    """


def make_trainer(recipe: BaseRecipe, callbacks: list[Callback], progress: bool) -> L.Trainer:
    """The trainer of a recipe.

    Raises:
        InputError: for an accelerator that this machine does not have.
    """
    import lightning as L
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import Checkpoint, RichProgressBar

    from kernel_attention.experiments.training.checkpoint import AtomicCheckpointIO
    from kernel_attention.experiments.training.precision import resolve_precision

    try:
        return L.Trainer(
            accelerator=recipe.accelerator,
            devices=1,
            precision=resolve_precision(recipe),
            max_epochs=recipe.rounds,
            gradient_clip_val=recipe.gradient_clip or None,
            check_val_every_n_epoch=recipe.rounds_per_evaluation,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_model_summary=False,
            enable_progress_bar=progress,
            callbacks=[*callbacks, *([RichProgressBar()] if progress else [])],
            plugins=[AtomicCheckpointIO()],
        )
    except (MisconfigurationException, ImportError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"accelerator={recipe.accelerator!r} cannot be used here: {reason}") from None


def check_trainer(recipe: BaseRecipe) -> None:
    """InputError where this machine cannot train the recipe."""
    with _quiet_lightning():
        make_trainer(recipe, [], progress=False)


def fit(
    task: RecipeTask,
    train_batches: Iterable[Any],
    val_batches: Iterable[Any] | None,
    *,
    callbacks: list[Callback] | None = None,
    checkpoint: Path | None = None,
    progress: bool = True,
) -> None:
    """Train ``task``, from ``checkpoint`` where one is given.

    Raises:
        Interrupted: Ctrl-C or SIGTERM.
    """
    if task.recipe.threads:
        torch.set_num_threads(task.recipe.threads)
    with _quiet_lightning(), torch.enable_grad():  # Lightning would leave gradients switched on
        trainer = make_trainer(task.recipe, callbacks or [], progress)
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(task, train_batches, val_batches, ckpt_path=checkpoint)
        except SystemExit:  # Lightning's answer to KeyboardInterrupt
            signal.signal(signal.SIGINT, handler)  # Lightning leaves Ctrl-C off, but a notebook continues
            raise Interrupted from None


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Silence Lightning's banners and its advice on loader workers, which do not help our users."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        logger.setLevel(level)


def training_device(accelerator: str) -> torch.device:
    """The device on which Lightning trains with this accelerator."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator == "cpu" or found is None else found


@contextlib.contextmanager
def private_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that training on ``device`` draws from, and restore the caller's states afterwards.

    One thread at a time may do this: generators, Lightning's log level and warning filters belong to the
    whole process.
    """
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else list(range(torch.accelerator.device_count()))
    # On a CPU, torch.manual_seed would seed the GPUs too, whose states are not kept.
    seed_torch = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
    with _one_at_a_time, torch.random.fork_rng(devices, device_type="cuda" if on_cpu else device.type):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            seed_torch(seed)
            np.random.seed(seed)
            random.seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
