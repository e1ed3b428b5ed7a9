"""Tensor algebra of the multilinear SVD: unfoldings, mode products, eigenvectors with finite gradients.

A tensor has leading batch dimensions and, last, ``order`` modes of sizes I_1..I_D; ``mode`` counts from 0.
"""

import math
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.recompute import is_forward_mode, is_transformed, needs_gradient, only_formulas
from kernel_attention.tensors.statistics import smallest

_SHIFT = 2.0**-19  # of ``by_solving``, and a dimension: 16 roundings of the largest eigenvalue in float32


def unfold(tensor: Tensor, mode: int, order: int) -> Tensor:
    """Mode-n unfolding X_(n): (..., I_1..I_D) -> (..., I_mode, product of the other sizes in order)."""
    first = tensor.dim() - order
    return tensor.movedim(first + mode, first).flatten(first + 1)


def fold(matrix: Tensor, mode: int, sizes: tuple[int, ...]) -> Tensor:
    """The tensor with modes of these ``sizes`` with this mode-n unfolding, (..., sizes[mode], -1)."""
    others = sizes[:mode] + sizes[mode + 1 :]
    first = matrix.dim() - 2
    return matrix.unflatten(-1, others).movedim(first, first + mode)


def mode_product(tensor: Tensor, matrix: Tensor, mode: int, order: int) -> Tensor:
    """X x_n A: ``matrix`` (..., J, I) changes the size of mode ``mode`` from I to J."""
    sizes = list(tensor.shape[tensor.dim() - order :])
    sizes[mode] = matrix.size(-2)
    return fold(matrix @ unfold(tensor, mode, order), mode, tuple(sizes))


def mode_gram(tensor: Tensor, mode: int, order: int) -> Tensor:
    """X_(n) X_(n)^T, (..., I_mode, I_mode)."""
    matrix = unfold(tensor, mode, order)
    if torch.compiler.is_compiling():
        # The last unfolding is a transpose, whose strides torch.export cannot follow.
        matrix = matrix.contiguous()
    return matrix @ matrix.mT


def project_modes(tensor: Tensor, bases: Sequence[Tensor], keep: int) -> Tensor:
    """X_(n) (.. (x) U_m (x) ..) over all modes m but ``keep``: (..., I_keep, product of R_m).

    The bases are (..., I_m, R_m). The last modes are contracted first, because that reads the tensor in
    place.
    """
    order = len(bases)
    names = string.ascii_letters[:order]
    for mode in range(order) if keep == order - 1 else reversed(range(order)):
        if mode != keep:
            result = names.replace(names[mode], "z")
            tensor = torch.einsum(f"...{names},...{names[mode]}z->...{result}", tensor, bases[mode])
    return unfold(tensor, keep, order)


def deterministic_signs(vectors: Tensor) -> Tensor:
    """The columns of (..., n, k), each with the sign that makes its entry of largest size positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def _scaled_eigh(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Descending eigenvalues of gram / largest, their eigenvectors, and ``largest``, the largest |entry|.

    They are constants: forward-mode differentiation would look into a block without gradients too.

    MKL returns NaN for some Gram matrices whose entries span many powers of ten, down to denormals. A shift
    by the rounding error keeps the eigenvectors and avoids the failure.
    """
    precision, gram = torch.finfo(gram.dtype), gram.detach()
    largest = gram.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(precision.tiny / precision.eps)
    shift = precision.eps * torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    values, vectors = torch.linalg.eigh(gram / largest + shift)
    return values.flip(-1) - precision.eps, vectors.flip(-1), largest


def pseudo_inverse(gram: Tensor) -> Tensor:
    """Moore-Penrose inverse of positive semi-definite (..., n, n); eigenvalues below n eps count as zero.

    The first and second derivatives are those of the inverse on the matrix's range, -P dG P and
    2 P dG P dG P. They are finite whatever the eigenvalues. There are no higher ones.
    """
    is_eager = not torch.compiler.is_compiling() and only_formulas() is None
    if gram.device.type != "cpu" and is_eager:
        return _BySolving.apply(gram)
    with torch.no_grad():
        inverse = by_eigenvalues(gram) if gram.device.type == "cpu" else by_solving(gram)
    change = inverse @ (gram - gram.detach())  # zero, with the derivatives of the Gram matrix
    return 2 * inverse - inverse @ gram @ inverse + change @ change @ inverse


def by_eigenvalues(gram: Tensor) -> Tensor:
    """``pseudo_inverse``, a constant."""
    values, vectors, largest = _scaled_eigh(gram)
    limit = gram.size(-1) * torch.finfo(gram.dtype).eps * values[..., :1].clamp_min(0.0)
    kept = values > limit
    scale = torch.where(kept, 1.0 / values.where(kept, 1.0), 0.0)
    return (vectors * scale[..., None, :]) @ vectors.mT / largest


def by_solving(gram: Tensor) -> Tensor:
    """The same on accelerators, where an eigenvalue decomposition asks whether it has converged.

    X = G (G^2 + t^2)^-1 takes an eigenvalue g to g / (g^2 + t^2), with t above the rounding errors of
    float32: 0 stays 0. X + X E + X E^2 with E = 1 - G X cubes the relative error, t^2 / (g^2 + t^2).
    """
    exact = torch.float64 if gram.device.type != "mps" else gram.dtype
    given, width = gram.detach().reshape(-1, *gram.shape[-2:]), gram.size(-1)
    size = torch.linalg.vector_norm(given, dim=(-2, -1), keepdim=True, dtype=exact)
    size = torch.threshold_(size, smallest(gram.dtype), math.inf)
    unit = given / size
    eye = kept_constant(
        ("eye", width, exact), gram, lambda: torch.eye(width, dtype=exact, device=gram.device)
    )
    solved = torch.linalg.inv_ex(torch.baddbmm(eye, unit, unit, beta=(_SHIFT * width) ** 2)).inverse
    inverse = torch.bmm(unit, solved)
    error = torch.baddbmm(eye, unit, inverse, alpha=-1)
    first, inverse = inverse, torch.baddbmm(inverse, inverse, error)
    inverse = torch.baddbmm(first, inverse, error)
    return torch.div(inverse, size, out=torch.empty_like(given)).view_as(gram)


class _BySolving(torch.autograd.Function):
    """``by_solving``; its gradient -P dG P is differentiable, because P is the output."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor) -> Tensor:
        inverse = by_solving(gram)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grads[0] @ inverse.mT)


def leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Orthonormal eigenvectors of the ``rank`` largest eigenvalues: (..., n, n) symmetric -> (..., n, rank).

    Signs are deterministic; columns past n are zero. The gradient is that of perturbation theory,
    dU = U (F * (U^T dG U)) with F_ij = 1 / (lambda_j - lambda_i), which has a pole where eigenvalues meet.
    There F is broadened to a Lorentzian, gap / (gap^2 + width^2), whose width is the rounding error of the
    eigenvalues. So the gradient is exact for eigenvalues that floating point tells apart, and 0 for those
    that it does not. First derivatives only.
    """
    with torch.no_grad():
        precision = torch.finfo(gram.dtype)
        values, vectors, largest = _scaled_eigh(gram)
        vectors = deterministic_signs(vectors)
        # Zero columns, so that `rank` of them exist for any n without asking which is larger.
        leading = torch.nn.functional.pad(vectors, (0, rank))[..., :rank]
    if not (needs_gradient(gram) or is_transformed() or is_forward_mode()):
        return leading
    with torch.no_grad():
        leading_values = torch.nn.functional.pad(values, (0, rank))[..., :rank]
        gap = leading_values[..., None, :] - values[..., :, None]
        width = 8 * gram.size(-1) * precision.eps
        rates = gap / (gap.square() + width**2) / largest
    change = vectors.mT @ (gram - gram.detach()) @ leading  # zero, with the gradient of the Gram matrix
    return leading + vectors @ (rates * change)
