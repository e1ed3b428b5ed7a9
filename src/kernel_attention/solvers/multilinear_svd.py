"""The multilinear SVD of a tensor: higher-order SVD, and higher-order orthogonal iteration from there.

Source: De Lathauwer, De Moor, Vandewalle, "A multilinear singular value decomposition" and "On the best
rank-1 and rank-(R1, .., RN) approximation of higher-order tensors", SIAM J. Matrix Anal. Appl. 21(4), 2000.

Legend: a tensor K of order D has modes of sizes I_1..I_D; ranks R_n, factors U_n (I_n, R_n) with orthonormal
columns, core S (R_1..R_D).
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown
from kernel_attention.solvers.arrays import binary_unit, require_finite, require_range
from kernel_attention.tensors.multilinear.unfoldings import (
    deterministic_signs,
    mode_product,
    project_modes,
    unfold,
)
from kernel_attention.tensors.statistics import accumulation_dtype

Method = Literal["hosvd", "hooi"]
METHODS = ("hosvd", "hooi")
Ranks = int | Sequence[int] | None


class Multilinear(NamedTuple):
    """K ~ S x_1 U_1 .. x_D U_D with S = K x_1 U_1^T .. x_D U_D^T.

    ``core`` (R_1..R_D); ``factors`` (I_n, R_n), signs such that the entry of every column of largest size is
    positive; ``singular_values`` the mode-n singular values, those of the unfolding K_(n), all of them,
    falling, (I_n,). ``num_iterations`` and ``converged`` are 1 and True for "hosvd".
    """

    core: Tensor
    factors: tuple[Tensor, ...]
    singular_values: tuple[Tensor, ...]
    num_iterations: int
    converged: bool


def multilinear_svd(
    tensor: Tensor, ranks: Ranks = None, *, method: Method = "hosvd", tol: float = 1e-10, max_iter: int = 500
) -> Multilinear:
    """The multilinear SVD of a tensor, truncated to ``ranks``.

    "hosvd" takes the leading left singular vectors of every unfolding. At full rank the core is
    all-orthogonal (S_(n) S_(n)^T diagonal, falling, its roots the mode-n singular values) and the
    decomposition exact; truncated it is neither the best approximation nor all-orthogonal any more. "hooi"
    goes on from there by higher-order orthogonal iteration to a stationary point of ||S||: each factor from
    the SVD of K projected on the others, until no subspace turns by more than ``tol``. Its core is
    all-orthogonal. At order 2 both are the truncated SVD. Float32 or better; the unfoldings themselves are
    decomposed, as their Gram matrices would lose the singular values below the root of the precision.

    Args:
        tensor: (I_1..I_D), D >= 2.
        ranks: R_n at most I_n: one for every mode, or a sequence; None: I_n.
        method: "hosvd" or "hooi".
        tol: of "hooi": sine of the angle by which a sweep may still turn a subspace; not less than 8 times
            the largest I_n times the machine's precision.
        max_iter: of "hooi": largest number of sweeps.

    Raises:
        InputError: for a tensor of less than two modes, empty or not finite, other ranks, or another method.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    _require_tensor(tensor)
    sizes = read_ranks(ranks, tensor.shape)
    tensor = tensor.to(accumulation_dtype(tensor.dtype))
    unit = binary_unit(tensor)
    found = _of_unit_size(tensor / unit, sizes, method, tol, max_iter)
    core, spectra = found.core * unit, tuple(values * unit for values in found.singular_values)
    require_range("tensor", "its singular values", core, *spectra)
    return found._replace(core=core, singular_values=spectra)


def _of_unit_size(tensor: Tensor, sizes: list[int], method: Method, tol: float, max_iter: int) -> Multilinear:
    """``multilinear_svd`` of a tensor whose largest entry is near 1."""
    order = tensor.dim()
    bases, spectra = zip(*(_left_singular(unfold(tensor, n, order)) for n in range(order)), strict=True)
    factors = [basis[:, :rank] for basis, rank in zip(bases, sizes, strict=True)]
    if method == "hosvd":
        return Multilinear(core_of(tensor, factors), tuple(factors), spectra, 1, True)
    factors, sweeps, converged = _iterate(tensor, factors, tol, max_iter)
    # A fixed point is one of subspaces: their bases are those that make the core all-orthogonal.
    core = core_of(tensor, factors)
    turns = [_left_singular(unfold(core, n, order))[0] for n in range(order)]
    factors = [deterministic_signs(u @ turn) for u, turn in zip(factors, turns, strict=True)]
    return Multilinear(core_of(tensor, factors), tuple(factors), spectra, sweeps, converged)


def read_ranks(ranks: Ranks, sizes: Sequence[int]) -> list[int]:
    """A rank for every mode.

    Raises:
        InputError: for another number of ranks than of modes, or one that is not from 1 to the mode's size.
    """
    if ranks is None:
        return list(sizes)
    found = list(ranks) if isinstance(ranks, Iterable) else [ranks] * len(sizes)
    if len(found) != len(sizes) or not all(1 <= r <= size for r, size in zip(found, sizes, strict=True)):
        raise InputError(
            f"ranks={ranks!r} must be one whole number, or one for every mode, from 1 to the modes' sizes "
            f"{tuple(sizes)}"
        )
    return found


def _left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """All left singular vectors (I, I), signs deterministic, and the singular values (I,), zeros included."""
    # The R of the transpose is at most I x I: the long side is never decomposed further.
    small = torch.linalg.qr(matrix.mT, mode="r")[1].mT
    vectors, values, _ = torch.linalg.svd(small, full_matrices=True)
    return deterministic_signs(vectors), torch.nn.functional.pad(values, (0, len(vectors) - len(values)))


def core_of(tensor: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """K x_1 U_1^T .. x_D U_D^T, (R_1..R_D)."""
    for n, factor in enumerate(factors):
        tensor = mode_product(tensor, factor.mT, n, len(factors))
    return tensor


def _iterate(
    tensor: Tensor, factors: list[Tensor], tol: float, max_iter: int
) -> tuple[list[Tensor], int, bool]:
    """Higher-order orthogonal iteration: factors, number of sweeps, whether the subspaces converged."""
    if not (tol > 0 and max_iter > 0):
        raise InputError(f"tol={tol!r} and max_iter={max_iter!r} must be positive")
    floor = 8 * max(tensor.shape) * torch.finfo(tensor.dtype).eps
    for sweep in range(1, max_iter + 1):
        turned = 0.0
        for n, before in enumerate(factors):
            basis, values = _left_singular(project_modes(tensor, factors, n))
            basis = basis[:, : before.size(1)]
            # Where the projected tensor is zero, LAPACK chooses the basis, which may turn for ever.
            chosen = basis[:, values[: before.size(1)] > floor * values[0]]
            left = chosen - before @ (before.mT @ chosen)
            turned = max(turned, torch.linalg.vector_norm(left).item())
            factors[n] = basis
        if turned <= max(tol, floor):
            return factors, sweep, True
    return factors, max_iter, False


def _require_tensor(tensor: Tensor) -> None:
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise InputError(f"tensor has shape {tuple(tensor.shape)}, expected two modes or more, none empty")
    require_finite("tensor", tensor)
