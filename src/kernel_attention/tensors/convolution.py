"""Depth-wise convolutions of tokens, along a sequence and over a grid."""

import itertools

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from kernel_attention.tensors.recompute import is_for_all_sizes
from kernel_attention.tensors.statistics import without_autocast

_BLOCK, _ONE_BLOCK = 16, 96  # tokens in a block of a sequence, and in a sequence that is one block


def convolve_sequence(x: Tensor, weight: Tensor, *, is_causal: bool = False) -> Tensor:
    """y_i = sum_j weight_j x_{i - front + j}, where x is zero outside: (B, N, d) -> (B, N, d).

    ``weight`` is (s,), shared by the channels, or (d, s). front is s - 1 where causal, so that y_i reads
    x_0..x_i; otherwise s // 2: a kernel of even length has its extra element in front.
    """
    size = weight.size(-1)
    front = size - 1 if is_causal else size // 2
    if not is_for_all_sizes():  # elsewhere one form serves all lengths
        reach, front, back = _reach(size, front, x.size(1))
        weight, size = weight[..., reach], front + 1 + back
        if weight.dim() == 1:
            return _convolve_blocks(x, weight, front)
        if _has_fast_convolution(x, weight):
            padded = pad(x, (0, 0, front, size - 1 - front))
            return _convolve_channels(padded[:, None], weight[:, None])[:, 0]
    padded = pad(x.contiguous(), (0, 0, front, size - 1 - front))
    length = x.size(1)
    return _sum([padded[:, j : j + length] * weight[..., j] for j in range(size)]).to(x.dtype)


def _convolve_blocks(x: Tensor, weight: Tensor, front: int) -> Tensor:
    """The convolution as products of one banded matrix, (c, c + s - 1), with blocks that give c tokens each.

    A product reads a block once, where s shifts read it s times, and more often for their gradients. Its
    zeros cost less than that in blocks of 16 tokens; a short sequence is one block.
    """
    (batch, length, channels), size = x.shape, weight.size(0)
    rows = length if length <= _ONE_BLOCK else max(_BLOCK, size - 1)
    count = (length + rows - 1) // rows
    if count == 1:
        blocks = pad(x, (0, 0, front, size - 1 - front))
    else:
        parts = pad(x, (0, 0, front, (count + 1) * rows - length - front)).unflatten(1, (count + 1, rows))
        blocks = torch.cat([parts[:, :-1], parts[:, 1:, : size - 1]], dim=2).flatten(0, 1)
    # Row i of the matrix is the kernel after i zeros: rows longer by one number than the matrix, end to end.
    band = pad(weight.to(x.dtype), (0, rows)).expand(rows, -1).flatten()[: rows * (rows + size - 1)]
    out = torch.bmm(band.view(1, rows, -1).expand(blocks.size(0), -1, -1), blocks)
    return out if count == 1 else out.view(batch, count * rows, channels)[:, :length]


def convolve_grid(x: Tensor, weight: Tensor) -> Tensor:
    """The same over a grid of tokens: x (B, H, W, d), weight (s, s) or (d, s, s) -> (B, H, W, d)."""
    size, height, width = weight.size(-1), x.size(1), x.size(2)
    rows, above, below = _reach(size, size // 2, height)
    columns, left, right = _reach(size, size // 2, width)
    weight = weight[..., rows, columns]
    padded = pad(x.contiguous(), (0, 0, left, right, above, below))
    if weight.dim() == 3 and not is_for_all_sizes() and _has_fast_convolution(x, weight):
        return _convolve_channels(padded, weight)
    shifts = itertools.product(range(above + 1 + below), range(left + 1 + right))
    return _sum([padded[:, i : i + height, j : j + width] * weight[..., i, j] for i, j in shifts]).to(x.dtype)


def _has_fast_convolution(x: Tensor, weight: Tensor) -> bool:
    """True where torch's own convolution takes tokens as they lie in memory, a third of the time of shifts.

    Elsewhere it wants the channels first (on a CPU in other precisions, where it is slower), or rounds
    float32 numbers (on a GPU, to TF32).
    """
    is_float32 = x.dtype is torch.float32 and weight.dtype is torch.float32
    return x.device.type == "cpu" and is_float32 and torch.backends.mkldnn.is_available()


def _convolve_channels(padded: Tensor, weight: Tensor) -> Tensor:
    """A kernel per channel over a padded grid, (B, H + a, W + b, d), (d, a + 1, b + 1) -> (B, H, W, d)."""
    with without_autocast(padded):
        y = conv2d(padded.permute(0, 3, 1, 2), weight[:, None], groups=weight.size(0))
    return y.permute(0, 2, 3, 1)


def _reach(size: int, front: int, length: int) -> tuple[slice, int, int]:
    """The part of a kernel that reaches one token from another, and its elements in front and behind."""
    before, behind = min(front, length - 1), min(size - 1 - front, length - 1)
    return slice(front - before, front + behind + 1), before, behind


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def last_rows(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The last ``size`` of each sequence's real rows, zeros before its first: (B, N, d) -> (B, size, d)."""
    index = lengths[:, None] - size + torch.arange(size, device=x.device)
    rows = x.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, x.size(2)))
    return rows.masked_fill(index[..., None] < 0, 0.0)
