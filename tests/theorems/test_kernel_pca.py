"""Why Scaled Attention looks as it does: the kernel PCA of self-attention, numerically, in float64.

Sources: theorem 1 (attention projects queries on the principal axes of the keys), remark 1 (the centred Gram
matrix), remark 3 and appendix E.1 (the S that the centring amounts to) of Teo & Nguyen 2024. Prime sizes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import scaled_attention, softmax_attention

QUERIES, TOKENS, WIDTH, COMPONENTS = 7, 11, 5, 3


def similarity(x: Tensor, y: Tensor) -> Tensor:
    return torch.exp(x @ y.mT / math.sqrt(WIDTH))


@pytest.fixture
def keys() -> Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=torch.float64)


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(QUERIES, WIDTH, dtype=torch.float64)


def normaliser(x: Tensor, keys: Tensor) -> Tensor:
    """g(x) = sum_j k(x, k_j), as a column."""
    return similarity(x, keys).sum(dim=1, keepdim=True)


def kernel(x: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """k_phi = k / (g g)."""
    return similarity(x, y) / (normaliser(x, keys) * normaliser(y, keys).mT)


def dual_coefficients(keys: Tensor) -> Tensor:
    """a_1..a_D as columns: eigenvectors of the centred Gram matrix with N lambda a.a = 1."""
    centring = torch.eye(TOKENS, dtype=torch.float64) - 1 / TOKENS
    values, vectors = torch.linalg.eigh(centring @ kernel(keys, keys, keys) @ centring)
    return (vectors / values.clamp_min(1e-300).sqrt())[:, -COMPONENTS:]


def projections(queries: Tensor, keys: Tensor, a: Tensor) -> Tensor:
    """phi(q_i) . u_d with u_d = sum_j a_dj (phi(k_j) - mean phi)."""
    gram = kernel(queries, keys, keys)
    return (gram - gram.mean(dim=1, keepdim=True)) @ a


def heads(x: Tensor) -> Tensor:
    return x[None, None]


def exact_s(keys: Tensor) -> Tensor:
    """S(j, j') = g(k_j') / (N g(k_j))."""
    g = normaliser(keys, keys)
    return g.mT / g / TOKENS


def test_the_principal_axes_have_length_one(keys):
    a, gram = dual_coefficients(keys), kernel(keys, keys, keys)
    centring = torch.eye(TOKENS, dtype=torch.float64) - 1 / TOKENS
    torch.testing.assert_close(
        a.mT @ centring @ gram @ centring @ a, torch.eye(COMPONENTS, dtype=torch.float64)
    )


@pytest.mark.parametrize("source", ["here", "solver"])
def test_theorem_1_attention_with_these_values_projects_the_queries_on_the_principal_axes(
    queries, keys, source
):
    a = dual_coefficients(keys)
    values = (a - a.mean(dim=0)) / normaliser(keys, keys)
    if source == "solver":
        pytest.importorskip("sklearn")
        from kernel_attention.solvers import kernel_pca_values

        values = kernel_pca_values(keys, COMPONENTS).values
        a = a.flip(1)  # the largest first there, and signs of its own
        a = a * torch.sign((values * a).sum(0))
    attended = softmax_attention(heads(queries), heads(keys), heads(values))[0, 0]
    torch.testing.assert_close(attended, projections(queries, keys, a))


def test_remark_3_scaled_attention_centres_what_is_not_centred(queries, keys):
    # For any coefficients, not only those of components, whose sum is 0.
    a = torch.randn(TOKENS, COMPONENTS, dtype=torch.float64) + 1.0
    values = heads(a / normaliser(keys, keys))
    attended = scaled_attention(heads(queries), heads(keys), values, s=exact_s(keys)[None])[0, 0]
    torch.testing.assert_close(attended, projections(queries, keys, a))
    assert not torch.allclose(softmax_attention(heads(queries), heads(keys), values)[0, 0], attended)


def test_for_the_components_themselves_s_changes_nothing(queries, keys):
    # sum_j a_dj = 0 where lambda > 0, so S v = 0: the two attentions differ in training only.
    values = heads(dual_coefficients(keys) / normaliser(keys, keys))
    attended = scaled_attention(heads(queries), heads(keys), values, s=exact_s(keys)[None])
    torch.testing.assert_close(attended, softmax_attention(heads(queries), heads(keys), values))


def test_appendix_e_1_s_is_the_symmetric_attention_over_its_transpose(keys):
    symmetric = similarity(keys, keys) / normaliser(keys, keys)
    torch.testing.assert_close(symmetric / symmetric.mT / TOKENS, exact_s(keys))


def test_the_exact_s_is_lost_as_a_ratio_of_weights_and_kept_as_a_difference_of_logarithms():
    """Section 4.3 fears errors. The keys have one length, and weights for each other below float32."""
    keys = 30 * torch.nn.functional.normalize(torch.randn(TOKENS, WIDTH, dtype=torch.float64), dim=-1)
    expected = exact_s(keys)
    scores = (keys @ keys.mT / math.sqrt(WIDTH)).float()
    weights = scores.softmax(dim=-1)
    assert not (weights / weights.mT).isfinite().all()  # appendix E.1
    assert not exact_s(keys.float()).isfinite().all()  # remark 3
    logs = torch.logsumexp(scores, dim=-1)
    torch.testing.assert_close((logs - logs[:, None]).exp() / TOKENS, expected.float(), rtol=1e-3, atol=0.0)
