"""Generated tasks whose answers stand at single positions of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import field_names
from kernel_attention_lab.data.positions.bit_counting import Majority, Parity
from kernel_attention_lab.data.positions.copying import LongRangeCopy, SelectiveCopying
from kernel_attention_lab.data.positions.noisy_retrieval import NoisyRetrieval
from kernel_attention_lab.data.positions.recall import AssociativeRecall, InductionHeads
from kernel_attention_lab.data.positions.task import PositionTask

POSITION_TASKS: dict[str, type[PositionTask]] = {
    "mqar": AssociativeRecall,
    "induction_heads": InductionHeads,
    "selective_copying": SelectiveCopying,
    "long_range_copy": LongRangeCopy,
    "majority": Majority,
    "parity": Parity,
    "noisy_retrieval": NoisyRetrieval,
}


def make_position_task(name: str, options: Mapping[str, Any]) -> PositionTask:
    """A task with its options.

    Raises:
        InputError: for an unknown name or option, and for a value that the task refuses.
    """
    if name not in POSITION_TASKS:
        raise unknown("dataset of task sequence_labels", name, POSITION_TASKS)
    made = POSITION_TASKS[name]
    for option in options:
        if option not in field_names(made):
            raise unknown(f"option of {name}", option, field_names(made))
    try:
        return made(**options)
    except InputError as error:
        raise InputError(f"dataset {name}: {error}") from None
