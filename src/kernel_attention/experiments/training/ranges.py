"""Values that are finite and yet too large for a model in float32.

A network squares what it is given: layer norms sum squares, attention multiplies queries with keys. Beyond
the root of the largest float32 the squares are infinite, and what comes out is NaN, or, behind a layer norm,
a finite answer that does not depend on the input. So such values are refused instead of answered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernel_attention.errors import InputError

# The root of the largest float32 is 1.8e19; weights, widths and sums over them take the rest.
LARGEST = 1e15


def require_in_range(
    sequences: Sequence[np.ndarray], mean: np.ndarray, std: np.ndarray, where: str = "the sequences"
) -> None:
    """Refuse sequences (n_i, c) with a value beyond 1e15 standard deviations of the training data.

    Args:
        sequences: float32, one array a case.
        mean: of every channel, (c,).
        std: of every channel, (c,).
        where: what the sequences are called in the message.

    Raises:
        InputError: which names the case, the channel, the step and the value.
    """
    for case, sequence in enumerate(sequences):
        scaled = np.abs((sequence.astype(np.float64) - mean) / std)
        if scaled.max() > LARGEST:
            step, channel = np.unravel_index(scaled.argmax(), scaled.shape)
            raise InputError(
                f"case {case} of {where}: value {sequence[step, channel]:g} in channel {channel}, "
                f"step {step} is {scaled.max():.0e} standard deviations from the training data "
                f"(the model takes up to {LARGEST:.0e})"
            )


def require_finite_outputs(outputs: Tensor, sequences: Sequence[np.ndarray]) -> None:
    """Refuse outputs (cases, k) that are no numbers, and name the largest value that led to one.

    Raises:
        InputError: which names the case, the channel, the step and the value.
    """
    failed = (~outputs.isfinite().all(dim=-1)).nonzero()
    if len(failed):
        case = int(failed[0])
        sequence = np.abs(sequences[case])
        step, channel = np.unravel_index(sequence.argmax(), sequence.shape)
        raise InputError(
            f"case {case} of the sequences: the model's output is not finite; its largest value is "
            f"{sequences[case][step, channel]:g} in channel {channel}, step {step}"
        )
