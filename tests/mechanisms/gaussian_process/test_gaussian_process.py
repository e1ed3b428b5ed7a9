"""Gaussian-process attention: its oracle, the exact posterior at full rank, the divergence, its samples."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.functional import (
    PrimalScores,
    kernel_gp_attention,
    kernel_gp_divergence,
    kernel_gp_posterior,
    sgpa_posterior,
)
from reference import gaussian_process as reference

B, H, N, P, S, C, M = 2, 3, 7, 5, 4, 6, 5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def factors(*shape: int) -> torch.Tensor:
    """Lower triangular matrices with a positive diagonal."""
    return 0.3 * random(*shape).tril(-1) + torch.diag_embed(random(*shape[:-1]).exp())


def test_kernel_gp_equals_its_oracle():
    scores = PrimalScores(random(B, H, N, S), random(B, H, N, S))
    weights = 0.3 * random(H, S), random(H, S, C), factors(H, C, S, S)
    mean, variance, divergence = reference.kernel_gp(*scores, *weights)
    found = kernel_gp_posterior(scores, *weights)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.variance, variance)
    torch.testing.assert_close(kernel_gp_attention(scores, *weights[:2]), mean)
    torch.testing.assert_close(kernel_gp_divergence(*weights), divergence)


def sgpa_inputs():
    """q, v, keys, values, cholesky, log_scale, log_lengths."""
    return (
        random(B, H, N, P), random(B, H, N, P), random(H, M, P), random(H, M, P), factors(H, P, M, M),
        0.3 * random(H), 0.3 * random(H, P),
    )  # fmt: skip


def test_sgpa_equals_its_oracle():
    *tensors, log_scale, log_lengths = sgpa_inputs()
    found = sgpa_posterior(*tensors, log_scale, log_lengths, jitter=1e-6)
    expected = reference.sgpa(*tensors, log_scale.exp(), log_lengths.exp(), 1e-6)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("side", ["queries", "sum"])
def test_at_full_rank_kernel_gp_is_the_exact_posterior(side):
    """With the kernel SVD K = U Sigma V^T as scores, the best Gaussian u gives the exact process.

    The queries' process has the kernel K K^T; the sum with shared u that of (U + V) Sigma^2 (U + V)^T.
    """
    k, y, noise = random(N, N), random(N, 1), 0.3
    left, sigma, right = torch.linalg.svd(k)
    right = right.mT
    basis = left if side == "queries" else left + right
    prior = basis @ sigma.square().diag() @ basis.mT
    gain = prior @ torch.linalg.inv(prior + noise * torch.eye(N, dtype=k.dtype))
    s_u = torch.linalg.inv((1 / sigma.square()).diag() + basis.mT @ basis / noise)
    m_u = s_u @ basis.mT @ y / noise
    e, r = left * sigma, (right * sigma if side == "sum" else torch.zeros_like(k))
    scores = PrimalScores(e[None, None], r[None, None])
    log_sqrt_lambda = -0.5 * sigma.log()[None]
    mean, variance = kernel_gp_posterior(
        scores, log_sqrt_lambda, m_u[None], torch.linalg.cholesky(s_u)[None, None]
    )
    torch.testing.assert_close(mean[0, 0], gain @ y)
    torch.testing.assert_close(variance[0, 0, :, 0], (prior - gain @ prior).diagonal())
    if side == "queries":
        torch.testing.assert_close(prior, k @ k.mT)
    # At rank s < N the paper leaves the tail of the prior out: its variance is never larger.
    short = PrimalScores(e[None, None, :, :S], r[None, None, :, :S])
    start = torch.diag_embed(sigma[:S])[None, None]
    _, kept = kernel_gp_posterior(short, log_sqrt_lambda[:, :S], m_u[None, :S], start)
    tail = basis[:, S:] @ sigma[S:].square().diag() @ basis[:, S:].mT
    torch.testing.assert_close(kept[0, 0, :, 0] + tail.diagonal(), prior.diagonal())


def test_with_an_inducing_key_at_every_token_sgpa_is_the_exact_posterior():
    q, y, noise = random(1, 1, N, P), random(N, P), 0.3
    ones = torch.zeros(1, dtype=q.dtype), torch.zeros(1, P, dtype=q.dtype)
    k = reference.kernel(q[0, 0], q[0, 0], 1.0, torch.ones(P, dtype=q.dtype))
    noisy = torch.linalg.inv(k + noise * torch.eye(N, dtype=q.dtype))
    cov, root = k - k @ noisy @ k, torch.linalg.cholesky(k)
    white = torch.linalg.solve_triangular(root, cov, upper=False)
    white = torch.linalg.solve_triangular(root, white.mT, upper=False)
    factor = torch.linalg.cholesky(white).expand(1, P, N, N)
    values = (noisy @ y)[None]
    mean, variance, _ = sgpa_posterior(q, random(1, 1, N, P), q[0], values, factor, *ones, jitter=0.0)
    torch.testing.assert_close(mean[0, 0], k @ noisy @ y)
    torch.testing.assert_close(variance[0, 0], cov.diagonal()[:, None].expand(N, P))


def test_without_correction_the_mean_of_sgpa_is_kernel_regression():
    """With v_Z = K_ZZ^{-1} K_Zq v the inducing keys change the covariance alone: the mean is K v."""
    q, v, keys, _, *rest = sgpa_inputs()
    scale, lengths = rest[1].exp(), rest[2].exp()
    for h in range(H):
        k_qz = reference.kernel(q[0, h], keys[h], float(scale[h]), lengths[h])
        k_zz = reference.kernel(keys[h], keys[h], float(scale[h]), lengths[h])
        values = torch.linalg.solve(k_zz, k_qz.mT @ v[0, h])
        one = [part[h : h + 1] for part in rest]
        mean = sgpa_posterior(
            q[:1, h : h + 1], v[:1, h : h + 1], keys[h : h + 1], values[None], *one, jitter=0.0
        )[0]
        k_qq = reference.kernel(q[0, h], q[0, h], float(scale[h]), lengths[h])
        torch.testing.assert_close(mean[0, 0], k_qq @ v[0, h])


def test_the_divergence_is_the_mean_of_the_log_ratio():
    count = 100_000
    log_sqrt_lambda, mean, cholesky = 0.2 * random(1, S), 0.5 * random(1, S, 1), factors(1, 1, S, S)
    cov = cholesky[0, 0] @ cholesky[0, 0].mT
    prior = (-4 * log_sqrt_lambda[0]).exp().diag()
    ours = torch.distributions.MultivariateNormal(mean[0, :, 0], cov)
    theirs = torch.distributions.MultivariateNormal(torch.zeros(S, dtype=mean.dtype), prior)
    draws = ours.sample((count,))
    ratio = ours.log_prob(draws) - theirs.log_prob(draws)
    deviation = float(ratio.std()) / count**0.5
    assert abs(float(kernel_gp_divergence(log_sqrt_lambda, mean, cholesky) - ratio.mean())) < 4 * deviation


@pytest.mark.parametrize(("name", "options"), [("kernel_gp", {"rank": 3}), ("sgpa", {"num_inducing": 4})])
def test_samples_of_training_have_the_distribution_that_the_layer_says(name, options):
    layer = ka.create_attention(name, 6, 2, dtype=torch.float64, **options)
    x, count = random(1, 5, 6), 4000
    mean, variance = layer.distribution(x)
    assert mean.shape == variance.shape == (1, 5, 6)
    torch.testing.assert_close(layer.eval()(x), mean)
    samples = layer.train()(x.expand(count, -1, -1))
    error = (samples.mean(0) - mean[0]) / (variance[0] / count).sqrt()
    assert error.abs().max() < 5
    # The variance of a variance of Gaussians is 2 v^2 / n.
    assert (samples.var(0) / variance[0] - 1).abs().max() < 5 * (2 / count) ** 0.5
    (samples.square().mean() + ka.auxiliary_loss(layer)).backward()
    assert all(part.grad is not None and part.grad.isfinite().all() for part in layer.parameters())


@pytest.mark.parametrize("name", ["kernel_gp", "sgpa"])
def test_samples_follow_the_generator_of_torch_and_can_be_switched_off(name):
    layer = ka.create_attention(name, 6, 2).train()
    x = torch.randn(2, 5, 6)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(layer(x), first)
    still = ka.create_attention(name, 6, 2, sample=False).train()
    assert torch.equal(still(x), still.eval()(x))


@pytest.mark.parametrize("name", ["kernel_gp", "sgpa"])
def test_the_divergence_joins_the_loss_with_its_own_weight(name):
    losses = []
    for weight in (0.5, 1.0):
        torch.manual_seed(0)
        layer = ka.create_attention(name, 6, 2, kl_weight=weight)
        layer(torch.ones(2, 5, 6))
        losses.append(ka.auxiliary_loss(layer))
    torch.testing.assert_close(2 * losses[0], losses[1])


def test_a_sample_of_kernel_gp_is_one_function_of_the_tokens():
    layer = ka.create_attention("kernel_gp", 6, 2).train()
    y = layer(torch.randn(1, 1, 6).expand(1, 4, 6))
    torch.testing.assert_close(y, y[:, :1].expand_as(y))


def test_sgpa_refuses_a_causal_call():
    with pytest.raises(ka.InputError, match="no causal form"):
        ka.create_attention("sgpa", 6, 2)(torch.ones(1, 3, 6), is_causal=True)
