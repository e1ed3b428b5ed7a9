"""Sorting rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sorted_rows(values: Tensor) -> Tensor:
    """The values of every row, the last dimension, in order: (..., N) -> (..., N).

    NumPy's sort is several times faster on a CPU; torch's has a gradient.
    """
    if (
        values.requires_grad
        or values.device.type != "cpu"
        or values.dtype not in (torch.float32, torch.float64)
    ):
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))
