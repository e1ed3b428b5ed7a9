"""From the steps of a series to the tokens of an encoder: a linear map, or multi-scale convolutions.

Legend of shapes: B series, N steps, c channels, M = ceil(N / patch_len) tokens, d model width. Masks are
(B, N) with True = real step; padding is on the right wherever ``patch_len`` exceeds 1. A padded step changes
no token of a real one.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.tensors.dropout import Dropout
from kernel_attention.tensors.padding import in_blocks
from kernel_attention.tensors.pooling import pool_mask
from kernel_attention.tensors.recompute import is_traced
from kernel_attention.tensors.statistics import exactly

View = Literal["raw", "normalized", "difference"]
VIEWS: tuple[View, ...] = ("raw", "normalized", "difference")

KERNEL_SIZES = (9, 19, 39)
"""Steps that the branches of a convolution see: those of InceptionTime, made odd."""

STEMS = ("linear", "convolution", "rocket")
Stem = Literal["linear", "convolution", "rocket"]

LARGEST_NUMBER_OF_TOKENS: dict[str, int] = {"linear": 128, "convolution": 128, "rocket": 8}
"""The aims of ``automatic_patch_len``. A rocket stem counts steps, so that its tokens want many of them."""

# A series that varies less than this, relative to its channel over the training data, counts as constant.
_SMALLEST_DEVIATION = 1e-3


def automatic_patch_len(max_len: int, stem: Stem) -> int:
    """The steps per token at which the longest series has at most 128 tokens, or 8 of a rocket stem."""
    return -(-max_len // LARGEST_NUMBER_OF_TOKENS[stem])


def series_views(x: Tensor, attention_mask: Tensor | None, views: Sequence[View]) -> Tensor:
    """The channels of every view, side by side: x (B, N, c) -> (B, N, len(views) * c).

    "raw" is x itself. "normalized" is x with mean 0 and deviation 1 over the real steps of its series, in
    every channel. "difference" is the change since the step before, with a root mean square of 1 in each
    series and channel, and 0 at the first step. A channel that hardly varies within its series stays near 0
    in both.
    """
    if tuple(views) == ("raw",):
        return x
    real = None if attention_mask is None else attention_mask[..., None]
    made = {"raw": x}
    if "normalized" in views:
        centred = x - _mean(x, real)
        made["normalized"] = centred / _deviation(centred, real)
    if "difference" in views:
        # By index, the first step its own neighbour: torch.export asks whether a slice has one step.
        before = (torch.arange(x.size(1), device=x.device) - 1).clamp_min(0)
        change = x - x.index_select(1, before)
        if real is not None:
            change = change.masked_fill(
                ~(real & real.index_select(1, before)), 0.0
            )  # a padded step is no neighbour
        made["difference"] = change / _deviation(change, real)
    joined = torch.cat([made[view] for view in views], dim=-1)
    return joined if real is None else joined.masked_fill(~real, 0.0)


def require_views(views: Sequence[str]) -> None:
    """Raise InputError unless ``views`` lists one or more of the views, each once."""
    for view in views:
        if view not in VIEWS:
            raise unknown("view", view, VIEWS)
    if isinstance(views, str) or not views or len(set(views)) < len(views):
        raise InputError(f"views={views!r} must list one or more of {', '.join(VIEWS)}, each at most once")


class LinearStem(nn.Linear):
    """A linear map of every patch of ``patch_len`` steps of c channels; the last patch is filled with zeros.

    The arguments are those of ``ConvolutionStem``.
    """

    def __init__(self, in_features: int, embed_dim: int, patch_len: int = 1, **where: Any) -> None:
        require_positive(patch_len=patch_len)
        super().__init__(in_features * patch_len, embed_dim, **where)
        self.patch_len = patch_len

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, c) -> (B, M, d)."""
        if self.patch_len > 1:
            x = in_blocks(_masked(x, attention_mask), self.patch_len).flatten(-2)
        return super().forward(x)


class ConvolutionStem(nn.Module):
    """Blocks of parallel convolutions over time with kernels of several lengths, one after the other.

    The block is InceptionTime's (Ismail Fawaz et al. 2020): a pointwise map to fewer channels, convolutions
    of three lengths and a maximum over three steps beside each other, batch norm. It ends in GELU, and every
    block but the first has a residual connection. As in ConvTran (Foumani et al. 2024), attention reads the
    result. Only the convolutions of the first block move by ``patch_len`` steps.

    Args:
        in_features: channels c.
        embed_dim: width d of the tokens.
        num_blocks: blocks.
        patch_len: steps per token.
        dropout: after every block.
        where: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        embed_dim: int,
        num_blocks: int = 3,
        patch_len: int = 1,
        dropout: float = 0.0,
        **where: Any,
    ) -> None:
        super().__init__()
        require_positive(stem_layers=num_blocks, patch_len=patch_len)
        self.patch_len = patch_len
        widths = [in_features, *[embed_dim] * (num_blocks - 1)]
        self.blocks = nn.ModuleList(
            ConvolutionBlock(width, embed_dim, patch_len if index == 0 else 1, **where)
            for index, width in enumerate(widths)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, c) -> (B, M, d), zero at tokens without a real step."""
        for index, block in enumerate(self.blocks):
            x = self.dropout(block(x, attention_mask))
            if index == 0 and attention_mask is not None:
                attention_mask = pool_mask(attention_mask, self.patch_len)
        return x


class ConvolutionBlock(nn.Module):
    """Convolutions of several lengths side by side, batch norm, GELU; residual where the widths agree.

    Args:
        in_features: channels of the input.
        embed_dim: channels of the output, in nearly equal parts from every branch.
        stride: steps from one token to the next; the first token of a series is centred at its first step.
        where: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(self, in_features: int, embed_dim: int, stride: int = 1, **where: Any) -> None:
        super().__init__()
        branches = len(KERNEL_SIZES) + 1
        if embed_dim < branches:
            raise InputError(f"embed_dim={embed_dim} must be at least {branches} for stem='convolution'")
        widths = [embed_dim // branches + (branch < embed_dim % branches) for branch in range(branches)]
        narrow = min(in_features, widths[0])
        self.stride = stride
        self.is_residual = in_features == embed_dim and stride == 1
        self.narrow = nn.Linear(in_features, narrow, bias=False, **where) if in_features > narrow else None
        self.convolutions = nn.ModuleList(
            nn.Conv1d(narrow, width, size, stride, padding=size // 2, bias=False, **where)
            for width, size in zip(widths, KERNEL_SIZES, strict=False)
        )
        self.after_maximum = nn.Linear(in_features, widths[-1], bias=False, **where)
        self.norm = TokenBatchNorm(embed_dim, **where)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, in_features) -> (B, ceil(N / stride), embed_dim), zero at tokens without a real step."""
        x = _masked(x, attention_mask)
        narrow = (x if self.narrow is None else self.narrow(x)).mT
        branches = [convolution(narrow) for convolution in self.convolutions]
        low = x if attention_mask is None else x.masked_fill(~attention_mask[..., None], -torch.inf)
        highest = self._highest(low)
        attention_mask = None if attention_mask is None else pool_mask(attention_mask, self.stride)
        branches.append(self.after_maximum(_masked(highest, attention_mask)).mT)
        y = self.norm(torch.cat(branches, dim=1).mT, attention_mask)
        return _masked(F.gelu(x + y if self.is_residual else y), attention_mask)

    def _highest(self, x: Tensor) -> Tensor:
        """The maximum over a token's steps and their neighbours, (B, N, c) -> (B, ceil(N / stride), c)."""
        missing = -x.size(1) % self.stride
        padded = F.pad(x, (0, 0, 1, 1 + missing), value=-torch.inf)
        # In one dimension torch.export takes the number of steps for a constant.
        return F.max_pool2d(padded.mT[:, :, None], (1, self.stride + 2), (1, self.stride))[:, :, 0].mT


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch norm of tokens (B, N, d) whose statistics are those of the real ones."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        if not self.training:
            return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        exact = exactly(x)
        if attention_mask is None or _is_whole(attention_mask):
            count: Tensor | int = x.size(0) * x.size(1)
            mean = exact.mean(dim=(0, 1))
            variance = (exact - mean).square().mean(dim=(0, 1))
        else:
            count = attention_mask.sum().clamp_min(1)
            mean = _masked(exact, attention_mask).sum(dim=(0, 1)) / count
            variance = _masked(exact - mean, attention_mask).square().sum(dim=(0, 1)) / count
        self._follow(mean.detach(), variance.detach(), count)
        scale = self.weight * (variance + self.eps).rsqrt()
        return ((exact - mean) * scale + self.bias).to(x.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor | int) -> None:
        """Move the running statistics towards those of a batch; the variance without its bias."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        unbiased = variance * count / (count - 1 if isinstance(count, int) else (count - 1).clamp_min(1))
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var), self.momentum)


class ConvolutionalPositions(nn.Module):
    """Relative positions for any mechanism: a depth-wise convolution of the tokens, added to them.

    It sees the order of the tokens around each and no place in the series, as in wav2vec 2.0 (Baevski et al.
    2020). ``where``: ``device`` and ``dtype`` of the parameters.
    """

    def __init__(self, embed_dim: int, **where: Any) -> None:
        super().__init__()
        size = KERNEL_SIZES[1]
        self.convolution = nn.Conv1d(embed_dim, embed_dim, size, padding=size // 2, groups=embed_dim, **where)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The positions of the tokens x, (B, M, d) -> (B, M, d)."""
        return F.gelu(self.convolution(_masked(x, attention_mask).mT).mT)


def _masked(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    return x if attention_mask is None else x.masked_fill(~attention_mask[..., None], 0.0)


def _is_whole(attention_mask: Tensor) -> bool:
    """True where no step is padded; asked only where that costs nothing (``compaction`` has the reason)."""
    return attention_mask.device.type == "cpu" and not is_traced() and bool(attention_mask.all())


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    if real is None:
        return x.mean(dim=1, keepdim=True)
    return x.masked_fill(~real, 0.0).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp_min(1)


def _deviation(centred: Tensor, real: Tensor | None) -> Tensor:
    return (_mean(centred.square(), real) + _SMALLEST_DEVIATION**2).sqrt()
