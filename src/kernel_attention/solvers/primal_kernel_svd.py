"""Asymmetric kernel SVD in the primal: from explicit features, at a cost linear in the number of points.

Sources: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
Representation", NeurIPS 2023 (section 3, remark 3.3); Suykens, "SVD revisited: a new variational principle,
compatible feature maps and nonlinear extensions", ACHA 2016 (compatible feature maps).

A compatibility matrix C makes features of different widths comparable: the map of X is then C^T phi_x, of the
width of phi_z, and the kernel Phi_x C Phi_z^T.

Legend: Phi_x (n, p), Phi_z (m, q), C (p, q); s components.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import binary_unit, require_finite, require_range
from kernel_attention.solvers.kernel_svd import (
    SingularDirections,
    check_components,
    check_iteration,
    closed_form,
    column_signs,
    directions_objective,
)
from kernel_attention.solvers.stochastic_svd import Batches, rounding, stochastic_weights


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
    ``kernel_attention.solvers.stochastic_svd``. Two passes come on top of its epochs: one to count (and
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
