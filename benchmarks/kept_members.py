"""Trained members of ``AttentionClassifier``, kept in a folder for other fits with the same members."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_attention.atomic import write_atomically


@contextlib.contextmanager
def kept_members(folder: Path | None) -> Iterator[list[float]]:
    """Fits inside take members from the folder and leave theirs there; None: they train all of them.

    On one machine a member of the same code, recipe, cases and number of threads is the same to the last bit.
    The readout takes no part in training, so that members with and without one are the same too.

    Yields:
        The seconds that the training of every member from the folder took.
    """
    from kernel_attention.estimators import ensemble
    from kernel_attention_lab.provenance import code_revision

    seconds: list[float] = []
    if folder is None:
        yield seconds
        return
    folder.mkdir(parents=True, exist_ok=True)
    train, revision = ensemble.train_member, code_revision().get("revision")

    def kept(recipe: Any, split: Any, held_out: Any, *sizes: int, **options: Any) -> Any:
        if held_out is not None or options.get("start") is not None:  # they choose or continue
            return train(recipe, split, held_out, *sizes, **options)
        read = dataclasses.replace(recipe, readout=recipe.stem == "rocket")
        path = folder / f"{digest((revision, read, sizes), split)}.pt"
        if path.exists():
            member, spent = torch.load(path, weights_only=False)
            seconds.append(spent)
        else:
            started = time.perf_counter()
            member = train(read, split, None, *sizes, **options)
            result = member, time.perf_counter() - started
            write_atomically(path, functools.partial(torch.save, result))
        member.model.has_readout = recipe.readout
        return member

    ensemble.train_member = kept
    try:
        yield seconds
    finally:
        ensemble.train_member = train


def digest(settings: tuple[Any, ...], split: Any) -> str:
    """A name for what a member is trained from."""
    sha = hashlib.sha256(repr((*settings, torch.get_num_threads())).encode())
    for array in (*split.sequences, split.targets, *([] if split.weights is None else [split.weights])):
        sha.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()[:32]
