"""One optimisation: a task, its loaders, a trainer."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, RichProgressBar

from kernel_attention.training.files import AtomicCheckpointIO
from kernel_attention.training.module import SequenceTask


class Interrupted(Exception):
    """Ctrl-C during training."""


def make_trainer(task: SequenceTask, callbacks: list[Callback], progress: bool) -> L.Trainer:
    """The trainer of a recipe."""
    recipe = task.recipe
    return L.Trainer(
        accelerator=recipe.accelerator,
        devices=1,
        precision=recipe.precision,  # type: ignore[arg-type]
        max_epochs=recipe.epochs,
        gradient_clip_val=recipe.gradient_clip or None,
        check_val_every_n_epoch=recipe.evaluate_every,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_model_summary=False,
        enable_progress_bar=progress,
        callbacks=[*callbacks, *([RichProgressBar()] if progress else [])],
        plugins=[AtomicCheckpointIO()],
    )


def fit(
    task: SequenceTask,
    train_batches: Iterable[Any],
    val_batches: Iterable[Any] | None,
    *,
    callbacks: list[Callback] | None = None,
    checkpoint: Path | None = None,
    progress: bool = True,
) -> None:
    """Train ``task``, from ``checkpoint`` where one is given.

    Raises:
        Interrupted: Ctrl-C.
    """
    if task.recipe.threads:
        torch.set_num_threads(task.recipe.threads)
    with _quiet_lightning():
        trainer = make_trainer(task, callbacks or [], progress)
        try:
            trainer.fit(task, train_batches, val_batches, ckpt_path=checkpoint)
        except SystemExit:  # Lightning's answer to KeyboardInterrupt
            raise Interrupted from None


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's banners and its advice on loader workers, which tell our users nothing."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            yield
    finally:
        logger.setLevel(level)
