"""The objective of the kernel multilinear SVD (KMLSVD), and the penalty for its core.

Source: Verbeek, "3D Primal Attention", TU Delft 2025 (eq. 2-19, 2-21, 3-13, 3-14), here for any order D >= 2.
The legend is that of ``kernel_attention.mechanisms.multilinear.functional``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.tensors.multilinear.factors import alike, multilinear_factors
from kernel_attention.tensors.multilinear.unfoldings import mode_gram, mode_product, pseudo_inverse
from kernel_attention.tensors.statistics import exactly, without_autocast


def kmlsvd_objective(
    grams: Sequence[Tensor],
    weights: Sequence[Tensor],
    core: Tensor,
    *,
    compatibility: Tensor | None = None,
    factors: Sequence[Tensor] | None = None,
    num_tokens: Tensor | int | None = None,
) -> Tensor:
    """The KMLSVD objective J of a layer (eq. 2-19 at order 3), a 0-dimensional tensor in float32 or better.

    J is a sum over the tokens of a sequence and head, averaged over batch and heads:

        J = 1/2 sum_n Tr(E_n (S_(n) S_(n)^T)^{-1} E_n^T) - (D - 1) vec(C)^T (W_D (x) .. (x) W_1) vec(S)
            + (D - 2)/2 ||K||^2

    with ||K||^2 = vec(C)^T (Phi_D^T Phi_D (x) .. (x) Phi_1^T Phi_1) vec(C), the kernel tensor's norm. Tokens
    enter through their Gram matrices only. J = 0 at the full-rank multilinear SVD of K; the truncated one
    does not give 0 (unlike the kernel SVD's objective), and J alone is unbounded below.

    Args:
        grams: Phi_n^T Phi_n over the real tokens, (B, h, M_n, M_n), one per mode. In the data-dependent form
            the features are f(X) phi(x), and C is the identity over the sampled rows.
        weights: (h, M_n, R_n).
        core: (h, R_1..R_D).
        compatibility: None, (h, M) or (h, M_1..M_D).
        factors: ``multilinear_factors`` of the three above, if computed already.
        num_tokens: (B,) or a number that divides the Gram matrices. J is then that of the features over
            sqrt(N), for feature maps that do not normalise over the sequence.
    """
    order = len(weights)
    with without_autocast(core):
        weights, core, grams = [exactly(w) for w in weights], exactly(core), [exactly(g) for g in grams]
        if factors is None:
            factors = multilinear_factors(weights, core, compatibility)
        core_grams = [mode_gram(core, n, order) for n in range(order)]
        # vec(C)^T (W_D (x) .. (x) W_1) vec(S) = Tr(W_1^T C_(1) (W_D (x) .. (x) W_2) S_(1)^T): the first
        # factor contains all of it but W_1.
        alignment = (weights[0] * factors[0]).sum()
        return objective_of_grams(
            grams, factors, core_grams, alignment, compatibility=compatibility, num_tokens=num_tokens
        )


def objective_of_grams(
    grams: Sequence[Tensor],
    factors: Sequence[Tensor],
    core_grams: Sequence[Tensor],
    alignment: Tensor,
    *,
    compatibility: Tensor | None = None,
    num_tokens: Tensor | int | None = None,
) -> Tensor:
    """``kmlsvd_objective`` from S_(n) S_(n)^T, (h, R_n, R_n), and Tr(W_n^T F_n), summed over the heads."""
    order = len(factors)
    if num_tokens is not None:
        count: Tensor | int
        if isinstance(num_tokens, Tensor):
            count = num_tokens.clamp_min(1).view(-1, 1, 1, 1)
        else:
            count = max(num_tokens, 1)  # as a tensor it would tie a compiled graph to one length
        grams = [gram / count for gram in grams]
    operands = list(zip(grams, factors, core_grams, strict=True))
    if alike(grams) and alike(factors) and alike(core_grams):  # modes of one size share their steps
        operands = [(torch.stack(list(grams)), torch.stack(list(factors)), torch.stack(list(core_grams)))]
    if grams[0].size(0) == 0:  # no sequences: J is 0, and its graph holds every weight
        return 0.0 * (alignment + torch.stack([gram.sum() for gram in grams]).sum())
    energy = torch.stack([_energy(*each) for each in operands]).sum()
    objective = 0.5 * energy - (order - 1) * alignment
    if order > 2:
        objective = objective + 0.5 * (order - 2) * _kernel_energy(grams, compatibility) / grams[0].size(0)
    return objective / factors[0].size(0)


def _energy(gram: Tensor, factor: Tensor, core_gram: Tensor) -> Tensor:
    """Tr(E_n (S_(n) S_(n)^T)^{-1} E_n^T), averaged over the batch and summed over modes and heads.

    ``gram`` is Phi_n^T Phi_n, (.., B, h, M, M); ``factor`` is (.., h, M, R) with E_n = Phi_n factor;
    ``core_gram`` is (.., h, R, R).
    """
    # S_(n) S_(n)^T may be singular; E_n is orthogonal to its null space.
    return (pseudo_inverse(core_gram).mT * (factor.mT @ gram.mean(dim=-4) @ factor)).sum()


def _kernel_energy(grams: Sequence[Tensor], compatibility: Tensor | None) -> Tensor:
    """||K||^2, summed over batch and heads."""
    if compatibility is None or compatibility.dim() == 2:
        product = functools.reduce(torch.mul, grams)
        if compatibility is None:
            return product.sum()
        diagonal = exactly(compatibility)
        return (diagonal * (product @ diagonal[..., None])[..., 0]).sum()
    tensor = exactly(compatibility)
    transformed = tensor
    for n, gram in enumerate(grams):
        transformed = mode_product(transformed, gram, n, len(grams))
    return (tensor * transformed).sum()


def core_penalty(core: Tensor) -> Tensor:
    """J_S (eq. 3-14): the squared off-diagonal entries of S_(n) S_(n)^T, summed over modes, mean over heads.

    ``core`` is (h, R_1..R_D). J_S is 0-dimensional, in float32 or better. It is zero exactly at the cores of
    multilinear SVDs.
    """
    order = core.dim() - 1
    with without_autocast(core):
        grams = [mode_gram(exactly(core), n, order) for n in range(order)]
        off_diagonal = [gram - gram.diagonal(dim1=-2, dim2=-1).diag_embed() for gram in grams]
        return torch.stack([part.square().sum() for part in off_diagonal]).sum() / core.size(0)
