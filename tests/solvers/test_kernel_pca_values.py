"""Kernel PCA of the keys, and what is measured against it. Oracles are written out from the printed sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_attention.errors import InputError

pytest.importorskip("sklearn")
from sklearn.decomposition import KernelPCA as ReferenceKernelPCA
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention import solvers
from kernel_attention.solvers.kernel_pca_values import centred_gram

BATCH, HEADS, QUERIES, KEYS, WIDTH, COMPONENTS = 2, 3, 7, 11, 5, 4


@pytest.fixture
def keys() -> Tensor:
    return torch.randn(BATCH, HEADS, KEYS, WIDTH, dtype=torch.float64)


@pytest.fixture
def queries() -> Tensor:
    return torch.randn(BATCH, HEADS, QUERIES, WIDTH, dtype=torch.float64)


def plain_kernel(x: Tensor, y: Tensor, keys: Tensor) -> Tensor:
    """k(x, y) / (g(x) g(y)), with exponentials that overflow where they will; x (n, p), y (m, p)."""

    def k(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(a @ b.T / math.sqrt(keys.size(-1)))

    return k(x, y) / k(x, keys).sum(1)[:, None] / k(y, keys).sum(1)


def centring(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64) - 1 / n


def test_the_components_are_those_of_scikit_learns_kernel_pca(keys, queries):
    k, q = keys[1, 2], queries[1, 2]
    reference = ReferenceKernelPCA(n_components=COMPONENTS, kernel="precomputed")
    reference.fit(plain_kernel(k, k, k).numpy())
    found = solvers.kernel_pca_values(keys, COMPONENTS)
    np.testing.assert_allclose(found.eigenvalues[1, 2] * KEYS, reference.eigenvalues_, rtol=1e-9)
    # Scikit-learn centres the queries too, that is by a constant per component.
    projected = plain_kernel(q, k, k) @ centring(KEYS) @ found.coefficients[1, 2]
    theirs = torch.from_numpy(reference.transform(plain_kernel(q, k, k).numpy()))
    ours = projected - (plain_kernel(k, k, k) @ centring(KEYS) @ found.coefficients[1, 2]).mean(0)
    torch.testing.assert_close(ours.abs(), theirs.abs(), rtol=1e-8, atol=1e-12)


def test_the_coefficients_are_normalised_eigenvectors_and_the_values_are_the_printed_sum(keys):
    found = solvers.kernel_pca_values(keys, COMPONENTS)
    for b in range(BATCH):
        for h in range(HEADS):
            k, a, size = keys[b, h], found.coefficients[b, h], found.eigenvalues[b, h]
            gram = centring(KEYS) @ plain_kernel(k, k, k) @ centring(KEYS)
            torch.testing.assert_close(gram @ a, KEYS * size * a)
            torch.testing.assert_close((KEYS * size * a * a).sum(0), torch.ones_like(size))
            g = torch.exp(k @ k.T / math.sqrt(WIDTH)).sum(1)[:, None]
            torch.testing.assert_close(found.values[b, h], a / g - (a[None] / g[:, None]).sum(1) / KEYS)
            torch.testing.assert_close(found.log_normalizer[b, h].exp(), g[:, 0])
            assert (a.gather(0, a.abs().argmax(0, keepdim=True)) > 0).all()
            assert (size.diff() <= 0).all()


def test_no_eigenvalue_exceeds_1_over_the_number_of_keys():
    # g(k_j) >= k(k_j, k_j) >= 1, so the rows of K_phi sum to at most 1. The paper reports 648.
    for size in (0.0, 0.1, 1.0, 5.0):
        keys = size * torch.randn(3, 1, KEYS, WIDTH, dtype=torch.float64)
        assert solvers.kernel_pca_values(keys).eigenvalues.max() <= 1 / KEYS


def test_gamma_of_the_predicted_values_is_the_eigenvalue_everywhere(keys):
    found = solvers.kernel_pca_values(keys, 3)
    # Any scale: a trained layer's values have one of their own.
    ratios = solvers.eigenvalue_ratios(
        keys, found.values * torch.tensor([1e-200, -3.0, 1e200], dtype=torch.float64)
    )
    expected = found.eigenvalues[..., None, :].expand_as(ratios.gamma)
    torch.testing.assert_close(ratios.gamma, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ratios.eigenvalues, found.eigenvalues, rtol=1e-9, atol=0)
    torch.testing.assert_close(ratios.cosine, torch.ones_like(ratios.cosine))
    assert (ratios.relative_spread < 1e-6).all()


def test_gamma_and_spread_of_other_values_are_the_printed_ones(keys):
    values = torch.randn(BATCH, HEADS, KEYS, COMPONENTS, dtype=torch.float64)
    ratios = solvers.eigenvalue_ratios(keys, values)
    k = keys[1, 1]
    g = torch.exp(k @ k.T / math.sqrt(WIDTH)).sum(1)[:, None]
    a = centring(KEYS) @ (g * values[1, 1])
    gram = centring(KEYS) @ plain_kernel(k, k, k) @ centring(KEYS)
    gamma = gram @ a / (KEYS * a)
    torch.testing.assert_close(ratios.gamma[1, 1], gamma, rtol=1e-8, atol=1e-12)
    pairs = [(gamma[i] - gamma[j]).abs() for i in range(KEYS) for j in range(KEYS) if i != j]
    torch.testing.assert_close(ratios.spread[1, 1], torch.stack(pairs).mean(0), rtol=1e-8, atol=1e-12)
    deviation = torch.stack(pairs).std(0, correction=0)
    torch.testing.assert_close(ratios.deviation[1, 1], deviation, rtol=1e-8, atol=1e-12)
    rayleigh = (a * (gram @ a)).sum(0) / (KEYS * (a * a).sum(0))
    torch.testing.assert_close(ratios.eigenvalues[1, 1], rayleigh)
    cosine = torch.nn.functional.cosine_similarity(gram @ a, a, dim=0)
    torch.testing.assert_close(ratios.cosine[1, 1], cosine)
    torch.testing.assert_close(ratios.relative_spread, ratios.spread / ratios.eigenvalues)
    assert (ratios.relative_spread > 0.1).all()


def test_projection_error_is_the_squared_distance_to_the_projection(keys, queries):
    found = solvers.kernel_pca_values(keys, COMPONENTS)
    j_proj = solvers.projection_error(queries, keys, found.values)
    assert j_proj.shape == (BATCH, HEADS)
    k, q, a = keys[0, 1], queries[0, 1], found.coefficients[0, 1]
    # |phi(q) - sum_d h_d u_d|^2 through kernels only, u_d = sum_j a_dj (phi(k_j) - mean phi).
    axes = centring(KEYS) @ a
    h = plain_kernel(q, k, k) @ axes
    cross = (h * (plain_kernel(q, k, k) @ axes)).sum(1)
    inside = torch.einsum("id,de,ie->i", h, axes.T @ plain_kernel(k, k, k) @ axes, h)
    distance = plain_kernel(q, q, k).diagonal() - 2 * cross + inside
    torch.testing.assert_close(j_proj[0, 1], distance.mean())
    assert (distance > 0).all()
    fewer = solvers.projection_error(queries, keys, found.values[..., :2])
    assert (fewer >= j_proj).all()


def test_padding_counts_for_nothing(keys):
    real = KEYS - 4
    padded = keys.clone()
    padded[:, :, real:] = 1e4 * torch.randn(BATCH, HEADS, 4, WIDTH)
    mask = (torch.arange(KEYS) < real)[None, None].expand(BATCH, 1, KEYS)
    alone, found = solvers.kernel_pca_values(keys[:, :, :real], 3), solvers.kernel_pca_values(
        padded, 3, attention_mask=mask
    )  # fmt: skip
    torch.testing.assert_close(found.values[:, :, :real], alone.values)
    torch.testing.assert_close(found.log_eigenvalues, alone.log_eigenvalues)
    assert (found.values[:, :, real:] == 0).all()
    values = torch.randn(BATCH, HEADS, KEYS, 2, dtype=torch.float64)
    ratios = solvers.eigenvalue_ratios(padded, values, attention_mask=mask)
    expected = solvers.eigenvalue_ratios(keys[:, :, :real], values[:, :, :real])
    torch.testing.assert_close(ratios.gamma[:, :, :real], expected.gamma, rtol=1e-7, atol=1e-12)
    assert ratios.gamma[:, :, real:].isnan().all()
    torch.testing.assert_close(ratios.spread, expected.spread, rtol=1e-7, atol=1e-12)
    whole = solvers.projection_error(padded, padded, values, attention_mask=mask)
    part = solvers.projection_error(keys[:, :, :real], keys[:, :, :real], values[:, :, :real])
    torch.testing.assert_close(whole, part)
    # Cross-attention: the mask of the keys says nothing of the queries.
    other = torch.tensor([True, True, False, True, False, False, True])
    found = solvers.projection_error(keys[:, :, :7], padded, values, attention_mask=mask, query_mask=other)
    expected = solvers.projection_error(keys[:, :, :7][:, :, other], keys[:, :, :real], values[:, :, :real])
    torch.testing.assert_close(found, expected)
    # Padding may hold anything.
    spoiled = padded.masked_fill(~mask[..., None], torch.nan)
    other = values.masked_fill(~mask[..., None], torch.nan)
    torch.testing.assert_close(solvers.projection_error(spoiled, spoiled, other, attention_mask=mask), whole)
    found = solvers.kernel_pca_values(spoiled, 3, attention_mask=mask)
    torch.testing.assert_close(found.values[:, :, :real], alone.values)


def test_causal_projection_error_is_that_of_every_prefix(keys):
    queries, values = torch.randn_like(keys), torch.randn(BATCH, HEADS, KEYS, 2, dtype=torch.float64)
    found = solvers.projection_error(queries, keys, values, is_causal=True)
    prefixes = [
        solvers.projection_error(
            queries[:, :, i : i + 1],
            keys[:, :, : i + 1],
            values[:, :, : i + 1],
            query_mask=torch.tensor([True]),
        )
        for i in range(KEYS)
    ]
    torch.testing.assert_close(found, torch.stack(prefixes).mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_large_logits_stay_in_log_space(dtype):
    # Logits near 900: exp overflows even float64, and g with it. Keys of one length, so that no key outshines
    # the others beyond the precision.
    torch.manual_seed(1)
    unit = torch.nn.functional.normalize(torch.randn(4, 3, dtype=torch.float64), dim=-1)
    keys = (40.0 * unit).to(dtype)
    found = solvers.kernel_pca_values(keys, 3)
    assert found.values.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert found.log_eigenvalues.isfinite().all()
    assert (found.log_eigenvalues < -500).all()
    # K_phi is diagonal to the last bit here, exp(-k.k/sqrt(p)): its eigenvalues lie between its entries.
    exact = keys.double()
    ends = -exact.square().sum(-1) / math.sqrt(3) - math.log(4)
    log_size = found.log_eigenvalues.double()
    assert ends.min() - 1e-3 <= log_size.min()
    assert log_size.max() <= ends.max() + 1e-3
    if dtype == torch.float64:
        ratios = solvers.eigenvalue_ratios(keys, found.values)
        torch.testing.assert_close(ratios.cosine, torch.ones(3, dtype=torch.float64))
    assert solvers.projection_error(keys, keys, found.values).isfinite().all()


def test_components_that_are_not_there_are_zero():
    keys = torch.randn(3, WIDTH, dtype=torch.float64).repeat(2, 1)  # three different points: two axes
    found = solvers.kernel_pca_values(keys, 5)
    assert (found.eigenvalues[:2] > 0).all()
    for part in (found.values, found.coefficients, found.eigenvalues):
        assert (part[..., 2:] == 0).all()
    for none in (keys[:1], keys[:1].repeat(9, 1)):  # one point has no axis, however often
        assert (solvers.kernel_pca_values(none).values == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 3.0, 10.0, 30.0, 1e3, 1e6])
def test_equal_keys_have_no_component_at_any_length(dtype, scale):
    for seed in range(15):
        torch.manual_seed(seed)
        key = scale * torch.randn(1, 1 + seed % 7, dtype=dtype)
        found = solvers.kernel_pca_values(key.repeat(2 + 3 * seed, 1), 2)
        assert (found.values == 0).all()
        assert (found.coefficients == 0).all()  # not 0 * inf, where exp(logit) is out of range
        assert found.log_eigenvalues.isneginf().all()


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("distance", [0.0, 1e-15, 1e-12, 1e-9, 1e-3])
def test_repeated_and_nearly_repeated_keys_have_the_components_that_their_distances_carry(scale, distance):
    different = scale * torch.randn(4, WIDTH, dtype=torch.float64)
    keys = different.repeat(5, 1)
    keys = keys + distance * torch.randn_like(keys)
    found = solvers.kernel_pca_values(keys, 20)
    number = int(found.log_eigenvalues.isfinite().sum())
    # Points apart by delta have a kernel apart by delta^2, which is rounding below delta = 1e-8 or so.
    assert number == 3 if distance < 1e-8 else number > 3
    gram = centring(20) @ plain_kernel(keys, keys, keys) @ centring(20)
    exact = torch.linalg.eigvalsh(gram).flip(0) / 20
    torch.testing.assert_close(found.eigenvalues[:number], exact[:number], rtol=1e-4, atol=1e-15)


def test_the_rounding_of_the_gram_matrix_is_within_its_bound():
    """Against arithmetic with more digits, for keys whose components are nearly lost in rounding."""
    for seed in range(40):
        torch.manual_seed(seed)
        n, p = 2 + seed % 13, 1 + seed % 5
        keys = 10.0 ** (-3 + seed % 5) * torch.ones(n, p, dtype=torch.float64)
        keys = keys * (1 + 10.0 ** -(seed % 9) * torch.randn_like(keys))
        gram = centred_gram(keys, None)
        exact = keys.numpy().astype(np.longdouble)
        logits = exact @ exact.T / np.sqrt(np.longdouble(p))
        largest = logits.max(1)
        log_g = largest + np.log(np.exp(logits - largest[:, None]).sum(1))
        kernel = logits - log_g[:, None] - log_g
        kernel = np.exp(kernel - kernel.max())
        centred = kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()
        # One scale for both: the common factor exp(log_scale) is rounded too, and is no part of the error.
        error = np.linalg.norm((centred - gram.centred.numpy()).astype(np.float64), 2)
        common = np.linalg.norm(centred.astype(np.float64), 2) * 1e-15 * (1 + float(abs(logits).max()))
        assert error <= gram.rounding.item() + common


def test_the_estimator_projects_as_the_function_does_numpy_or_torch(keys, queries):
    k, q = keys[0, 0], queries[0, 0]
    estimator = solvers.KernelPCAValues(n_components=COMPONENTS).fit(k.numpy())
    projected = estimator.transform(q.numpy())
    assert isinstance(projected, np.ndarray)
    found = solvers.kernel_pca_values(k, COMPONENTS)
    # The same formula on another buffer, whose alignment may change the order of a sum.
    for name in ("values", "coefficients", "eigenvalues"):
        mine, theirs = getattr(estimator, f"{name}_"), getattr(found, name)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10 * theirs.abs().max().item())
    expected = plain_kernel(q, k, k) @ centring(KEYS) @ found.coefficients
    np.testing.assert_allclose(projected, expected, rtol=1e-8, atol=1e-12)
    same = solvers.KernelPCAValues(n_components=COMPONENTS).fit(k).transform(q)
    torch.testing.assert_close(same, torch.from_numpy(projected))
    single = solvers.KernelPCAValues().fit(k.float())
    assert single.values_.dtype == torch.float32
    assert single.values_.shape == (KEYS, WIDTH)


@parametrize_with_checks([solvers.KernelPCAValues()])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: solvers.kernel_pca_values(k, 0), "n_components=0 must be from 1 to 11"),
        (lambda k: solvers.kernel_pca_values(k, KEYS + 1), "n_components=12"),
        (lambda k: solvers.kernel_pca_values(k[0, 0, 0]), r"keys has shape \(5,\)"),
        (lambda k: solvers.eigenvalue_ratios(k, k[:, :, :3]), r"values has shape \(2, 3, 3, 5\)"),
        (lambda k: solvers.projection_error(k[..., :2], k, k), "the keys' width"),
        (lambda k: solvers.projection_error(k[:, :, :2], k, k, is_causal=True), "as many queries as keys"),
        (lambda k: solvers.KernelPCAValues().fit(k), r"X has shape \(2, 3, 11, 5\)"),
        (lambda k: solvers.KernelPCAValues().fit(k[0, 0]).transform(k[0, 0, :, :2]), "X has 2 features"),
        (lambda k: solvers.KernelPCAValues().fit(k[0, 0] / 0), "X holds NaN or infinity"),
        (
            lambda k: solvers.KernelPCAValues().fit(1e9 * k[0, 0]).transform(1e300 * k[0, 0]),
            "X holds numbers so large",
        ),
        (lambda k: solvers.kernel_pca_values(k / 0), "keys holds NaN or infinity"),
        (lambda k: solvers.kernel_pca_values(1e200 * k), "keys holds numbers so large that their products"),
        (lambda k: solvers.eigenvalue_ratios(k, k / 0), "values holds NaN or infinity"),
        (lambda k: solvers.eigenvalue_ratios(k[..., :1, :], k[..., :1, :]), "N at least 2"),
        (lambda k: solvers.projection_error(k / 0, k, k), "queries holds NaN or infinity"),
        (lambda k: solvers.projection_error(k, k, 1e200 * k), "values holds numbers so large"),
    ],
)
def test_bad_input_is_named(keys, call, message):
    with pytest.raises(InputError, match=message):
        call(keys)
