"""The picture of three attentions: near to the training inputs they agree, far from them they do not."""

from __future__ import annotations

import torch

from kernel_attention_lab.evidence.uncertainty import far_from_data as picture


def exact_regression(queries, covariance):
    """Mean and variance of Gaussian-process regression on the classes, by the textbook."""
    x, classes = picture.training_inputs()
    noisy = covariance(x, x) + picture.NOISE**2 * torch.eye(len(x))
    cross = covariance(queries, x)
    mean = cross @ torch.linalg.solve(noisy, classes)
    variance = covariance(queries, queries) - cross @ torch.linalg.solve(noisy, cross.mT)
    return mean.reshape(-1), variance.diagonal()


QUERIES = torch.linspace(-4, 4, 17, dtype=torch.float64)[:, None]


def test_with_a_key_at_every_input_sgpa_is_exact_regression():
    mean, variance = picture.sparse_posterior(QUERIES)
    expected = exact_regression(QUERIES, picture.kernel)
    # The jitter of 1e-6 stands in the covariance of the inducing keys; noise of 1/4 divides it.
    torch.testing.assert_close(mean, expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(variance, expected[1], atol=1e-4, rtol=0)


def test_kernel_gp_is_exact_regression_of_its_degenerate_prior():
    """The prior covariance is 4 K_qX U U^T K_Xq, of rank s: it is 0 far from the training inputs."""
    x, _ = picture.training_inputs()
    u = torch.linalg.svd(picture.kernel(x, x))[0][:, : picture.RANK]

    def degenerate(a, b):
        return 4 * picture.kernel(a, x) @ u @ u.mT @ picture.kernel(x, b)

    mean, variance = picture.kernel_eigen_posterior(QUERIES)
    expected = exact_regression(QUERIES, degenerate)
    torch.testing.assert_close(mean, expected[0], atol=1e-8, rtol=0)
    torch.testing.assert_close(variance, expected[1], atol=1e-8, rtol=0)


def test_far_from_the_training_inputs_softmax_is_sure_and_a_process_is_not():
    ends = torch.tensor([[-8.0], [8.0]], dtype=torch.float64)
    sure = picture.softmax_probability(ends)
    assert sure[0] < 0.01
    assert sure[1] > 0.99
    mean, variance = picture.sparse_posterior(ends)
    assert mean.abs().max() < 0.01
    assert (variance - 1).abs().max() < 0.01, "the prior's"
    mean, variance = picture.kernel_eigen_posterior(ends)
    assert mean.abs().max() < 0.01
    assert variance.max() < 1e-4, "small scores, small variance"
    curves = list(picture.far_from_data())
    assert {each["panel"] for each in curves} == {"probability of class 1", "standard deviation"}
