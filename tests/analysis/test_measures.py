"""What is measured of a matrix, against numpy and against what the definitions say."""

import itertools

import numpy as np
import pytest
import torch

from kernel_attention.analysis import layer_measures as measures


@pytest.fixture
def matrix() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 11, 7, dtype=torch.float64)


def test_explained_variance_is_the_energy_of_truncation(matrix):
    """1 - ||A - A_i||^2 / ||A||^2 with A_i the best approximation of rank i (Eckart-Young)."""
    shares = measures.explained_variance(measures.singular_values(matrix))
    for head, rank in itertools.product(range(3), range(1, 8)):
        u, s, vt = np.linalg.svd(matrix[head].numpy())
        rest = matrix[head].numpy() - (u[:, :rank] * s[:rank]) @ vt[:rank]
        expected = 1 - np.square(rest).sum() / np.square(matrix[head].numpy()).sum()
        assert shares[head, rank - 1].item() == pytest.approx(expected, abs=1e-12)


def test_effective_rank():
    """n for n equal values, 1 for rank 1, unmoved by scale and by added zeros; between for others."""
    eye = measures.singular_values(torch.eye(7, dtype=torch.float64)[None])
    assert measures.effective_rank(eye).item() == pytest.approx(7)
    one = measures.singular_values(torch.ones(1, 7, 5, dtype=torch.float64))
    assert measures.effective_rank(one).item() == pytest.approx(1)
    values = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    rank = measures.effective_rank(values)
    entropy = -sum(p * np.log(p) for p in (1 / 2, 1 / 3, 1 / 6))
    assert rank.item() == pytest.approx(np.exp(entropy))
    assert measures.effective_rank(measures.resized(5 * values, 9)).item() == pytest.approx(rank.item())
    assert measures.effective_rank(torch.zeros(3)).item() == 0


def test_mode_singular_values_are_those_of_the_unfoldings():
    torch.manual_seed(1)
    tensor = torch.randn(2, 5, 7, 3, dtype=torch.float64)
    found = measures.mode_singular_values(tensor)
    for mode, head in itertools.product(range(3), range(2)):
        unfolded = np.moveaxis(tensor[head].numpy(), mode, 0).reshape(tensor.size(mode + 1), -1)
        np.testing.assert_allclose(found[mode][head], np.linalg.svd(unfolded, compute_uv=False), rtol=1e-10)


def test_numerical_rank(matrix):
    low = matrix[..., :3] @ torch.randn(3, 3, 9, dtype=torch.float64)
    assert measures.numerical_rank(measures.singular_values(low)).tolist() == [3, 3, 3]


def test_head_distances_are_mean_distances_of_rows(matrix):
    found = measures.head_distances(matrix)
    for a, b in itertools.product(range(3), range(3)):
        rows = [np.linalg.norm(matrix[a, row] - matrix[b, row]) for row in range(11)]
        assert found[a, b].item() == pytest.approx(np.mean(rows))
    pairs = [found[a, b].item() for a, b in itertools.combinations(range(3), 2)]
    assert measures.mean_of_pairs(found).item() == pytest.approx(np.mean(pairs))
    assert measures.mean_of_pairs(found[:1, :1]).isnan()
