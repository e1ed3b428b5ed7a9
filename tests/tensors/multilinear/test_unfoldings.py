"""Tensor algebra: what folds unfolds, products are sums over an index, eigenvectors have the gradients they
should.
"""

from __future__ import annotations

import pytest
import torch

from kernel_attention.tensors.multilinear.unfoldings import (
    by_eigenvalues,
    by_solving,
    deterministic_signs,
    fold,
    leading_eigenvectors,
    mode_gram,
    mode_product,
    project_modes,
    pseudo_inverse,
    unfold,
)

F64 = torch.float64
modes = pytest.mark.parametrize("mode", [0, 1, 2])


@modes
def test_folding_undoes_unfolding(mode):
    tensor = torch.randn(7, 2, 3, 5, 4)
    matrix = unfold(tensor, mode, 3)
    assert matrix.shape == (7, 2, tensor.size(2 + mode), 60 // tensor.size(2 + mode))
    assert torch.equal(fold(matrix, mode, (3, 5, 4)), tensor)


@modes
def test_a_mode_product_sums_over_that_mode(mode):
    tensor, matrix = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(2, 6, (3, 5, 4)[mode], dtype=F64)
    result = mode_product(tensor, matrix, mode, 3)
    for j in range(6):
        by_hand = sum(matrix[0, j, i] * tensor[0].select(mode, i) for i in range(matrix.size(2)))
        torch.testing.assert_close(result[0].select(mode, j), by_hand)


@modes
def test_a_mode_gram_holds_the_products_of_slices(mode):
    tensor = torch.randn(2, 3, 5, 4, dtype=F64)
    gram = mode_gram(tensor, mode, 3)
    for i in range(gram.size(1)):
        for j in range(gram.size(1)):
            torch.testing.assert_close(
                gram[1, i, j], (tensor[1].select(mode, i) * tensor[1].select(mode, j)).sum()
            )


@modes
def test_projecting_leaves_the_kept_mode_and_the_others_in_their_order(mode):
    tensor, bases = (
        torch.randn(2, 3, 5, 4, dtype=F64),
        [torch.randn(2, n, r, dtype=F64) for n, r in ((3, 2), (5, 3), (4, 2))],
    )
    by_hand = tensor
    for m, basis in enumerate(bases):
        if m != mode:
            by_hand = mode_product(by_hand, basis.mT, m, 3)
    torch.testing.assert_close(project_modes(tensor, bases, mode), unfold(by_hand, mode, 3))


def test_signs_make_the_largest_entry_positive():
    vectors = torch.tensor([[1.0, -3.0, 0.0], [-2.0, 1.0, 0.0]])
    assert deterministic_signs(vectors).tolist() == [[-1.0, 3.0, 0.0], [2.0, -1.0, 0.0]]


def test_eigenvectors_are_orthonormal_and_ordered_and_zero_past_the_size():
    x = torch.randn(3, 5, 5, dtype=F64)
    gram = x @ x.mT
    u = leading_eigenvectors(gram, 7)
    assert u.shape == (3, 5, 7)
    torch.testing.assert_close(u[..., :5].mT @ u[..., :5], torch.eye(5, dtype=F64).expand(3, 5, 5))
    assert not u[..., 5:].any()
    values = (u.mT @ gram @ u).diagonal(dim1=-2, dim2=-1)
    assert (values.diff(dim=-1) <= 1e-12).all()
    torch.testing.assert_close(leading_eigenvectors(gram, 2), u[..., :2])


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
def test_gradients_equal_finite_differences(rank):
    x = torch.randn(2, 4, 6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: leading_eigenvectors(x @ x.mT, rank), (x,))


def test_gradients_are_those_of_torchs_own_decomposition_where_it_has_them():
    x = torch.randn(4, 6, dtype=F64, requires_grad=True)
    probe = torch.randn(4, 2, dtype=F64)
    (found,) = torch.autograd.grad((leading_eigenvectors(x @ x.mT, 2) * probe).sum(), x)
    (wanted,) = torch.autograd.grad((deterministic_signs(torch.linalg.svd(x)[0])[:, :2] * probe).sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-6, 1.0, 1e12])
@pytest.mark.parametrize("kind", ["identity", "ones", "twins", "noise"])
def test_gradients_are_finite_where_eigenvalues_meet(kind, size, dtype):
    x = {
        "identity": torch.eye(5), "ones": torch.ones(5, 5), "twins": torch.randn(3, 5)[[0, 0, 1, 1, 2]],
        "noise": torch.eye(5) + 1e-8 * torch.randn(5, 5),
    }[kind]  # fmt: skip
    gram = (size * (x @ x.mT)).to(dtype).requires_grad_()
    u = leading_eigenvectors(gram, 4)
    (u * torch.randn_like(u)).sum().backward()
    assert u.isfinite().all()
    assert gram.grad.isfinite().all()


# Lower triangle of a Gram matrix met in training: MKL answers its denormal entries with NaN.
_DENORMAL = """
2.80e-3 7.40e-4 2.35 2.33e-2 1.54e-1 7.50 3.04e-2 3.13e-2 8.04e-1 9.18e-1 5.07e-16 1.31e-13 4.07e-11
2.71e-12 1.81e-21 9.15e-8 1.34e-2 9.60e-2 4.05e-2 7.09e-16 3.94e-2 1.10e-8 2.87e-3 4.14e-5 2.42e-5
5.04e-19 8.84e-6 5.69e-6 2.31e-26 2.18e-24 3.87e-25 2.18e-25 2.22e-38 1.04e-27 7.12e-27 1.65e-43 1.44e-26
4.67e-25 6.71e-25 2e-26 1.11e-37 1.76e-31 1.76e-30 4.20e-45 1.40e-45 2.20e-26 3.89e-24 6.28e-25 1.77e-25
1.66e-37 6.79e-28 8.25e-27 2.66e-44 0 4.20e-45 2.78e-20 3.33e-18 1.77e-18 7.17e-20 7.32e-31 1.33e-26
2.69e-24 4.95e-43 3.37e-42 3.35e-42 2.03e-35 3.23e-25 5.21e-23 2.12e-23 1.01e-24 1.14e-35 3.83e-29
4.98e-28 0 0 0 3.08e-40 4.20e-45 1.38e-26 4.51e-24 1.23e-24 7.58e-26 9.91e-37 1.48e-31 5.49e-30 0 0 0
2.60e-41 0 0
"""


def test_entries_of_all_sizes_do_not_break_the_decomposition():
    entries = torch.tensor([float(entry) for entry in _DENORMAL.split()])
    gram = torch.zeros(13, 13)
    gram[*torch.tril_indices(13, 13)] = entries
    gram = gram.tril() + gram.tril(-1).mT
    values, exact = torch.linalg.eigh(gram.double())
    found = leading_eigenvectors(gram.requires_grad_(), 5)
    for column in range(4):  # the eigenvalues that float32 sees; the next is 1e-15 of the largest
        assert abs(found[:, column].double() @ exact[:, -1 - column]) > 1 - 1e-4, values
    found.square().sum().backward()
    assert found.isfinite().all()
    assert gram.grad.isfinite().all()
    for seed in range(300):  # the failure comes and goes with the order and the scale of the rows
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(13, generator=generator)
        scale = 10 ** (3 * torch.randn(13, generator=generator))
        graded = gram.detach()[rows][:, rows] * scale[:, None] * scale
        assert leading_eigenvectors(graded, 5).isfinite().all(), seed


def test_no_gradient_is_made_where_none_is_wanted():
    gram = torch.eye(3, requires_grad=True)
    with torch.no_grad():
        assert not leading_eigenvectors(gram, 2).requires_grad
    assert not leading_eigenvectors(torch.eye(3), 2).requires_grad


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_the_pseudo_inverse_is_that_of_moore_and_penrose(rank):
    x = torch.randn(7, 5, rank, dtype=F64)
    expected = torch.linalg.pinv(x @ x.mT, hermitian=True, rtol=1e-12)
    torch.testing.assert_close(pseudo_inverse(x @ x.mT), expected, rtol=1e-8, atol=1e-8)
    assert pseudo_inverse(torch.zeros(3, 3)).abs().max() == 0


@pytest.mark.parametrize("rank", [5, 3])
def test_the_pseudo_inverse_of_accelerators_needs_no_eigenvalues(rank):
    x = 1e2 * torch.randn(4, 7, rank, dtype=torch.float64) @ torch.randn(4, rank, 31, dtype=torch.float64)
    gram = x @ x.mT
    torch.testing.assert_close(by_solving(gram), by_eigenvalues(gram), rtol=1e-4, atol=1e-6)
    assert by_solving(torch.zeros(3, 3)).abs().max() == 0


def test_the_gradient_of_the_pseudo_inverse_is_that_of_a_change_of_constant_rank():
    range_, probe = torch.randn(5, 3, dtype=F64), torch.randn(3, 4, dtype=F64)

    def seen(core):  # only the range of the singular Gram matrix is looked at, as the objective does
        x = range_ @ core
        return (x @ probe).mT @ pseudo_inverse(x @ x.mT) @ (x @ probe)

    assert torch.autograd.gradcheck(seen, torch.randn(3, 3, dtype=F64, requires_grad=True))


# Forward mode imports torch's own scripted derivatives.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "function", [lambda gram: leading_eigenvectors(gram, 3), lambda gram: pseudo_inverse(gram)]
)
def test_forward_mode_is_the_transpose_of_the_backward_pass(function):
    # Also at the eigenvalues of equal size of a matrix of rank 4, where eigh's own derivative is NaN.
    x = torch.randn(7, 4, dtype=F64)
    gram, tangent = x @ x.mT, x @ torch.randn(4, 4, dtype=F64) @ x.mT
    leaf = gram.clone().requires_grad_()
    y = function(leaf)
    probe = torch.randn_like(y)
    (pulled,) = torch.autograd.grad(y, leaf, probe)
    _, pushed = torch.func.jvp(function, (gram,), (tangent,))
    torch.testing.assert_close((probe * pushed).sum(), (pulled * tangent).sum())
