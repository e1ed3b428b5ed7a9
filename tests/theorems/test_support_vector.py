"""Theorem 1 of the primal-dual paper, numerically: attention is the support vector expansion of a regression.

The regression is scikit-learn's SVR with the kernel k(x, y) = <Phi(x), Phi(y)> / (h(x) h(y)) given as a
matrix; its dual coefficients are alpha_j - alpha~_j.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernel_attention.functional import linear_attention, recentre, softmax_attention, sparse_mask
from kernel_attention.mechanisms.sparse.functional import SparsePattern
from kernel_attention.mechanisms.support_vector.token_convolution import TokenConvolution
from kernel_attention.tensors.features.feature_maps import elu
from kernel_attention.tensors.pooling import pool

svm = pytest.importorskip("sklearn.svm")

KEYS, QUERIES, WIDTH, TARGETS = 23, 7, 5, 3


def fit(similar_keys: np.ndarray, of_queries: np.ndarray, targets: np.ndarray):
    """SVR on k / (h h): (predictions without b (Q, T), dual coefficients (N, T)).

    ``similar_keys`` (N, N) and ``of_queries`` (Q, N) are <Phi, Phi>; h(x) is the sum over the keys, eq. 11.
    """
    h_keys, h_queries = similar_keys.sum(1), of_queries.sum(1)
    train = similar_keys / h_keys[:, None] / h_keys
    test = of_queries / h_queries[:, None] / h_keys
    predictions, duals = [], []
    for column in targets.T:
        model = svm.SVR(kernel="precomputed", C=50.0 * KEYS**2, epsilon=0.01).fit(train, column)
        dual = np.zeros(len(column))
        dual[model.support_] = model.dual_coef_[0]
        predictions.append(model.predict(test) - model.intercept_)
        duals.append(dual)
    return np.stack(predictions, 1), np.stack(duals, 1)


def problem(num_keys: int = KEYS):
    q, k = torch.randn(1, 1, QUERIES, WIDTH).double(), torch.randn(1, 1, num_keys, WIDTH).double()
    return q, k, np.random.default_rng(0).normal(size=(num_keys, TARGETS))


def exponential(q, k):
    return (q @ k.mT / math.sqrt(WIDTH)).exp()[0, 0].numpy()


def values(duals: np.ndarray, similar_keys: np.ndarray) -> torch.Tensor:
    """v_j = (alpha_j - alpha~_j) / h(k_j)."""
    return torch.from_numpy(duals / similar_keys.sum(1)[:, None])[None, None]


def test_theorem_1_softmax_attention_is_the_support_vector_expansion():
    q, k, targets = problem()
    predictions, duals = fit(exponential(k, k), exponential(q, k), targets)
    assert 0 < (duals != 0).sum() < duals.size  # some keys are no support vectors
    attended = softmax_attention(q, k, values(duals, exponential(k, k)))[0, 0]
    np.testing.assert_allclose(attended.numpy(), predictions, rtol=1e-8, atol=1e-12)


def test_section_2_2_1_linear_attention_is_the_expansion_with_another_phi():
    q, k, targets = problem()
    similar = (elu(k) @ elu(k).mT)[0, 0].numpy()
    predictions, duals = fit(similar, (elu(q) @ elu(k).mT)[0, 0].numpy(), targets)
    attended = linear_attention(q, k, values(duals, similar))[0, 0]
    np.testing.assert_allclose(attended.numpy(), predictions, rtol=1e-8, atol=1e-12)


def test_attention_bn_is_the_expansion_of_a_batch_normalised_regression():
    q, k, targets = problem()
    mean, scale = k.mean(2, keepdim=True), (k.var(2, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    q_n, k_n = (q - mean) * scale, (k - mean) * scale
    predictions, duals = fit(exponential(k_n, k_n), exponential(q_n, k_n), targets)
    q_r, k_r = recentre(q, k, normalize=True)
    attended = softmax_attention(q_r, k_r, values(duals, exponential(k_n, k_n)))[0, 0]
    np.testing.assert_allclose(attended.numpy(), predictions, rtol=1e-8, atol=1e-12)


def test_attention_sh_is_the_expansion_of_a_regression_on_fewer_data():
    q, k, targets = problem()
    pooled, fewer = pool(k, 3), pool(torch.from_numpy(targets), 3).numpy()
    predictions, duals = fit(exponential(pooled, pooled), exponential(q, pooled), fewer)
    attended = softmax_attention(q, pooled, values(duals, exponential(pooled, pooled)))[0, 0]
    np.testing.assert_allclose(attended.numpy(), predictions, rtol=1e-8, atol=1e-12)


def test_equations_17_and_18_multi_head_attention_combines_a_regression_per_head():
    """Each head has data of its own, so its own keys, duals and values; W_O combines the fitted functions."""
    heads, width = 3, 4
    q, k = torch.randn(1, heads, QUERIES, WIDTH).double(), torch.randn(1, heads, KEYS, WIDTH).double()
    w_out = torch.randn(width, heads * TARGETS).double()
    targets = np.random.default_rng(1).normal(size=(heads, KEYS, TARGETS))
    fitted, v = [], []
    for head in range(heads):
        q_s, k_s = q[:, head, None], k[:, head, None]
        predictions, duals = fit(exponential(k_s, k_s), exponential(q_s, k_s), targets[head])
        fitted.append(w_out.numpy()[:, head * TARGETS : (head + 1) * TARGETS] @ predictions.T)
        v.append(values(duals, exponential(k_s, k_s)))
    attended = softmax_attention(q, k, torch.cat(v, 1)).transpose(1, 2).flatten(2) @ w_out.T
    np.testing.assert_allclose(attended[0].numpy(), sum(fitted).T, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("shape", "size"), [((23,), 5), ((23,), 4), ((4, 6), 2), ((4, 6), 3)])
def test_appendices_g_and_h_convolved_attention_is_the_expansion_of_a_regression_on_convolved_data(
    shape, size
):
    """Equations 37 to 42: one kernel for all channels, on the new inputs and on the training inputs."""
    tokens = math.prod(shape)
    q, k = torch.randn(1, tokens, WIDTH).double(), torch.randn(1, tokens, WIDTH).double()
    targets = np.random.default_rng(2).normal(size=(tokens, TARGETS))
    convolution = TokenConvolution(WIDTH, size, grid_size=shape if len(shape) == 2 else None).double()
    torch.nn.init.normal_(convolution.q_kernel)
    q_c, k_c = (convolved_by_hand(x[0], convolution.q_kernel.detach(), shape)[None, None] for x in (q, k))
    predictions, duals = fit(exponential(k_c, k_c), exponential(q_c, k_c), targets)
    q_l, k_l = (x[:, None] for x in convolution.after(q, k, None, False))
    attended = softmax_attention(q_l, k_l, values(duals, exponential(k_c, k_c)))[0, 0].detach()
    np.testing.assert_allclose(attended.numpy(), predictions, rtol=1e-8, atol=1e-12)


def convolved_by_hand(x: torch.Tensor, kernel: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """sum_t kernel[t] x[i + t - s // 2] over the token grid, zeros outside it: x (N, p) -> (N, p)."""
    grid, out = x.reshape(*shape, -1), torch.zeros(*shape, x.shape[-1]).double()
    for place in np.ndindex(*shape):
        for tap in np.ndindex(*kernel.shape):
            seen = tuple(i + t - n // 2 for i, t, n in zip(place, tap, kernel.shape, strict=True))
            if all(0 <= i < n for i, n in zip(seen, shape, strict=True)):
                out[place] += kernel[tap] * grid[seen]
    return out.reshape(len(x), -1)


def test_equation_16_sparse_attention_keeps_the_expansions_terms_of_a_subset():
    q, k, targets = problem()
    _, duals = fit(exponential(k, k), exponential(q, k), targets)
    v = values(duals, exponential(k, k))
    mask = sparse_mask(SparsePattern("strided", 4), QUERIES, KEYS).numpy()
    similar = exponential(q, k) * mask
    expected = similar @ v[0, 0].numpy() / similar.sum(1, keepdims=True)
    from kernel_attention.functional import sparse_attention

    np.testing.assert_allclose(sparse_attention(q, k, v, SparsePattern("strided", 4))[0, 0].numpy(), expected)
