"""A sketch of a matrix that arrives in batches of rows, in the memory of a few rows.

Sources: Liberty, "Simple and deterministic matrix sketching", KDD 2013; Desai, Ghashami, Phillips, "Improved
practical matrix sketching with guarantees", IEEE TKDE 2016 (section 3.1: shrink the last directions only).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SHRUNK = 0.2  # share of the directions that give up energy; the choice of Desai et al.


class FrequentDirections:
    """A sketch S (at most l, p) of all rows Phi (N, p) seen, with S^T S near to Phi^T Phi.

    After any number of batches 0 <= Phi^T Phi - S^T S <= ||Phi - Phi_k||_F^2 / (l / 5 - k) for every k below
    l / 5, Phi_k the best approximation of rank k; nothing is lost where the rank of Phi is below l.

    Args:
        size: l.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: Tensor | None = None
        self.num_rows = 0

    def update(self, batch: Tensor) -> None:
        """Take in rows (n, p)."""
        self.num_rows += batch.size(0)
        # More rows at a time than the sketch has would cost memory; fewer would cost more decompositions.
        for part in batch.split(self.size):
            stacked = part if self.rows is None else torch.cat([self.rows, part])
            if stacked.size(0) > 2 * self.size:
                stacked = self._shrunk(stacked)
            self.rows = stacked

    def matrix(self) -> Tensor:
        """S, (at most l, p)."""
        if self.rows is None:
            raise RuntimeError("a sketch of no rows")
        return self._shrunk(self.rows) if self.rows.size(0) > self.size else self.rows

    def _shrunk(self, rows: Tensor) -> Tensor:
        """The l - 1 leading directions; the last of them lose the energy of the l-th."""
        _, values, vectors = torch.linalg.svd(rows, full_matrices=False)
        if values.numel() < self.size:
            return values[:, None] * vectors
        kept, least = values[: self.size - 1].clone(), values[self.size - 1]
        last = slice(self.size - max(1, int(_SHRUNK * self.size)), None)
        # sqrt(s^2 - l^2), without squares that overflow.
        kept[last] = (kept[last] - least).sqrt() * (kept[last] + least).sqrt()
        return kept[:, None] * vectors[: self.size - 1]
