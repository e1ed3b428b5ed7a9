"""Augmentation of padded series while a model trains: jitter, scale, time warp, window, cut, and mixup.

Legend of shapes: B series, N steps, c channels. Every function takes standardised series x (B, N, c) and the
mask of their real steps (B, N), right padding. Random numbers come from PyTorch's global generators, on the
device of x, so that a run repeats and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown

AugmentationName = Literal["jitter", "scale", "time_warp", "window", "cut"]

_PROBABILITY = 0.5  # of each augmentation for each series: a part of a batch stays as it is
_JITTER = 0.05  # deviation of the noise, in deviations of the training data
_SCALE = 0.1  # deviation of the logarithm of a channel's factor
_WAVES = 4  # sine waves of a time warp
_WARP = 0.25  # deviation of the speed of a time warp
_WINDOW = 0.2  # largest part of a series that a window leaves out
_CUT = 0.2  # largest part of a series that a cut takes out


def jitter(x: Tensor, attention_mask: Tensor) -> Tensor:
    """Add normal noise."""
    return x + _JITTER * torch.randn_like(x)


def scale(x: Tensor, attention_mask: Tensor) -> Tensor:
    """Multiply every channel of every series by a factor near 1."""
    return x * (_SCALE * torch.randn_like(x[:, :1])).exp()


def time_warp(x: Tensor, attention_mask: Tensor) -> Tensor:
    """Read the series at a speed that varies smoothly, from its first step to its last."""
    place = _places(x, attention_mask)
    order = torch.arange(1, _WAVES + 1, device=x.device, dtype=x.dtype)
    # The bound keeps the derivative of the displacement above -1: time never runs backwards.
    share = _WARP * math.sqrt(2 / _WAVES) / (math.pi * order)
    bound = 1 / (_WARP * math.sqrt(2 * _WAVES))
    height = share * torch.randn(len(x), 1, _WAVES, device=x.device, dtype=x.dtype).clamp(-bound, bound)
    displacement = (height * (math.pi * place[..., None] * order).sin()).sum(dim=-1)
    return _read_at(x, attention_mask, place + displacement)


def window(x: Tensor, attention_mask: Tensor) -> Tensor:
    """Stretch a window of the series, at least 80 % of it, to the whole length."""
    place = _places(x, attention_mask)
    left_out, start = torch.rand(2, len(x), 1, device=x.device, dtype=x.dtype).unbind()
    left_out = _WINDOW * left_out
    return _read_at(x, attention_mask, start * left_out + (1 - left_out) * place)


def cut(x: Tensor, attention_mask: Tensor) -> Tensor:
    """Replace up to a fifth of the series by the mean of the training data, all channels at once."""
    place = _places(x, attention_mask)
    length, start = torch.rand(2, len(x), 1, device=x.device, dtype=x.dtype).unbind()
    length = _CUT * length
    start = start * (1 - length)
    return x.masked_fill(((place >= start) & (place <= start + length))[..., None], 0.0)


AUGMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "jitter": jitter,
    "scale": scale,
    "time_warp": time_warp,
    "window": window,
    "cut": cut,
}


def augment(x: Tensor, attention_mask: Tensor, names: Sequence[str]) -> Tensor:
    """Every augmentation in turn, each of half of the series; padded steps become 0.

    Raises:
        InputError: for an unknown name.
    """
    for name in names:
        if name not in AUGMENTATIONS:
            raise unknown("augmentation", name, AUGMENTATIONS)
        chosen = torch.rand(len(x), 1, 1, device=x.device) < _PROBABILITY
        x = torch.where(chosen, AUGMENTATIONS[name](x, attention_mask), x)
    return x.masked_fill(~attention_mask[..., None], 0.0)


def augment_unscaled(
    x: Tensor, attention_mask: Tensor, names: Sequence[str], mean: Tensor, std: Tensor
) -> Tensor:
    """``augment`` of series in their own scale, whose channels have this mean and deviation, (c,) each."""
    return augment((x - mean) / std, attention_mask, names) * std + mean


class Mixture(NamedTuple):
    """Mixed series x (B, N, c) with their mask, and the partner and the weight of each, (B,)."""

    x: Tensor
    attention_mask: Tensor
    partner: Tensor
    weight: Tensor


def mix_series(x: Tensor, attention_mask: Tensor, alpha: float) -> Mixture:
    """mixup (Zhang et al. 2018): the convex combination of every series with another of the batch.

    The weight of a series is at least that of its partner. A series that ends before its partner continues
    with the mean of the training data.

    Raises:
        InputError: where ``alpha`` is not above 0.
    """
    if not alpha > 0:
        raise InputError(f"alpha={alpha!r} of mixup must be above 0")
    partner = torch.randperm(len(x), device=x.device)
    drawn = torch.distributions.Beta(alpha, alpha).sample((len(x),)).to(x)
    weight = torch.maximum(drawn, 1 - drawn)
    share = weight[:, None, None]
    mixed = share * x + (1 - share) * x[partner]
    return Mixture(mixed, attention_mask | attention_mask[partner], partner, weight)


def _places(x: Tensor, attention_mask: Tensor) -> Tensor:
    """The place of every step in its series, 0 at the first real step and 1 at the last, (B, N)."""
    count = attention_mask.sum(dim=1, keepdim=True)
    return torch.arange(x.size(1), device=x.device, dtype=x.dtype) / (count - 1).clamp_min(1)


def _read_at(x: Tensor, attention_mask: Tensor, place: Tensor) -> Tensor:
    """The series at these places in [0, 1], interpolated linearly."""
    last = (attention_mask.sum(dim=1, keepdim=True) - 1).clamp_min(0)
    position = place.clamp(0, 1) * last
    low = position.floor()
    share = (position - low)[..., None]
    low = low.long()
    high = torch.minimum(low + 1, last)

    def at(index: Tensor) -> Tensor:
        return x.gather(1, index[..., None].expand_as(x))

    return torch.lerp(at(low), at(high), share)
