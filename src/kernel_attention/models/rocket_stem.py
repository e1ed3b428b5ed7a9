"""From the steps of a series to tokens through random convolutions, after MiniRocket.

Legend of shapes: B series, N steps, c channels, M = ceil(N / patch_len) tokens, F features, d model width, D
dilations, K = 84 kernels, Q thresholds of every kernel and dilation. Masks are (B, N) with True = real step;
padding is on the right.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import require_positive
from kernel_attention.tensors.pooling import pool_mask

KERNEL_SIZE = 9
NUM_KERNELS = math.comb(KERNEL_SIZE, 3)
_NUM_DILATIONS = 8
_NUM_THRESHOLDS = 48  # of every kernel, over all dilations
_MOST_CHANNELS = 9  # that one kernel reads
_SOFTNESS = 0.01  # width of a threshold, in deviations of what it divides
_SMALLEST_DEVIATION = 1e-2  # of a feature, which lies in [0, 1]
_FITTED_STEPS = 2**13  # that give the thresholds
_CELLS_AT_ONCE = 2**19  # of convolved series: they stay near the processor
_MOST_AT_ONCE = 32  # cases
_GOLDEN_RATIO = (math.sqrt(5) + 1) / 2


def cases_at_once(length: int) -> int:
    """Series of so many steps that random convolutions are fast with, at a time."""
    return min(max(_CELLS_AT_ONCE // (NUM_KERNELS * length), 1), _MOST_AT_ONCE)


def dilations_of(max_len: int) -> list[int]:
    """At most 8 dilations, in a geometric row from 1 to that whose kernel spans the longest series."""
    top = math.log2(max((max_len - 1) / (KERNEL_SIZE - 1), 1))
    return sorted({int(2 ** (top * index / (_NUM_DILATIONS - 1))) for index in range(_NUM_DILATIONS)})


class RocketStem(nn.Module):
    """How often random convolutions exceed their thresholds within every patch, then a linear map.

    The kernels are MiniRocket's (Dempster et al. 2021): nine taps of -1 and 2 that sum to zero, at dilations
    up to the length of the series, each reading a random part of the channels. MiniRocket counts over the
    whole series; here every patch of ``patch_len`` steps is a token. Only the linear map learns. A threshold
    has a narrow slope in place of a jump, so that gradients reach the series. The thresholds are quantiles of
    the convolutions over training series, which ``fit`` sets, and before of white noise.

    Args:
        in_features: channels c.
        embed_dim: width d of the tokens.
        max_len: longest series, which gives the dilations.
        patch_len: steps per token.
        where: ``device`` and ``dtype`` of the parameters.

    Attributes:
        num_features: F, what the linear map reads of a token.
        ramp: the slope of the thresholds, of which ``integrated_gradients`` wants another gradient.
    """

    taps: Tensor
    channels: Tensor
    thresholds: Tensor
    slopes: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(
        self, in_features: int, embed_dim: int, max_len: int, patch_len: int = 1, **where: Any
    ) -> None:
        super().__init__()
        require_positive(in_features=in_features, embed_dim=embed_dim, max_len=max_len, patch_len=patch_len)
        self.patch_len = patch_len
        self.ramp: Callable[[Tensor], Tensor] = _ramp
        self.dilations = dilations_of(max_len)
        per_kernel = round(_NUM_THRESHOLDS / len(self.dilations))
        shape = (len(self.dilations), NUM_KERNELS, per_kernel)
        self.num_features = math.prod(shape)
        for name, sizes in (
            ("channels", (*shape[:2], in_features)), ("thresholds", shape), ("slopes", shape[:2]),
            ("mean", (self.num_features,)), ("deviation", (self.num_features,)),
        ):  # fmt: skip
            self.register_buffer(name, torch.empty(sizes, **where))
        self.register_buffer("taps", torch.empty(NUM_KERNELS, KERNEL_SIZE, **where), persistent=False)
        self.linear = nn.Linear(self.num_features, embed_dim, **where)
        self._reset_kernels()

    def reset_parameters(self) -> None:
        """Draw the linear map and the channels of every kernel; set the thresholds of white noise."""
        self.linear.reset_parameters()
        self._reset_kernels()

    @torch.no_grad()
    def _reset_kernels(self) -> None:
        in_features = self.channels.size(-1)
        largest = math.log2(min(in_features, _MOST_CHANNELS) + 1)
        count = torch.exp2(largest * torch.rand(self.channels.shape[:2])).floor()[..., None]
        rank = torch.rand(self.channels.shape).argsort(dim=-1).argsort(dim=-1)
        self.channels.copy_((rank < count) / count.sqrt())
        kernels = rocket_kernels()
        self.taps.copy_(kernels)
        deviation = kernels.norm(dim=1)
        quantiles = torch.special.ndtri(even_quantiles(self.thresholds.shape[1:]))
        self.thresholds.copy_(deviation[:, None] * quantiles)
        self.slopes.copy_(1 / (_SOFTNESS * deviation))
        self.mean.copy_(
            1 - even_quantiles(self.thresholds.shape[1:]).mT.flatten().repeat(len(self.dilations))
        )
        self.deviation.fill_(1.0)

    @torch.no_grad()
    def fit(self, x: Tensor, attention_mask: Tensor | None = None) -> None:
        """Set thresholds to quantiles over these series (B, N, c), and standardise the features by them."""
        quantiles = even_quantiles(self.thresholds.shape[1:]).to(x)
        for index in range(len(self.dilations)):
            y = self._convolved(x, index).mT
            y = y.flatten(0, 1) if attention_mask is None else y[attention_mask]
            y = y[:: -(-len(y) // _FITTED_STEPS)].mT.contiguous()
            places = (quantiles * (y.size(1) - 1)).round().long()
            self.thresholds[index] = y.sort(dim=1).values.gather(1, places)
            self.slopes[index] = 1 / (_SOFTNESS * y.std(dim=1, correction=0)).clamp_min(1e-6)
        self.mean.zero_()
        self.deviation.fill_(1.0)
        at_once = cases_at_once(x.size(1))
        parts = [slice(start, start + at_once) for start in range(0, len(x), at_once)]
        masks = [None if attention_mask is None else attention_mask[part] for part in parts]
        features = torch.cat([self.features(x[part], mask) for part, mask in zip(parts, masks, strict=True)])
        if attention_mask is not None:
            features = features[pool_mask(attention_mask, self.patch_len)]
        deviation, mean = torch.std_mean(features.flatten(0, -2), dim=0, correction=0)
        self.mean.copy_(mean)
        self.deviation.copy_(deviation.clamp_min(_SMALLEST_DEVIATION))

    def features(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Standardised features for the linear map: (B, N, c) -> (B, M, F). Nothing in them learns."""
        if attention_mask is not None:
            x = x.masked_fill(~attention_mask[..., None], 0.0)
        real = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask.to(x.dtype)
        missing = -x.size(1) % self.patch_len
        count = F.pad(real, (0, missing)).unflatten(1, (-1, self.patch_len)).sum(dim=-1).clamp_min(1)
        parts = []
        for index in range(len(self.dilations)):
            slope = self.slopes[index][:, None]
            y = self._convolved(x, index) * slope
            if attention_mask is not None:
                y = y.masked_fill(~attention_mask[:, None], -torch.inf)
            y = F.pad(y, (0, missing), value=-torch.inf)  # which exceeds nothing
            for threshold in (self.thresholds[index] * slope - 0.5).unbind(-1):
                # One threshold at a time: B K N Q numbers would not stay in the cache.
                exceeding = self.ramp(y - threshold[:, None])
                parts.append(exceeding.unflatten(-1, (-1, self.patch_len)).sum(dim=-1))
        fractions = torch.cat(parts, dim=1).mT / count[..., None]
        return (fractions - self.mean) / self.deviation

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, c) -> (B, M, d)."""
        return self.linear(self.features(x, attention_mask))

    def _convolved(self, x: Tensor, index: int) -> Tensor:
        """The kernels of one dilation over x, zeros outside: (B, N, c) -> (B, K, N)."""
        weight = self.taps.to(x)[:, None] * self.channels[index][..., None].to(x)
        dilation = self.dilations[index]
        return F.conv1d(x.mT, weight, padding=dilation * (KERNEL_SIZE // 2), dilation=dilation)


def _ramp(distance: Tensor) -> Tensor:
    """How far a step exceeds a threshold, 0 to 1, from its distance in widths of the slope; in place."""
    return distance.clamp_(0, 1)


def rocket_kernels() -> Tensor:
    """All ways to place three taps of 2 among nine of -1, (84, 9)."""
    kernels = torch.full((NUM_KERNELS, KERNEL_SIZE), -1.0, dtype=torch.float32)
    for row, places in enumerate(itertools.combinations(range(KERNEL_SIZE), 3)):
        kernels[row, list(places)] = 2.0
    return kernels


def even_quantiles(shape: torch.Size) -> Tensor:
    """Numbers in (0, 1) that fill it evenly, in their order: multiples of the golden ratio, float64."""
    multiples = torch.arange(1, shape.numel() + 1, dtype=torch.float64) * _GOLDEN_RATIO
    return (multiples % 1).reshape(shape)
