"""The figures of a round: weighted means of what its batches log."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernel_attention.experiments.training.processes import Processes


class Figures:
    """Sums of figures and of their weights, in float64 where the device has it.

    They stay on the device until they are read, so that a step does not wait for it.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.counts = True
        """Whether what is logged counts; not for a batch that only keeps a process in step with others."""

    @torch.no_grad()
    def add(self, name: str, value: Tensor | float, weight: float = 1) -> None:
        """Add a value with its weight."""
        value = torch.as_tensor(value).detach()
        value = value.to(_accumulator(value.device))
        if not self.counts:
            value, weight = torch.zeros_like(value), 0
        pair = torch.stack([value * weight, torch.full_like(value, weight)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

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
