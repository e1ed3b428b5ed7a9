"""Asymmetric kernel SVD in the primal: from explicit features, at a cost linear in the number of points.

Sources: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
Representation", NeurIPS 2023 (section 3, remark 3.3); Suykens, "SVD revisited: a new variational principle,
compatible feature maps and nonlinear extensions", ACHA 2016 (compatible feature maps).

A compatibility matrix C makes features of different widths comparable: the map of X is then C^T phi_x, of the
width of phi_z, and the kernel Phi_x C Phi_z^T.

Legend: Phi_x (n, p), Phi_z (m, q), C (p, q); s components.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import binary_unit, require_finite, require_range
from kernel_attention.solvers.kernel_svd import (
    ScoreWeights,
    SingularDirections,
    check_components,
    check_iteration,
    closed_form,
    column_signs,
    directions_objective,
    sketched_weights,
)

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

    With K = Phi_x Phi_z^T the weights W_e = Phi_z^T H_r and W_r = Phi_x^T H_e (p, s) satisfy, in the feature
    space,

        (Phi_x^T Phi_x) W_e = W_r Sigma        (Phi_z^T Phi_z) W_r = W_e Sigma

    and a pass over the data only sums up these products. The first epoch sketches both samples
    (``FrequentDirections``). Each later one is a step of block Krylov iteration with b = s +
    ``n_oversamples`` columns for (Phi_x^T Phi_x) (Phi_z^T Phi_z), with Rayleigh-Ritz extraction: the error of
    a direction falls at least by (sigma_{b+1} / sigma_s)^2 an epoch, and nothing of it is noise, so no step
    size has to decrease. Sums are kept in float64.

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


def primal_kernel_svd(
    phi_x: Tensor,
    phi_z: Tensor,
    n_components: int = 2,
    *,
    compatibility: Tensor | None = None,
    center: bool = False,
) -> SingularDirections:
    """The leading directions of Phi_x C Phi_z^T in closed form, O((n + m) (p + q)^2), K never formed.

    W_r = C^T Phi_x^T H_e and W_e = Phi_z^T H_r, both (q, s); e = Phi_x C W_e and r = Phi_z W_r.

    Args:
        phi_x: (n, p).
        phi_z: (m, q).
        n_components: s, at most min(n, m, q), and p.
        compatibility: C (p, q); None: the identity, for p = q.
        center: take the means off the features first. The papers do not.

    Raises:
        InputError: for shapes that do not fit, or numbers that are not finite.
    """
    for name, phi in (("phi_x", phi_x), ("phi_z", phi_z)):
        require_finite(name, phi)
    phi_x = compatible(phi_x, phi_z.size(1), compatibility)
    check_components(n_components, (phi_x.size(0), *phi_z.shape))
    x_unit, z_unit = binary_unit(phi_x), binary_unit(phi_z)
    phi_x, phi_z = phi_x / x_unit, phi_z / z_unit
    x_mean, z_mean = (part.mean(dim=0) if center else part.new_zeros(part.size(1)) for part in (phi_x, phi_z))
    phi_x, phi_z = phi_x - x_mean, phi_z - z_mean
    left, values, right = closed_form(phi_x, phi_z, n_components)
    signs = column_signs(left)
    left, right = left * signs, right * signs
    w_e, w_r = phi_z.mT @ right, phi_x.mT @ left
    e, r = phi_x @ w_e, phi_z @ w_r
    objective = directions_objective(e, r, values, trace=(w_e * w_r).sum(dim=0))
    found = SingularDirections(left, values, right, e, r, objective, 1, w_e, w_r, x_mean @ w_e, z_mean @ w_r)
    return _of_size(found, x_unit, z_unit)


def _of_size(found: SingularDirections, x_unit: float, z_unit: float) -> SingularDirections:
    """The directions of ``x_unit`` Phi_x and ``z_unit`` Phi_z from those of Phi_x and Phi_z."""
    kernel = (found.values, found.e, found.r, found.objective, found.e_mean, found.r_mean)
    values, e, r, objective, e_mean, r_mean = (part * x_unit * z_unit for part in kernel)
    require_range("X", "the singular values and scores of its kernel with Z", values, e, r, e_mean, r_mean)
    assert found.w_e is not None
    assert found.w_r is not None
    return found._replace(
        values=values, e=e, r=r, objective=objective, e_mean=e_mean, r_mean=r_mean,
        w_e=found.w_e * z_unit, w_r=found.w_r * x_unit,
    )  # fmt: skip


def stochastic_kernel_svd(
    x_batches: Batches,
    z_batches: Batches,
    n_components: int = 2,
    *,
    center: bool = False,
    n_oversamples: int = 10,
    tol: float = 1e-4,
    max_epochs: int = 30,
    generator: torch.Generator | None = None,
) -> SingularDirections:
    """The same from mini-batches of features, which are never all in memory.

    For the method and its convergence see ``stochastic_weights`` in
    ``kernel_attention.solvers.primal_kernel_svd``. Two passes come on top of its epochs: one to count (and
    to take the mean), one for H_e = Phi_x W_e Sigma^{-1} and H_r = Phi_z W_r Sigma^{-1}.

    Args:
        x_batches: called for every pass over X, an iterable of features (n_b, q), C applied.
        z_batches: the same for Z, (m_b, q).
        n_components: s.
        center: take the means off the features. The papers do not.
        n_oversamples: directions that the iteration carries beyond s.
        tol: stop where ||K^T h_e - sigma h_r|| is this times sigma for every direction.
        max_epochs: most passes; a RuntimeWarning where they do not suffice.
        generator: of the random part of the start.

    Raises:
        InputError: for arguments that are not accepted, shapes that do not fit, or numbers that are not
            finite.
    """
    check_iteration(n_oversamples, tol, max_epochs, "max_epochs")
    x, z = _Sample("x_batches", x_batches, center), _Sample("z_batches", z_batches, center)
    if x.mean.numel() != z.mean.numel():
        raise InputError(
            f"batches of X have {x.mean.numel()} features and those of Z {z.mean.numel()}: they must agree"
        )
    check_components(n_components, (x.count, z.count, x.mean.numel()))
    found = stochastic_weights(
        x.centered,
        z.centered,
        n_components,
        n_oversamples=n_oversamples,
        tol=tol,
        max_epochs=max_epochs,
        generator=generator,
    )
    values, w_e, w_r = (part.to(x.mean.dtype) for part in found[:3])
    e, r = (torch.cat([batch @ w for batch in part.centered()]) for part, w in ((x, w_e), (z, w_r)))
    held = values > rounding(found.values.dtype) * values[0]
    inverse = torch.where(held, 1 / values, 0.0)
    signs = column_signs(e)
    e, r, w_e, w_r = (part * signs for part in (e, r, w_e, w_r))
    objective = directions_objective(e, r, torch.where(held, values, 0.0), trace=(w_e * w_r).sum(dim=0))
    means = (x.mean @ w_e, z.mean @ w_r)
    directions = SingularDirections(
        e * inverse, values, r * inverse, e, r, objective, found.num_epochs, w_e, w_r, *means
    )
    return _of_size(directions, x.unit, z.unit)


class _Sample:
    """Mini-batches of features over a power of two, ``unit``, so that sums of their squares stay in range.

    How many rows they have, and their mean over that unit (0 unless it is to be taken off).
    """

    def __init__(self, name: str, batches: Batches, center: bool) -> None:
        self.batches = batches
        total, self.count, self.unit = None, 0, 0.0
        for batch in batches():
            require_finite(name, batch)
            self.count += batch.size(0)
            if batch.any():
                self.unit = max(self.unit, binary_unit(batch))
            added = batch.sum(dim=0) if center else torch.zeros_like(batch[0])
            total = added if total is None else total + added
        if total is None:
            raise InputError(f"{name} gives no mini-batches: both samples need at least one point")
        require_range(name, "the sums of its columns", total)
        self.unit = self.unit or 1.0
        self.mean = total / self.count / self.unit

    def centered(self) -> Iterator[Tensor]:
        for batch in self.batches():
            yield batch / self.unit - self.mean


def compatible(phi_x: Tensor, width: int, compatibility: Tensor | None) -> Tensor:
    """Phi_x C, (n, q).

    Raises:
        InputError: where C is missing or has another shape than (p, q).
    """
    if compatibility is None:
        if phi_x.size(1) != width:
            raise InputError(
                f"the features of X have width {phi_x.size(1)} and those of Z {width}: give a compatibility "
                f"matrix of shape ({phi_x.size(1)}, {width})"
            )
        return phi_x
    if tuple(compatibility.shape) != (phi_x.size(1), width):
        expected = (phi_x.size(1), width)
        raise InputError(f"compatibility has shape {tuple(compatibility.shape)}, expected {expected}")
    require_finite("compatibility", compatibility)
    product = phi_x @ compatibility.to(phi_x)
    require_range("compatibility", "the features of X times it", product)
    return product
