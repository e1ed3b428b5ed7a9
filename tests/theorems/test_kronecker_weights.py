"""Data-dependent weights in the Kronecker product (KMLSVD thesis, equations 3-9 and 3-10): no primal problem.

At order 2 the sequence f(X) moves from the one weight of a score to its features, which makes the kernel of
Primal-Attention. From order 3 on a score has D - 1 weights, and f(X) as often. The thesis says that this form
does not learn, and not why. These tests say what it is not: a primal problem. The derivation is ours.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import multilinear_kernel, multilinear_scores
from kernel_attention.tensors.features.feature_maps import identity
from reference import multilinear as reference
from reference.multilinear import kronecker, unfolded, without

F64 = torch.float64
TOKENS, WIDTH, SAMPLED, RANK = 7, 3, 5, 2
orders = pytest.mark.parametrize("order", [2, 3, 4])


def superdiagonal(size: int, order: int) -> Tensor:
    tensor = torch.zeros((size,) * order, dtype=F64)
    tensor[(torch.arange(size),) * order] = 1.0
    return tensor


def drawn(order: int) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Features Phi_n (N, M), sampled rows f(X) (N', M), weights W_n (N', R), and a core."""
    phi = [torch.randn(TOKENS, WIDTH, dtype=F64) for _ in range(order)]
    weights = [torch.randn(SAMPLED, RANK, dtype=F64) for _ in range(order)]
    return phi, torch.randn(SAMPLED, WIDTH, dtype=F64), weights, torch.randn((RANK,) * order, dtype=F64)


def printed(phi: list[Tensor], f: Tensor, weights: list[Tensor], core: Tensor) -> list[Tensor]:
    """E_n of equation 3-9 with the weights of 3-10 and C the superdiagonal identity."""
    c = superdiagonal(f.shape[1], len(phi))
    in_x = [f.T @ w for w in weights]
    return [
        phi[n] @ unfolded(c, n) @ kronecker(without(in_x, n)) @ unfolded(core, n).T for n in range(len(phi))
    ]


def moved(phi: list[Tensor], f: Tensor, weights: list[Tensor], core: Tensor) -> list[Tensor]:
    """E_n of the primal problem with the features f(X) phi(x) and C the superdiagonal identity."""
    c = superdiagonal(f.shape[0], len(phi))
    return [
        phi[n] @ f.T @ unfolded(c, n) @ kronecker(without(weights, n)) @ unfolded(core, n).T
        for n in range(len(phi))
    ]


def misfit(phi: Tensor, f: Tensor, order: int) -> Tensor:
    """How far 3-9 is from any features Psi of its own, of all that it computes.

    With unit weights and core E_1 is Phi C_(1) (f^T x .. x f^T), and Psi I_(1) for features Psi: the best
    ones are found by least squares.
    """
    c, unit = superdiagonal(f.shape[1], order), superdiagonal(f.shape[0], order)
    score = phi @ unfolded(c, 0) @ kronecker([f.T] * (order - 1))
    columns = unfolded(unit, 0)
    psi = torch.linalg.lstsq(columns.T, score.T).solution.T
    return (psi @ columns - score).norm() / score.norm()


@orders
def test_the_layer_has_the_form_whose_features_are_f_times_phi(order):
    phi, f, weights, core = drawn(order)
    found = multilinear_scores(
        [each[None, None] for each in phi],
        [w[None] for w in weights],
        core[None],
        rows=f[None, None],
        feature_map=identity,
    )
    for own, expected in zip(found, moved(phi, f, weights, core), strict=True):
        torch.testing.assert_close(own[0, 0], expected)


def test_at_order_2_the_printed_form_is_that_one_and_at_order_3_it_is_not():
    given = drawn(2)
    for own, other in zip(printed(*given), moved(*given), strict=True):
        torch.testing.assert_close(own, other)
    given = drawn(3)
    for own, other in zip(printed(*given), moved(*given), strict=True):
        assert (own - other).norm() > 0.1 * other.norm()


@pytest.mark.parametrize("order", [3, 4])
def test_from_order_3_on_no_features_whatever_make_it_a_primal_problem(order):
    phi, f, _, _ = drawn(order)
    assert misfit(phi[0], f, 2) < 1e-12
    assert misfit(phi[0], f, order) > 0.1
    orthogonal = torch.linalg.qr(f)[0]
    assert misfit(phi[0], orthogonal, order) > 0.1


@pytest.mark.parametrize("order", [3, 4])
def test_it_is_one_where_every_column_of_f_has_a_single_entry(order):
    phi = drawn(order)[0][0]
    f = torch.zeros(SAMPLED, WIDTH, dtype=F64)
    f[[3, 0, 3], [0, 1, 2]] = torch.tensor([2.0, -1.0, 0.5], dtype=F64)
    assert misfit(phi, f, order) < 1e-12
    f[1, 1] = 1e-3
    assert misfit(phi, f, order) > 1e-6


def test_with_these_weights_in_the_objective_too_f_drops_out_of_the_kernel():
    """For f of full column rank 3-9 is the standard problem in other coordinates: its kernel has no f."""
    phi = drawn(3)[0]
    kernel = multilinear_kernel([each[None, None] for each in phi])[0, 0]
    core, u = reference.mlsvd(kernel, [WIDTH] * 3)
    for f in (torch.randn(SAMPLED, WIDTH, dtype=F64), 10 * torch.randn(SAMPLED, WIDTH, dtype=F64)):
        weights = [torch.linalg.pinv(f.T) @ (each.T @ basis) for each, basis in zip(phi, u, strict=True)]
        weights = [w.requires_grad_() for w in weights]
        scores = printed(phi, f, weights, core)
        for n, e in enumerate(scores):
            torch.testing.assert_close(e, u[n] @ unfolded(core, n) @ unfolded(core, n).T)
        value = objective(scores, [f.T @ w for w in weights], core, kernel)
        value.backward()
        size = kernel.square().sum()
        assert abs(value) < 1e-10 * size
        for w in weights:
            assert w.grad.norm() < 1e-9 * size * f.norm()
    moved_kernel = multilinear_kernel([(each @ f.T)[None, None] for each in phi])[0, 0]
    assert not torch.allclose(moved_kernel, kernel)  # that of the form whose features are f(X) phi(x)


def objective(scores: list[Tensor], in_x: list[Tensor], core: Tensor, kernel: Tensor) -> Tensor:
    """J of equation 2-19 with the weights given in its second term."""
    first = sum(
        torch.trace(e @ torch.linalg.inv(unfolded(core, n) @ unfolded(core, n).T) @ e.T)
        for n, e in enumerate(scores)
    )
    second = torch.einsum("ai,aj,ak,ijk->", *in_x, core)
    return 0.5 * first - 2 * second + 0.5 * kernel.square().sum()


@orders
def test_the_scores_grow_with_the_power_order_minus_one_of_the_input_and_linearly_in_the_other_form(order):
    """Features that are normalised do not grow with the input; f(X) does."""
    phi, f, weights, core = drawn(order)
    for size in (0.1, 10.0):
        pairs = zip(printed(phi, size * f, weights, core), printed(phi, f, weights, core), strict=True)
        for larger, own in pairs:
            torch.testing.assert_close(larger, size ** (order - 1) * own)
        pairs = zip(moved(phi, size * f, weights, core), moved(phi, f, weights, core), strict=True)
        for larger, own in pairs:
            torch.testing.assert_close(larger, size * own)


def test_the_quadratic_dependence_alone_does_not_keep_it_from_learning():
    """Sequences with labels at random, a fixed readout, no penalty: the weights and the core learn them."""
    cases, labels = 16, torch.tensor([0.0, 1.0] * 8, dtype=F64)
    x = torch.randn(cases, TOKENS, WIDTH, dtype=F64)
    phi = x / x.square().sum((1, 2), keepdim=True).sqrt()
    readout = torch.randn(TOKENS, RANK, dtype=F64)
    _, _, weights, core = drawn(3)
    weights = [(w / SAMPLED).requires_grad_() for w in weights]
    core.requires_grad_()
    optimizer = torch.optim.Adam([*weights, core], lr=0.05)
    losses = []
    for _ in range(300):
        in_x = [x[:, :SAMPLED].mT @ w for w in weights]
        score = torch.einsum("bna,bas,bat,rst->bnr", phi, in_x[1], in_x[2], core)  # E_1 of 3-9
        logits = (score * readout).sum((1, 2))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first = [phi[0]] * 3, x[0, :SAMPLED], [w.detach() for w in weights], core.detach()
    torch.testing.assert_close(
        printed(*first)[0],
        torch.einsum(
            "na,as,at,rst->nr", phi[0], *(x[0, :SAMPLED].T @ w.detach() for w in weights[1:]), core.detach()
        ),
    )
    assert losses[-1] < 0.1 * losses[0]
