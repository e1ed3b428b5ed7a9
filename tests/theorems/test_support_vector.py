"""Theorem 1 of the primal-dual paper, numerically: attention is the support vector expansion of a regression.

The regression is scikit-learn's SVR with the kernel k(x, y) = <Phi(x), Phi(y)> / (h(x) h(y)) given as a
matrix; its dual coefficients are alpha_j - alpha~_j.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import kernel_attention as ka
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


@pytest.mark.parametrize(("shape", "size"), [((11,), 5), ((3, 4), 2)])
def test_one_kernel_for_all_channels_convolves_the_scores_along_both_axes(shape, size):
    """Conv(Q) = T Q with a matrix T of the tokens, so Conv(Q) Conv(K)^T = T (Q K^T) T^T."""
    tokens = math.prod(shape)
    q, k = torch.randn(2, 1, tokens, WIDTH).double()
    convolution = TokenConvolution(WIDTH, size, grid_size=shape if len(shape) == 2 else None).double()
    torch.nn.init.normal_(convolution.q_kernel)
    matrix = convolved_by_hand(torch.eye(tokens).double(), convolution.q_kernel.detach(), shape)
    q_c, k_c = convolution.after(q, k, None, False)
    scores = (q_c @ k_c.mT)[0].detach()
    torch.testing.assert_close(scores, matrix @ (q @ k.mT)[0] @ matrix.T)


def test_remark_7_separable_kernels_before_the_projections_are_the_attention_of_cvt():
    """CvT's batch norm is set to the identity, its stride to 1: remark 7 has neither."""
    cvt = pytest.importorskip("transformers.models.cvt.modeling_cvt")
    height, width, dim = 3, 5, 8
    theirs = cvt.CvtSelfAttention(1, dim, 3, 1, 1, 1, 1, "dw_bn", True, 0.0, with_cls_token=False)
    theirs = theirs.double().eval()
    ours = ka.create_attention(
        "conv2d",
        embed_dim=dim,
        num_heads=1,
        grid_size=(height, width),
        kernel_size=3,
        conv_weights="separable",
    )
    ours = ours.double()
    with torch.no_grad():
        for name, own in zip(("query", "key", "value"), "qkv", strict=True):
            projection = getattr(theirs, f"convolution_projection_{name}").convolution_projection
            projection.normalization.running_var.fill_(1 - projection.normalization.eps)
            getattr(ours.convolution, f"{own}_kernel").copy_(projection.convolution.weight[:, 0])
            getattr(ours, f"{own}_proj").load_state_dict(getattr(theirs, f"projection_{name}").state_dict())
        ours.out_proj.weight.copy_(torch.eye(dim))
        ours.out_proj.bias.zero_()
    x = torch.randn(2, height * width, dim).double()
    torch.testing.assert_close(ours(x), theirs(x, height, width))


def elu_features(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """phi(x) / h(x) of queries and of keys for features of finite width, (Q, p) and (N, p)."""
    of_q, of_k = elu(q), elu(k)
    total = of_k.sum(0)
    return of_q / (of_q @ total)[:, None], of_k / (of_k @ total)[:, None]


def test_one_regression_of_the_joined_outputs_would_tie_the_values_of_all_heads():
    """Why 17 and 18 need H of them: one ridge regression has v_j^s = W_O^s^T beta_j / h^s(k_j^s).

    There is one beta for all heads. The primal is solved for all W^s at once, by its normal equations.
    """
    heads, width, penalty = 3, 4, 0.1
    q, k = torch.randn(heads, QUERIES, WIDTH).double(), torch.randn(heads, KEYS, WIDTH).double()
    w_out, y = torch.randn(heads, width, TARGETS).double(), torch.randn(KEYS, width).double()
    features = [elu_features(q[s], k[s]) for s in range(heads)]
    design = torch.cat([torch.kron(features[s][1], w_out[s]) for s in range(heads)], 1)
    gram = design.T @ design + penalty * torch.eye(design.shape[1]).double()
    solved = torch.linalg.solve(gram, design.T @ y.flatten()).reshape(heads, WIDTH, TARGETS)
    fitted = sum(features[s][1] @ solved[s] @ w_out[s].T for s in range(heads))
    beta = (y - fitted) / penalty
    attended = 0
    for s in range(heads):
        torch.testing.assert_close(solved[s], features[s][1].T @ beta @ w_out[s])
        v = (beta @ w_out[s]) / (elu(k[s]) @ elu(k[s]).sum(0))[:, None]
        attended = (
            attended + linear_attention(q[s][None, None], k[s][None, None], v[None, None])[0, 0] @ w_out[s].T
        )
    expected = sum(features[s][0] @ solved[s] @ w_out[s].T for s in range(heads))
    torch.testing.assert_close(attended, expected)


def test_appendix_f_the_residual_is_a_regression_on_what_is_left_and_the_projection_is_one():
    """Equation 36: targets y - x, and one projection of new inputs and of data, so a symmetric attention."""
    x, new = torch.randn(KEYS, TARGETS).double(), torch.randn(QUERIES, TARGETS).double()
    projection = torch.randn(WIDTH, TARGETS).double()
    targets = np.random.default_rng(3).normal(size=(KEYS, TARGETS))
    q, k = (new @ projection.T)[None, None], (x @ projection.T)[None, None]
    predictions, duals = fit(exponential(k, k), exponential(q, k), targets - x.numpy())
    attended = softmax_attention(q, k, values(duals, exponential(k, k)))[0, 0] + new
    np.testing.assert_allclose(attended.numpy(), predictions + new.numpy(), rtol=1e-8, atol=1e-12)
    with_residual, _ = fit(exponential(k, k), exponential(q, k), targets)
    assert not np.allclose(with_residual, predictions + new.numpy())


def test_appendix_f_is_not_convex_in_the_projection():
    """Problem 33 in one dimension, C large: W_proj of both signs fit phi(z) = z^2, their mean does not."""
    x, y = torch.linspace(-1, 1, KEYS).double(), torch.linspace(-1, 1, KEYS).double() ** 2

    def value(w: float, w_proj: float) -> float:
        return 0.5 * (w**2 + w_proj**2) + 1e3 * float((y - w * (w_proj * x) ** 2).abs().sum())

    assert value(1.0, 0.0) > 0.5 * (value(1.0, 1.0) + value(1.0, -1.0)) + 1.0


def test_equation_16_sparse_attention_keeps_the_expansions_terms_of_a_subset():
    q, k, targets = problem()
    _, duals = fit(exponential(k, k), exponential(q, k), targets)
    v = values(duals, exponential(k, k))
    mask = sparse_mask(SparsePattern("strided", 4), QUERIES, KEYS).numpy()
    similar = exponential(q, k) * mask
    expected = similar @ v[0, 0].numpy() / similar.sum(1, keepdims=True)
    from kernel_attention.functional import sparse_attention

    np.testing.assert_allclose(sparse_attention(q, k, v, SparsePattern("strided", 4))[0, 0].numpy(), expected)
