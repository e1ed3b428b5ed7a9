"""What each augmentation may change of a padded series, and what it must leave."""

import pytest
import torch

from kernel_attention import InputError
from kernel_attention.series.augmentation import (
    AUGMENTATIONS,
    augment,
    cut,
    jitter,
    mix_series,
    scale,
    time_warp,
    window,
)

LENGTHS = (29, 17, 2, 1)
MASK = torch.arange(29)[None] < torch.tensor(LENGTHS)[:, None]
ramps = pytest.mark.parametrize("change", [time_warp, window])


def series() -> torch.Tensor:
    return torch.randn(len(LENGTHS), 29, 3, dtype=torch.float64).masked_fill(~MASK[..., None], 0.0)


def ramp() -> torch.Tensor:
    """Every series rises from 0 to 1 over its real steps, so a value says where it was read."""
    last = (torch.tensor(LENGTHS) - 1).clamp_min(1)[:, None, None]
    return (torch.arange(29, dtype=torch.float64)[None, :, None] / last).expand(-1, -1, 3)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_some_series_change_others_do_not_and_padding_is_zero(name):
    x = series().repeat(16, 1, 1)
    mask = MASK.repeat(16, 1)
    torch.manual_seed(0)
    changed = augment(x, mask, [name])
    assert changed.shape == x.shape
    assert changed.isfinite().all()
    assert not changed[~mask].any()
    long = mask.sum(dim=1) > 2  # nothing warps one step
    same = (changed == x).flatten(1).all(dim=1)[long]
    assert 0 < same.sum() < len(same)


@ramps
def test_time_never_runs_backwards_and_padding_is_never_read(change):
    x = torch.where(MASK[..., None], ramp(), torch.nan)
    for seed in range(30):
        torch.manual_seed(seed)
        read = change(x, MASK)
        for b, length in enumerate(LENGTHS):
            places = read[b, :length]
            assert (places.diff(dim=0) >= -1e-12).all()
            assert places.min() >= 0
            assert places.max() <= 1
            assert torch.equal(places[:, 0], places[:, 1])  # channels stay together


def test_a_time_warp_keeps_both_ends():
    read = time_warp(ramp(), MASK)
    for b, length in enumerate(LENGTHS[:2]):
        torch.testing.assert_close(read[b, [0, length - 1], 0], torch.tensor([0.0, 1.0]).double())
        assert (read[b, :length, 0] - ramp()[b, :length, 0]).abs().max() > 1e-3


def test_a_window_is_a_straight_part_of_the_series_of_at_least_four_fifths():
    for seed in range(20):
        torch.manual_seed(seed)
        places = window(ramp(), MASK)[0, :, 0]
        speeds = places.diff()
        torch.testing.assert_close(speeds, speeds[:1].expand_as(speeds))
        assert 0.8 <= places[-1] - places[0] <= 1


def test_jitter_is_small_noise():
    noise = (jitter(series().repeat(50, 1, 1), MASK.repeat(50, 1)) - series().repeat(50, 1, 1)).std()
    assert jitter(series(), MASK).shape == series().shape
    x = torch.zeros(50, 29, 3)
    assert jitter(x, torch.ones(50, 29, dtype=torch.bool)).std().item() == pytest.approx(0.05, rel=0.1)
    assert noise > 0


def test_scale_is_one_factor_for_each_channel_of_a_series():
    factors = scale(torch.ones(40, 29, 3), torch.ones(40, 29, dtype=torch.bool))
    assert torch.equal(factors, factors[:, :1].expand_as(factors))
    assert factors[:, 0].log().std().item() == pytest.approx(0.1, rel=0.3)


def test_a_cut_is_one_piece_of_at_most_a_fifth_in_all_channels():
    mask = torch.ones(60, 29, dtype=torch.bool)
    gone = cut(torch.ones(60, 29, 3), mask) == 0
    assert torch.equal(gone[..., 0], gone[..., 2])
    assert gone.any()
    assert gone[..., 0].sum(dim=1).max() <= 0.2 * 28 + 1
    assert (gone[..., 0].int().diff(dim=1) == 1).sum(dim=1).max() <= 1


def test_a_mixture_is_convex_and_a_shorter_partner_ends_in_the_mean():
    x = series()
    torch.manual_seed(2)
    mixed = mix_series(x, MASK, 0.4)
    assert ((mixed.weight >= 0.5) & (mixed.weight <= 1)).all()
    assert sorted(mixed.partner.tolist()) == [0, 1, 2, 3]
    for b, partner in enumerate(mixed.partner.tolist()):
        assert mixed.attention_mask[b].sum() == max(LENGTHS[b], LENGTHS[partner])
        expected = mixed.weight[b] * x[b] + (1 - mixed.weight[b]) * x[partner]
        torch.testing.assert_close(mixed.x[b], expected)


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="unknown augmentation 'warp'"):
        augment(series(), MASK, ["warp"])
    with pytest.raises(InputError, match=r"alpha=0\.0 of mixup must be above 0"):
        mix_series(series(), MASK, 0.0)
