"""What a uniform sample of n of the N rows of X keeps of its patterns, the right singular directions.

Primal-Attention's supplement (section B.1) takes such a sample as f(X) and says that it keeps the main
patterns by the Johnson-Lindenstrauss lemma. That lemma is of random combinations of all rows. What holds of
rows that are chosen is ours; all subsets are counted, so nothing here is a matter of chance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

N, D, SAMPLE = 11, 5, 7
F64 = torch.float64


def samples(x: Tensor, size: int = SAMPLE) -> Iterator[Tensor]:
    """Every sample of so many rows."""
    for chosen in itertools.combinations(range(len(x)), size):
        yield x[list(chosen)]


def first_direction(x: Tensor) -> Tensor:
    return torch.linalg.svd(x, full_matrices=False)[2][0]


def test_the_gram_of_a_sample_is_that_of_the_sequence_on_average():
    """E[N/n F^T F] = X^T X: uniform samples have no pattern of their own."""
    x = torch.randn(N, D, dtype=F64)
    grams = torch.stack([N / SAMPLE * rows.mT @ rows for rows in samples(x)])
    torch.testing.assert_close(grams.mean(0), x.mT @ x)


def test_a_sample_of_full_rank_restricts_no_weights():
    """W = F^T V reaches every W of p rows where the n sampled rows span R^p, so J has the same optimum."""
    x, wanted = torch.randn(N, D, dtype=F64), torch.randn(D, 3, dtype=F64)
    for rows in samples(x):
        coefficients = torch.linalg.pinv(rows.mT) @ wanted
        torch.testing.assert_close(rows.mT @ coefficients, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [2, 7])
def test_a_pattern_that_all_rows_have_is_kept_by_every_sample(size):
    """X = a u^T with |a_i| = 1: the first direction of any sample is u."""
    u = torch.nn.functional.normalize(torch.randn(D, dtype=F64), dim=0)
    signs = torch.randint(0, 2, (N, 1)).to(F64) * 2 - 1
    for rows in samples(signs * u, size):
        torch.testing.assert_close((first_direction(rows) @ u).abs(), torch.ones((), dtype=F64))


def one_row_pattern() -> tuple[Tensor, Tensor]:
    """A sequence whose main pattern e_1 is that of one row; the other rows are orthogonal to it."""
    x = torch.randn(N, D, dtype=F64)
    x[:, 0] = 0
    pattern = torch.eye(D, dtype=F64)[0]
    x[4] = 10 * torch.linalg.matrix_norm(x, 2) * pattern
    return x, pattern


def test_a_pattern_of_one_row_is_lost_by_one_minus_n_over_n_of_all_samples():
    x, pattern = one_row_pattern()
    torch.testing.assert_close((first_direction(x) @ pattern).abs(), torch.ones((), dtype=F64))
    held = [float((first_direction(rows) @ pattern).abs()) for rows in samples(x)]
    lost = sum(value < 1e-12 for value in held)
    assert lost / math.comb(N, SAMPLE) == pytest.approx(1 - SAMPLE / N)
    assert min(value for value in held if value > 1e-12) > 0.99


def test_random_combinations_of_the_rows_keep_it_which_is_the_lemma():
    x, pattern = one_row_pattern()
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        mixed = torch.randn(SAMPLE, N, dtype=F64, generator=generator) @ x
        assert (first_direction(mixed) @ pattern).abs() > 0.9
