"""The rocket stem beside plain loops in float64, its thresholds, and its features as a way of training."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernel_attention import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.models.rocket_stem import RocketStem, dilations_of

CHANNELS, MAX_LEN, PATCH_LEN, EMBED_DIM = 5, 37, 4, 7
LENGTHS = (37, 2, 1, 23, 11)


def fitted_stem() -> tuple[RocketStem, torch.Tensor, torch.Tensor]:
    stem = RocketStem(CHANNELS, EMBED_DIM, MAX_LEN, PATCH_LEN).double()
    mask = torch.arange(MAX_LEN)[None] < torch.tensor(LENGTHS)[:, None]
    x = torch.randn(len(LENGTHS), MAX_LEN, CHANNELS, dtype=torch.float64).cumsum(dim=1)
    stem.fit(x, mask)
    return stem, x, mask


def features_by_loops(stem: RocketStem, series: torch.Tensor) -> torch.Tensor:
    """(n, c) -> (tokens, F): every number by itself, from the definition."""
    steps = len(series)
    tokens = -(-steps // PATCH_LEN)
    found = torch.zeros(tokens, stem.num_features, dtype=torch.float64)
    places = list(itertools.combinations(range(9), 3))
    column = 0
    for d, dilation in enumerate(stem.dilations):
        for q in range(stem.thresholds.size(-1)):
            for k, twos in enumerate(places):
                values = []
                for t in range(steps):
                    total = 0.0
                    for tap in range(9):
                        at = t + (tap - 4) * dilation
                        if 0 <= at < steps:
                            mixed = float(stem.channels[d, k] @ series[at])
                            total += (2.0 if tap in twos else -1.0) * mixed
                    ramp = (total - float(stem.thresholds[d, k, q])) * float(stem.slopes[d, k]) + 0.5
                    values.append(min(max(ramp, 0.0), 1.0))
                for m in range(tokens):
                    patch = values[m * PATCH_LEN : (m + 1) * PATCH_LEN]
                    found[m, column] = sum(patch) / len(patch)
                column += 1
    return (found - stem.mean) / stem.deviation


def test_features_are_those_of_plain_loops_padded_or_not():
    stem, x, mask = fitted_stem()
    features = stem.features(x, mask)
    for case in (4,):  # a short one: the loops are slow
        series = x[case, : LENGTHS[case]]
        expected = features_by_loops(stem, series)
        torch.testing.assert_close(features[case, : len(expected)], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(stem.features(series[None])[0], expected, rtol=1e-10, atol=1e-10)


def test_a_kernel_ignores_a_constant_and_reads_one_to_nine_channels():
    stem = RocketStem(12, EMBED_DIM, 300, 8)
    assert stem.dilations[0] == 1
    assert 8 * stem.dilations[-1] <= 299
    counts = (stem.channels != 0).sum(dim=-1)
    assert (counts.min(), counts.max()) == (1, 9)
    norms = stem.channels.square().sum(dim=-1)
    torch.testing.assert_close(norms, torch.ones_like(norms))
    far = 4 * stem.dilations[-1]  # where no kernel reaches beyond the series
    flat = stem.double()._convolved(torch.full((1, 300, 12), 3.0, dtype=torch.float64), 0)
    assert flat[..., far:-far].abs().max() < 1e-12


@pytest.mark.parametrize("max_len", [1, 2, 9, 17, 24, 300, 100_000])
def test_dilations_grow_from_one_to_the_length(max_len):
    dilations = dilations_of(max_len)
    assert dilations[0] == 1
    assert dilations == sorted(set(dilations))
    assert len(dilations) <= 8
    assert 8 * dilations[-1] <= max(max_len - 1, 8)
    assert 16 * dilations[-1] > max_len - 9


def test_thresholds_see_series_of_a_twentieth_of_the_usual_amplitude():
    """Series of one set can differ a hundredfold in amplitude: what each appliance draws, for one."""
    torch.manual_seed(0)
    stem = RocketStem(1, EMBED_DIM, 256, 256)
    x = torch.randn(40, 256, 1)
    stem.fit(x)
    small = 0.05 * x[:1]
    counted = stem.features(small) * stem.deviation + stem.mean
    exact = []
    for index, thresholds in enumerate(stem.thresholds):
        exceeding = stem._convolved(small, index)[0, :, None] > thresholds[..., None]
        exact.append(exceeding.float().mean(dim=-1).mT.flatten())
    exact = torch.cat(exact)
    reached = (exact > 0) & (exact < 1)
    assert reached.sum() > 100
    assert (counted.flatten() - exact)[reached].abs().mean() < 0.005


def test_fitted_features_are_standardised_and_thresholds_are_quantiles():
    torch.manual_seed(0)
    stem = RocketStem(1, EMBED_DIM, 64, 8)
    x = torch.randn(40, 64, 1).cumsum(dim=1)
    stem.fit(x)
    features = stem.features(x).flatten(0, 1)
    assert features.mean(dim=0).abs().max() < 1e-3
    varied = stem.deviation > 0.011  # above the smallest deviation
    assert varied.float().mean() > 0.9
    torch.testing.assert_close(
        features.std(dim=0, correction=0)[varied], torch.ones(int(varied.sum())), rtol=1e-2, atol=1e-2
    )
    share = stem.mean.view(len(stem.dilations), -1, 84)  # of steps above each threshold
    golden = torch.arange(1, 84 * share.size(1) + 1) * (math.sqrt(5) + 1) / 2 % 1
    assert (share[0] - (1 - golden.view(84, -1).mT)).abs().max() < 0.15


def test_a_constant_series_to_fit_on_gives_finite_tokens():
    stem = RocketStem(2, EMBED_DIM, 20, 3)
    stem.fit(torch.zeros(4, 20, 2))
    assert stem(torch.randn(3, 20, 2)).isfinite().all()


def test_gradients_reach_the_series():
    stem, x, _ = fitted_stem()
    x = x[3:4, :23].clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(stem(x).square().sum(), x)
    assert gradient.count_nonzero() > 0.5 * gradient.numel()


def test_training_may_start_from_the_features():
    """Features once, then the rest of the model: the same logits, and gradients of all parameters."""
    torch.manual_seed(0)
    model = SequenceClassifier(
        3, 4, 50, "primal", stem="rocket", patch_len=0, views=("raw", "normalized"), embed_dim=16,
        num_heads=2, feedforward_dim=32, pooling="mean_max",
    ).eval()  # fmt: skip
    x = torch.randn(6, 50, 3)
    mask = torch.arange(50)[None] < torch.tensor([50, 49, 8, 20, 33, 1])[:, None]
    model.encoder.fit_stem(x, mask)
    features = model.encoder.features(x, mask)
    assert features.shape == (6, 8, model.encoder.project.num_features)
    assert not features.requires_grad
    logits = model.from_features(features, model.encoder.token_mask(mask))
    torch.testing.assert_close(logits, model(x, mask))
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_other_stems_have_no_features():
    model = SequenceClassifier(3, 4, 50, "softmax", embed_dim=16, num_heads=2)
    for call in (model.encoder.features, model.encoder.from_features, model.encoder.fit_stem):
        with pytest.raises(InputError, match="stem='rocket'"):
            call(torch.randn(1, 50, 3))
