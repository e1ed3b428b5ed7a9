"""The training loop: a task, its batches, and small frozen settings. Needs the extra ``estimators``.

It knows modules and optimisers, and neither a model of this library nor a recipe of the laboratory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_attention.training.course import MemoryRecorder, Observer, Recorder
    from kernel_attention.training.loop import Interrupted, fit
    from kernel_attention.training.settings import TrainSettings
    from kernel_attention.training.task import AveragedTask, SameLossTask, TrainingTask

__all__ = [
    "AveragedTask",
    "Interrupted",
    "MemoryRecorder",
    "Observer",
    "Recorder",
    "SameLossTask",
    "TrainSettings",
    "TrainingTask",
    "fit",
]

_HOMES = {
    "AveragedTask": "task",
    "Interrupted": "loop",
    "MemoryRecorder": "course",
    "Observer": "course",
    "Recorder": "course",
    "SameLossTask": "task",
    "TrainSettings": "settings",
    "TrainingTask": "task",
    "fit": "loop",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: torch takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
