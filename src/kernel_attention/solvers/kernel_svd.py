"""Asymmetric kernel SVD of two samples, in the dual: the singular value decomposition of k(x_i, z_j).

Source: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
Representation", NeurIPS 2023 (theorem 3.2, remark 3.3, lemma 4.2). There both samples are the tokens of one
sequence; here X and Z are any two, of n and m points.

Legend: X (n, p), Z (m, q), K (n, m), s components.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.errors import InputError, unknown
from kernel_attention.solvers.arrays import require_range
from kernel_attention.solvers.operators import (
    CenteredOperator,
    DenseOperator,
    ForeignOperator,
    KernelOperator,
    MatrixOperator,
    centered,
    dense_triplets,
    is_operator,
    leading_triplets,
)
from kernel_attention.tensors.features.kernel_functions import KernelFunction, get_kernel_function
from kernel_attention.tensors.multilinear.unfoldings import deterministic_signs


class SingularDirections(NamedTuple):
    """K H_r = H_e Sigma and K^T H_e = H_r Sigma, the s leading directions.

    ``left`` is H_e (n, s), ``right`` H_r (m, s), ``values`` the diagonal of Sigma (s,), from the largest. The
    entry of largest size in each column of H_e is positive.

    ``e`` (n, s) and ``r`` (m, s) are the scores: K H_r and K^T H_e in the dual, Phi_x W_e and Phi_z W_r in
    the primal; with ``center`` (and H_e, H_r centred) their means, ``e_mean`` and ``r_mean`` (s,), are taken
    off, which are zeros otherwise. ``w_e`` and ``w_r`` (p, s) are None in the dual.

    ``objective`` is J with Lambda = Sigma^{-1}, 0 at a solution (lemma 4.2); directions whose singular value
    is rounding error do not enter. ``num_iter`` counts passes over the matrix, or epochs.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    e: Tensor
    r: Tensor
    objective: Tensor
    num_iter: int
    w_e: Tensor | None
    w_r: Tensor | None
    e_mean: Tensor
    r_mean: Tensor


def column_signs(left: Tensor) -> Tensor:
    """The signs (s,) that make the entry of largest size in every column of (n, s) positive."""
    return torch.where((deterministic_signs(left) * left).sum(dim=0) < 0, -1.0, 1.0).to(left)


def directions_objective(e: Tensor, r: Tensor, values: Tensor, trace: Tensor, size: float = 0.0) -> Tensor:
    """J = 1/2 sum_i e_i^T Lambda e_i + 1/2 sum_j r_j^T Lambda r_j - Tr(W_e^T W_r), Lambda = Sigma^{-1}.

    ``trace`` (s,) is the diagonal of W_e^T W_r. Directions whose singular value is rounding error, of sigma_1
    or of ``size`` where that is more, are left out.
    """
    floor = values[0].clamp_min(size) * max(e.size(0), r.size(0)) * torch.finfo(values.dtype).eps
    # J has the size of sigma, and so have the squares of e / sqrt(sigma); those of e may overflow.
    root = torch.where(values > floor, values.rsqrt(), 0.0)
    energy = (root * e).square().sum(dim=0) + (root * r).square().sum(dim=0)
    return (0.5 * energy - torch.where(values > floor, trace, 0.0)).sum()


def check_components(n_components: int, shape: tuple[int, ...]) -> None:
    """InputError where there cannot be this many directions."""
    if isinstance(n_components, bool) or not isinstance(n_components, Integral) or n_components < 1:
        raise InputError(f"n_components={n_components!r} must be a whole number from 1")
    if n_components > min(shape):
        raise InputError(f"n_components={n_components} must be at most {min(shape)}, the smaller side of K")


def check_iteration(n_oversamples: int, tol: float | None, most: int, name: str = "max_iter") -> None:
    """InputError for settings of an iteration that are not accepted."""
    if isinstance(n_oversamples, bool) or not isinstance(n_oversamples, Integral) or n_oversamples < 0:
        raise InputError(f"n_oversamples={n_oversamples!r} must be a whole number from 0")
    if tol is not None and not tol >= 0:
        raise InputError(f"tol={tol!r} must be a number from 0, or None")
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise InputError(f"{name}={most!r} must be a whole number from 1")


class ScoreWeights(NamedTuple):
    """``values`` (s,), ``w_e`` and ``w_r`` (p, s): e(x) = W_e^T phi(x), r(z) = W_r^T phi(z).

    ``residual`` is the largest ||K^T h_e - sigma h_r|| / sigma.
    """

    values: Tensor
    w_e: Tensor
    w_r: Tensor
    num_epochs: int
    residual: float


def closed_form(phi_x: Tensor, phi_z: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors (n, s), values (s,) and right vectors (m, s) of Phi_x Phi_z^T, without forming it.

    Phi = Q R on both sides leaves the SVD of R_x R_z^T, (p, p). O((n + m) p^2). Unlike Gram matrices, the
    factors keep all digits of small singular values.
    """
    (q_x, r_x), (q_z, r_z) = torch.linalg.qr(phi_x), torch.linalg.qr(phi_z)
    small = r_x @ r_z.mT
    require_range("X", "the features' products with those of Z", small)
    u, values, vt = torch.linalg.svd(small, full_matrices=False)
    return q_x @ u[:, :rank], values[:rank], q_z @ vt[:rank].mT


def sketched_weights(x_sketch: Tensor, z_sketch: Tensor, rank: int) -> ScoreWeights:
    """The weights of two sketches S_x (l, p) and S_z (l', p) in the place of all features.

    A sketch of fewer than ``rank`` rows has fewer directions than that; the missing ones are zeros.
    """
    left, values, right = closed_form(x_sketch, z_sketch, rank)
    missing = (0, max(rank - values.numel(), 0))
    values, w_e, w_r = (pad(part, missing) for part in (values, z_sketch.mT @ right, x_sketch.mT @ left))
    return ScoreWeights(values, w_e, w_r, 1, float("nan"))


SvdMethod = Literal["auto", "dense", "truncated", "matrix_free"]
METHODS = ("auto", "dense", "truncated", "matrix_free")

_DENSE_UP_TO = 1_000  # rows or columns, where a full decomposition takes a second or two
_IN_MEMORY_UP_TO = 2**25  # entries of a kernel matrix


def kernel_svd(
    X: Any,
    Z: Tensor | None = None,
    n_components: int = 2,
    *,
    kernel: str | KernelFunction = "rbf",
    kernel_params: Mapping[str, Any] | None = None,
    method: SvdMethod = "auto",
    center: bool = False,
    n_oversamples: int = 10,
    tol: float | None = None,
    max_iter: int = 50,
    block_size: int | None = None,
    generator: torch.Generator | None = None,
) -> SingularDirections:
    """The leading singular directions of a kernel matrix (theorem 3.2).

    Args:
        X: (n, p); for ``kernel="precomputed"`` K itself (n, m), or an object with ``shape``, and ``matmul``
            and ``rmatmul`` on tensors (K B and K^T C), or a SciPy LinearOperator.
        Z: (m, q); None: X.
        n_components: s, at most min(n, m).
        kernel: a name in ``kernel_attention.features.KERNEL_FUNCTIONS``, "precomputed", or a callable
            (n, p), (m, q) -> (n, m), which is given X in blocks of rows.
        kernel_params: of the kernel.
        method: "dense" decomposes the whole matrix; "truncated" keeps the matrix in memory and looks for the
            leading directions only; "matrix_free" does so without the matrix, whose blocks are evaluated anew
            at every visit, in the memory of a block and of O(n + m) numbers per direction. "auto" chooses by
            size.
        center: decompose the kernel of centred features, (I - 11^T/n) K (I - 11^T/m). The papers do not.
        n_oversamples: directions that the iteration carries beyond s.
        tol: largest ||K^T u - sigma v|| over the first singular value; None: the square root of the
            precision.
        max_iter: maximum number of passes over the matrix; a RuntimeWarning where it does not suffice.
        block_size: rows of K evaluated at a time; None: as many as fit the cache.
        generator: of the iteration's random start.

    Raises:
        InputError: for arguments that are not accepted, shapes that do not fit, or a kernel that is not
            finite.
    """
    operator = _operator(X, Z, kernel, kernel_params, block_size)
    check_components(n_components, operator.shape)
    check_iteration(n_oversamples, tol, max_iter)
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if method == "auto":
        method = _method(operator, n_components)
    if method != "matrix_free":
        operator = DenseOperator(operator.dense())
    whole = CenteredOperator(operator) if center else operator
    if method == "dense":
        found = dense_triplets(whole, n_components)
    else:
        found = leading_triplets(
            whole, n_components, n_oversamples=n_oversamples, tol=tol, max_iter=max_iter, generator=generator
        )
    signs = column_signs(found.left)
    parts = (found.left, found.right, found.left_scores, found.right_scores)
    left, right, e, r = (part * signs for part in parts)
    # Tr(W_e^T W_r) = Tr(H_r^T K^T H_e), without features.
    objective = directions_objective(e, r, found.values, trace=(right * r).sum(dim=0), size=whole.size)
    zeros = torch.zeros_like(found.values)
    means = (zeros, zeros)
    if center:  # scores of K with centred H_e and H_r differ from those of the centred K by these means only
        means = (operator.matmul(centered(right)).mean(dim=0), operator.rmatmul(centered(left)).mean(dim=0))
    require_range("X", "the singular values and scores of its kernel", found.values, e, r, objective)
    return SingularDirections(
        left, found.values, right, e, r, objective, found.num_visits, None, None, *means
    )


def _operator(
    X: Any,
    Z: Tensor | None,
    kernel: str | KernelFunction,
    parameters: Mapping[str, Any] | None,
    block_size: int | None,
) -> MatrixOperator:
    if block_size is not None and (not isinstance(block_size, Integral) or block_size < 1):
        raise InputError(f"block_size={block_size!r} must be a whole number from 1, or None")
    if is_operator(X) or kernel == "precomputed":
        if kernel != "precomputed":
            raise InputError(f"X is an operator: kernel must be 'precomputed', not {kernel!r}")
        if Z is not None:
            raise InputError("kernel='precomputed' takes the matrix as X and no Z")
        return ForeignOperator(X) if is_operator(X) else DenseOperator(X)
    if isinstance(kernel, str) and Z is not None and Z.size(1) != X.size(1):
        raise InputError(
            f"Z has {Z.size(1)} features and X {X.size(1)}, which kernel={kernel!r} cannot compare: use a "
            "callable kernel, or a primal solver with a compatibility matrix"
        )
    return KernelOperator(
        get_kernel_function(kernel, **(parameters or {})), X, X if Z is None else Z, block_size
    )


def _method(operator: MatrixOperator, rank: int) -> SvdMethod:
    n, m = operator.shape
    if min(n, m) <= _DENSE_UP_TO and n * m <= _IN_MEMORY_UP_TO:
        return "matrix_free" if isinstance(operator, ForeignOperator) else "dense"
    if isinstance(operator, DenseOperator) or 8 * rank > min(n, m):
        return "truncated"
    if isinstance(operator, ForeignOperator):
        return "matrix_free"
    return "truncated" if n * m <= _IN_MEMORY_UP_TO else "matrix_free"
