"""The multilinear SVD of the kernel tensor of D samples (KMLSVD), primal and dual.

Source: Verbeek, "3D Primal Attention", TU Delft 2025 (theorem 2.2, eq. 2-19 to 2-23), for any order.

Legend: the sample of mode n has N_n rows, its features Phi_n are (N_n, M_n); ranks R_n, factors U_n
(N_n, R_n) with orthonormal columns, core S (R_1..R_D), compatibility tensor C (M_1..M_D).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import require_finite, require_range, size_of
from kernel_attention.solvers.multilinear_svd import Method, Multilinear, Ranks, core_of, multilinear_svd
from kernel_attention.tensors.multilinear.factors import multilinear_factors
from kernel_attention.tensors.multilinear.kernel_tensors import multilinear_kernel
from kernel_attention.tensors.multilinear.unfoldings import deterministic_signs, project_modes, unfold
from kernel_attention.tensors.statistics import accumulation_dtype


class KernelMultilinear(NamedTuple):
    """The KMLSVD of explicit features: ``svd`` of their kernel tensor, and its primal side.

    ``weights`` W_n = Phi_n^T U_n, (M_n, R_n); ``scores`` E_n, (N_n, R_n); ``objective`` J, 0-dimensional.
    """

    svd: Multilinear
    weights: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    objective: Tensor


def kernel_multilinear_svd(
    features: Sequence[Tensor],
    ranks: Ranks = None,
    *,
    compatibility: Tensor | None = None,
    method: Method = "hosvd",
    tol: float = 1e-10,
    max_iter: int = 500,
) -> KernelMultilinear:
    """KMLSVD of K = C x_1 Phi_1 .. x_D Phi_D from its features, without K.

    With Phi_n = Q_n R_n, K is the small tensor C x_1 R_1 .. x_D R_D in orthonormal bases: its multilinear SVD
    is that of the small one, U_n = Q_n U'_n. Costs N M^2 + M^(D + 1) for each mode, and memory M^D.

    Args:
        features: Phi_n, (N_n, M_n) each: one sample for every mode.
        ranks: as for ``multilinear_svd``, at most min(N_n, M_n).
        compatibility: C: None (superdiagonal identity), its superdiagonal (M,), or the tensor (M_1..M_D).
        method: as for ``multilinear_svd``.
        tol: likewise.
        max_iter: likewise.

    Raises:
        InputError: for features or a compatibility whose shapes do not fit or that are not finite, and what
            ``multilinear_svd`` raises.
    """
    features = _read_features(features, compatibility)
    lift = None if compatibility is None else compatibility.to(features[0])[None]
    bases, small = zip(*(torch.linalg.qr(phi) for phi in features), strict=True)
    kernel = multilinear_kernel([r[None, None] for r in small], lift)[0, 0]
    require_range("features", "the entries of their kernel", kernel)
    svd = multilinear_svd(kernel, ranks, method=method, tol=tol, max_iter=max_iter)
    objective = kmlsvd_dual_objective(kernel, svd.factors, svd.core)
    # The signs of Q are LAPACK's.
    factors = [deterministic_signs(q @ u) for q, u in zip(bases, svd.factors, strict=True)]
    core = core_of(kernel, [q.mT @ u for q, u in zip(bases, factors, strict=True)])
    weights = [phi.mT @ u for phi, u in zip(features, factors, strict=True)]
    svd = svd._replace(core=core, factors=tuple(factors))
    scores = kmlsvd_primal_scores(features, weights, core, compatibility=compatibility)
    require_range("features", "the scores and J of their kernel", *weights, *scores, objective)
    return KernelMultilinear(svd, tuple(weights), scores, objective)


def kmlsvd_primal_scores(
    features: Sequence[Tensor],
    weights: Sequence[Tensor],
    core: Tensor,
    *,
    compatibility: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """E_n = Phi_n C_(n) (.. (x) W_m (x) ..) S_(n)^T of every mode (eq. 2-23), (N_n, R_n): K is never formed.

    The features may be those of other samples than the weights were found from. Arguments as for
    ``kernel_multilinear_svd``.
    """
    features = _read_features(features, compatibility)
    for n, weight in enumerate(weights):
        require_finite(f"weights[{n}]", weight)
    require_finite("core", core)
    lift = None if compatibility is None else compatibility.to(core)[None]
    factors = multilinear_factors([w[None] for w in weights], core[None], lift)
    return tuple(phi @ factor[0] for phi, factor in zip(features, factors, strict=True))


def kmlsvd_dual_scores(tensor: Tensor, factors: Sequence[Tensor], core: Tensor) -> tuple[Tensor, ...]:
    """E_n = K_(n) (.. (x) U_m (x) ..) S_(n)^T of every mode (eq. 2-23), (I_n, R_n).

    They equal the primal scores for any factors with W_n = Phi_n^T U_n, and U_n S_(n) S_(n)^T where the core
    is that of the full-rank multilinear SVD or of a fixed point of HOOI.
    """
    _require_all_finite(tensor, factors, core)
    return tuple(mode_scores(tensor, factors, core, n) for n in range(len(factors)))


def mode_scores(kernel: Tensor, factors: Sequence[Tensor], core: Tensor, mode: int) -> Tensor:
    """E_n of one mode, whose size in ``kernel`` may be that of a new sample."""
    return project_modes(kernel, factors, mode) @ unfold(core, mode, core.dim()).mT


def kmlsvd_dual_objective(tensor: Tensor, factors: Sequence[Tensor], core: Tensor) -> Tensor:
    """The KMLSVD objective J (eq. 2-19) at factors and core, from the kernel tensor; 0-dimensional.

    J = 1/2 sum_n Tr(E_n (S_(n) S_(n)^T)^+ E_n^T) - (D - 1) <K x_1 U_1^T .. x_D U_D^T, S> + (D - 2)/2 ||K||^2:
    the primal one under W_n = Phi_n^T U_n. It is 0 at the full-rank multilinear SVD and, at order 2, at every
    truncation of it. At a fixed point of HOOI it is (D - 2)/2 (||K||^2 - ||S||^2), half of what is lost at
    order 3; at a truncated HOSVD it is at least (D - 2)/2 times what that loses.
    """
    _require_all_finite(tensor, factors, core)
    order = len(factors)
    energy = tensor.new_zeros(())
    # S comes from K by a product with each factor, so its rounding is of the size of K, whatever its own.
    rounding = sum(tensor.shape) * torch.finfo(core.dtype).eps
    cutoff = rounding * max(size_of(tensor), size_of(core))
    for n in range(order):
        # Tr(P S^T (S S^T)^+ S P^T): P = K_(n) (.. (x) U (x) ..) on the row space of S_(n).
        _, values, rows = torch.linalg.svd(unfold(core, n, order), full_matrices=False)
        inside = rows[: int((values > cutoff).sum())]
        energy = energy + (project_modes(tensor, factors, n) @ inside.mT).square().sum()
    alignment = (core_of(tensor, factors) * core).sum()
    return energy / 2 - (order - 1) * alignment + (order - 2) / 2 * tensor.square().sum()


def _require_all_finite(tensor: Tensor, factors: Sequence[Tensor], core: Tensor) -> None:
    require_finite("tensor", tensor)
    for n, factor in enumerate(factors):
        require_finite(f"factors[{n}]", factor)
    require_finite("core", core)


def _read_features(features: Sequence[Tensor], compatibility: Tensor | None) -> list[Tensor]:
    shapes = [tuple(phi.shape) for phi in features]
    if len(shapes) < 2 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise InputError(f"features have shapes {shapes}, expected (N_n, M_n) for two modes or more")
    widths = tuple(shape[1] for shape in shapes)
    if compatibility is None or compatibility.dim() == 1:
        accepted, fits = "of one width, for a superdiagonal C", len(set(widths)) == 1
        fits = fits and (compatibility is None or compatibility.size(0) == widths[0])
    else:
        accepted, fits = f"and C of shape {widths}", tuple(compatibility.shape) == widths
    if not fits:
        given = None if compatibility is None else tuple(compatibility.shape)
        raise InputError(
            f"features have widths {widths} and compatibility the shape {given}, expected features {accepted}"
        )
    for n, phi in enumerate(features):
        require_finite(f"features[{n}]", phi)
    if compatibility is not None:
        require_finite("compatibility", compatibility)
    return [phi.to(accumulation_dtype(phi.dtype)) for phi in features]
