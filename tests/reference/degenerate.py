"""Degenerate data for solvers, drawn from a seed: what a theorem allows and rounding makes hard."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = (
    "generic", "low_rank", "repeated", "nearly_repeated", "constant", "zero", "offset", "graded", "one_hot",
)  # fmt: skip
SCALES = {
    torch.float64: (1e-300, 1e-200, 1e-95, 1e-8, 1e-3, 1.0, 1.0, 1e3, 1e8, 1e113, 1e200, 1e300),
    torch.float32: (1e-40, 1e-30, 1e-8, 1e-3, 1.0, 1.0, 1e3, 1e8, 1e15, 1e30),
}
ORDINARY = (1e-8, 1e8)
"""Scales at which nothing may be refused."""


@dataclass
class Case:
    """One draw: ``rng`` goes on drawing, ``generator`` does so for tensors."""

    seed: int
    rng: random.Random
    generator: torch.Generator
    dtype: torch.dtype
    kind: str
    scale: float

    @classmethod
    def draw(cls, seed: int) -> Case:
        rng = random.Random(seed)
        dtype = rng.choice((torch.float64, torch.float64, torch.float32))
        generator = torch.Generator().manual_seed(seed)
        return cls(seed, rng, generator, dtype, rng.choice(KINDS), rng.choice(SCALES[dtype]))

    @property
    def ordinary(self) -> bool:
        """Whether the data's products, powers and sums stay far inside the range."""
        return ORDINARY[0] <= self.scale <= ORDINARY[1]

    @property
    def eps(self) -> float:
        return torch.finfo(self.dtype).eps

    def size(self, most: int) -> int:
        """Often one; otherwise up to ``most``."""
        return 1 if self.rng.random() < 0.15 else self.rng.randint(2, most)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) of this kind, scale and precision."""
        x = self.normal(rows, columns)
        if self.kind == "low_rank":
            rank = self.rng.randint(1, max(1, min(rows, columns) - 1))
            x = self.normal(rows, rank) @ self.normal(rank, columns)
        elif self.kind in ("repeated", "nearly_repeated"):
            x = x[: max(1, rows // 3)].repeat(3 + rows, 1)[:rows]
            if self.kind == "nearly_repeated":
                x = x * (1 + 10.0 ** self.rng.uniform(-16, -4) * self.normal(rows, columns))
        elif self.kind == "constant":
            x = torch.full_like(x, x[0, 0].item())
        elif self.kind == "zero":
            x = torch.zeros_like(x)
        elif self.kind == "offset":
            x = x + 10.0 ** self.rng.uniform(1, 6)
            x = x / x.abs().max()
        elif self.kind == "graded":
            x = x * 10.0 ** torch.linspace(0, -12, columns, dtype=torch.float64)
        elif self.kind == "one_hot":
            x = torch.eye(max(rows, columns), dtype=torch.float64)[:rows, :columns]
        return (x * self.scale).to(self.dtype)

    def spoiled(self, x: Tensor) -> Tensor:
        """x with one entry that is NaN or infinite."""
        x = x.clone()
        at = self.rng.randrange(x.numel())
        x.view(-1)[at] = self.rng.choice((float("nan"), float("inf"), float("-inf")))
        return x
