"""Primal weights of an asymmetric kernel SVD from mini-batches of explicit features.

With K = Phi_x Phi_z^T the weights W_e = Phi_z^T H_r and W_r = Phi_x^T H_e satisfy, in the feature space,

    (Phi_x^T Phi_x) W_e = W_r Sigma        (Phi_z^T Phi_z) W_r = W_e Sigma

and a pass over the data only sums up these products.

Legend: n and m points, p features, s directions, b = s + oversampling columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.solvers.kernel_svd import ScoreWeights, sketched_weights

_SHRUNK = 0.2  # share of the directions that give up energy; the choice of Desai et al.


class FrequentDirections:
    """A sketch S (at most l, p) of all rows Phi (N, p) seen, with S^T S near to Phi^T Phi.

    After any number of batches 0 <= Phi^T Phi - S^T S <= ||Phi - Phi_k||_F^2 / (l / 5 - k) for every k below
    l / 5, Phi_k the best approximation of rank k; nothing is lost where the rank of Phi is below l.

    Sources: Liberty, "Simple and deterministic matrix sketching", KDD 2013; Desai, Ghashami, Phillips,
    "Improved practical matrix sketching with guarantees", IEEE TKDE 2016 (section 3.1: shrink the last
    directions only).

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


Batches = Callable[[], Iterable[Tensor]]
"""Called for every pass over a sample: its features in mini-batches (n_b, p)."""

_BLOCKS_BEFORE_RESTART = 4
_ERROR = 2**12  # of a sum of squares, in units of the precision: the root of the number of terms, and more


def rounding(dtype: torch.dtype) -> float:
    """Relative singular value below which its square, and what is divided by it, is mostly rounding: 1e-6 in
    float64.
    """
    return (_ERROR * torch.finfo(dtype).eps) ** 0.5


def stochastic_weights(
    x_batches: Batches,
    z_batches: Batches,
    rank: int,
    *,
    n_oversamples: int = 10,
    tol: float = 1e-4,
    max_epochs: int = 20,
    generator: torch.Generator | None = None,
) -> ScoreWeights:
    """The weights from mini-batches of features, in the memory of O(p b) numbers and one batch.

    The first epoch sketches both samples (``FrequentDirections``). Each later one sums Phi^T (Phi W) over the
    mini-batches, a step of block Krylov iteration for (Phi_x^T Phi_x) (Phi_z^T Phi_z), with Rayleigh-Ritz
    extraction: the error of a direction falls at least by (sigma_{b+1} / sigma_s)^2 an epoch, and nothing of
    it is noise, so no step size has to decrease. Sums are kept in float64.

    Args:
        x_batches: features of X.
        z_batches: features of Z, of the same width p.
        rank: s.
        n_oversamples: columns beyond s.
        tol: stop where ||K^T h_e - sigma h_r|| is this times sigma for every direction. Its sine against the
            true one is then about tol over the relative gap. Directions below 1e-6 of the first singular
            value, and those of Phi_z below 1e-6 of its largest, are beyond what sums of squares hold, and do
            not count.
        max_epochs: passes over the data; a RuntimeWarning where they do not suffice. 1 is the sketch alone.
        generator: of the random columns beyond the sketch's directions.
    """
    size = 2 * (rank + n_oversamples)
    x_sketch, z_sketch = _sketch(x_batches, size), _sketch(z_batches, size)
    sketched = sketched_weights(x_sketch, z_sketch, rank)
    if max_epochs == 1:
        return sketched
    least = rounding(z_sketch.dtype) * float(torch.linalg.matrix_norm(z_sketch, ord=2))
    return _refined(
        x_batches, z_batches, sketched.w_r, least, rank, n_oversamples, tol, max_epochs, generator
    )  # fmt: skip


def _sketch(batches: Batches, size: int) -> Tensor:
    sketch = FrequentDirections(size)
    for batch in batches():
        sketch.update(_summable(batch))
    return sketch.matrix()


def _refined(
    x_batches: Batches,
    z_batches: Batches,
    start: Tensor,
    least: float,
    rank: int,
    n_oversamples: int,
    tol: float,
    max_epochs: int,
    generator: torch.Generator | None,
) -> ScoreWeights:
    """Block Krylov iteration: right vectors are Phi_z B c, for a basis B of the feature space.

    Columns b with ||Phi_z b|| below ``least`` ||b|| are left out: their sums are mostly rounding.
    """
    p, width = start.size(0), rank + n_oversamples
    # Random columns reach what the sketches missed: leading directions of both need not be those of K.
    noise = torch.randn(p, max(n_oversamples, 1), generator=generator, dtype=torch.float64).to(start)
    block = torch.cat([start, noise / torch.linalg.vector_norm(noise, dim=0)], dim=1)
    basis, z_sums, x_sums = (start.new_empty(p, 0) for _ in range(3))
    values, residual, epoch = start.new_zeros(rank), float("inf"), 1
    w_e = w_r = start.new_zeros(p, rank)
    while True:
        z_sum = gram_product(z_batches, block)
        energy = (block * z_sum).sum(dim=0).clamp_min(0.0).sqrt()  # the norms of Phi_z block
        if basis.size(1) > 0:
            held = values[:rank] > rounding(start.dtype) * values[0]
            residual = float((energy[: held.numel()] / values[:rank])[held].max()) if held.any() else 0.0
        if residual <= tol or epoch >= max_epochs:
            break
        kept = energy > least * torch.linalg.vector_norm(block, dim=0)
        if not kept.any():  # nothing is left but rounding
            residual = 0.0
            break
        block, z_sum = block[:, kept] / energy[kept], z_sum[:, kept] / energy[kept]
        basis, z_sums = torch.cat([basis, block], dim=1), torch.cat([z_sums, z_sum], dim=1)
        x_sums = torch.cat([x_sums, gram_product(x_batches, z_sum)], dim=1)
        epoch += 1
        values, right, w_e, normal = _ritz(basis, z_sums, x_sums, width)
        w_r = normal * torch.where(values > rounding(start.dtype) * values[0], 1 / values, 0.0)
        block = w_r - right * values
        if basis.size(1) > (_BLOCKS_BEFORE_RESTART - 1) * width:
            basis, z_sums, x_sums = right, w_e, normal
    if residual > tol:
        warnings.warn(
            f"{epoch} epochs left a relative residual of {residual:.1e}, more than tol={tol:.1e}; raise "
            "max_epochs, n_oversamples or tol",
            RuntimeWarning,
            stacklevel=3,
        )
    missing = (0, max(rank - values.numel(), 0))  # K may have fewer directions than were asked for
    values, w_e, w_r = (pad(part, missing)[..., :rank] for part in (values, w_e, w_r))
    return ScoreWeights(values, w_e, w_r, epoch, residual)


def _ritz(basis: Tensor, z_sums: Tensor, x_sums: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ritz values sigma (k,) of K on the span of Phi_z B; their vectors B c, ||Phi_z B c|| = 1; D c and F c.

    ||Phi_z B c||^2 = c^T (B^T D) c and ||K Phi_z B c||^2 = c^T (D^T F) c, for D = Phi_z^T Phi_z B and
    F = Phi_x^T Phi_x D.
    """
    for _ in range(2):  # the second time B^T D is 1 but for what rounding left of it the first time
        norms, vectors = torch.linalg.eigh(_symmetric(basis.mT @ z_sums))
        # Division by these roots multiplies the rounding of B, D and F, by _ERROR at most.
        kept = norms > _ERROR**-2 * norms[-1]
        whitening = vectors[:, kept] / norms[kept].sqrt()
        basis, z_sums, x_sums = basis @ whitening, z_sums @ whitening, x_sums @ whitening
    squares, rotation = torch.linalg.eigh(_symmetric(z_sums.mT @ x_sums))
    values, c = squares.flip(0)[:count].clamp_min(0.0).sqrt(), rotation.flip(1)[:, :count]
    return values, basis @ c, z_sums @ c, x_sums @ c


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def gram_product(batches: Batches, weights: Tensor) -> Tensor:
    """Phi^T Phi W summed over mini-batches, (p, k)."""
    total = torch.zeros_like(weights)
    for batch in batches():
        phi = _summable(batch)
        total.addmm_(phi.mT, phi @ weights)
    return total


def _summable(batch: Tensor) -> Tensor:
    """In float64, where the device has it: the sums are squares of what is looked for."""
    return batch if batch.device.type == "mps" else batch.double()
