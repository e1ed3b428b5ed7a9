"""``kernel_attention.mechanisms.primal.engines.one_pass`` over the tokens in PyTorch: slices of them that fit the cache.

Legend as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.statistics import accumulation_dtype, exactly
from kernel_attention.tensors.unit_rows import inverse_norms

_SLICE = 2048  # tokens; their z and its gradient stay in the second-level caches at common widths


class Tokens(NamedTuple):
    """The inputs of z."""

    num_heads: int
    normalize: bool
    mask: Tensor | None


class Sums(NamedTuple):
    """The gradients of the tokens (B, N, d), and of the shared tensors as sums in float32 or better."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    maps: Tensor
    constant: Tensor


class _Room(NamedTuple):
    """A buffer for z of n tokens, with views in the four shapes that the passes need.

    Every slice reuses it, because the system would have to map new memory first.
    """

    flat: Tensor  # (n, 2d)
    halves: Tensor  # (n, 2h, p)
    by_half: Tensor  # (2h, n, p)
    by_group: Tensor  # (k, n, 2d / k)


def map_tokens(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y (B, N, k o) = z maps + constant, and Z^T Z of every head's two halves, (B, h, 2, p, p), or None."""
    groups = maps.size(1)
    constant = constant.to(x.dtype)
    y = x.new_empty(x.size(0), x.size(1), groups * maps.size(3))
    rooms = Rooms(x, weight, tokens, groups)
    exact, halves = accumulation_dtype(x.dtype), 2 * tokens.num_heads
    size = weight.size(0) // halves
    gram = x.new_zeros(x.size(0), halves, size, size, dtype=exact) if with_gram else None
    for i, own_map in enumerate(maps.expand(x.size(0), -1, -1, -1)):
        for part, mask, out in _slices(i, x, tokens.mask, y):
            z = rooms.get(0, part.size(0))
            fill_features(part, mask, weight, bias, tokens, z, rooms.get(2, part.size(0)))
            _by_group(out, groups).baddbmm_(z.by_group, own_map, beta=0)
            out += constant  # with two threads faster than a product that starts from it
            if gram is not None:
                half = exactly(z.by_half)  # rounded products would not sum to a positive matrix
                gram[i].baddbmm_(half.mT, half)
    return y, None if gram is None else gram.unflatten(1, (-1, 2))


def pull_back(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None,
    grad_y: Tensor,
) -> Sums:  # fmt: skip
    """The gradients of ``map_tokens``; ``pull`` (B, h, 2, p, p) is twice the gradient of Z^T Z."""
    exact, groups = accumulation_dtype(x.dtype), maps.size(1)
    sums = Sums(
        x.new_empty(x.shape),
        x.new_zeros(weight.shape, dtype=exact),
        x.new_zeros(weight.size(0), dtype=exact),
        x.new_zeros(maps.shape, dtype=exact),
        x.new_zeros(groups * maps.size(3), dtype=exact),
    )
    rooms = Rooms(x, weight, tokens, groups)
    shape = (x.size(0), -1, -1, -1)
    pull = None if pull is None else pull.flatten(1, 2)
    for i, (own_map, own_sum) in enumerate(zip(maps.mT.expand(shape), sums.maps.expand(shape), strict=True)):
        for part, mask, grad, grad_x in _slices(i, x, tokens.mask, grad_y, sums.x):
            z, grad_z = rooms.get(0, part.size(0)), rooms.get(1, part.size(0))
            part, scale = fill_features(part, mask, weight, bias, tokens, z, rooms.get(2, part.size(0)))
            add_rows(sums.constant, grad)
            by_group = _by_group(grad, groups)
            add_product(own_sum, z.by_group.mT, by_group)
            grad_z.by_group.baddbmm_(by_group, own_map, beta=0)
            if pull is not None:
                grad_z.by_half.baddbmm_(z.by_half, pull[i])
            spare = rooms.get(2, part.size(0))
            features_back(grad_z, z, scale, mask, spare)
            torch.mm(grad_z.flat, weight, out=grad_x)
            add_product(sums.weight, grad_z.flat.mT, part)
            add_rows(sums.bias, grad_z.flat)
    return sums


def _slices(i: int, x: Tensor, mask: Tensor | None, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The slices of sequence i: tokens (n, d), their mask or None, and the same rows of the others."""
    parts = [tensor[i].split(_SLICE) for tensor in (x, *others)]
    masks = [None] * len(parts[0]) if mask is None else mask[i].split(_SLICE)
    return zip(parts[0], masks, *parts[1:], strict=True)


class Rooms:
    """Three buffers of one slice each, and their views by the number of tokens."""

    def __init__(self, x: Tensor, weight: Tensor, tokens: Tokens, groups: int) -> None:
        most = min(_SLICE, x.size(1))
        self.memory = [x.new_empty(most, weight.size(0)) for _ in range(3)]
        self.halves, self.groups = 2 * tokens.num_heads, groups
        self.rooms: dict[tuple[int, int], _Room] = {}

    def get(self, which: int, count: int) -> _Room:
        """The first ``count`` rows of buffer ``which``."""
        if (which, count) not in self.rooms:
            flat = self.memory[which][:count]
            halves = flat.view(count, self.halves, -1)
            self.rooms[which, count] = _Room(
                flat, halves, halves.transpose(0, 1), _by_group(flat, self.groups)
            )
        return self.rooms[which, count]


def fill_features(
    part: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tokens,
    z: _Room,
    spare: _Room,
) -> tuple[Tensor, Tensor | None]:
    """Fill z. Return the tokens, zero where they are padding, and 1 / norm (n, 2h, 1) or None."""
    if mask is not None:
        part = part.masked_fill(~mask[:, None], 0.0)  # padding may hold any value, also NaN
    torch.mm(part, weight.mT, out=z.flat)
    if bias is not None:
        z.flat.add_(bias)
    if not tokens.normalize:
        if mask is not None:
            z.flat.masked_fill_(~mask[:, None], 0.0)
        return part, None
    ignored = None if mask is None else ~mask[:, None, None]
    scale = inverse_norms(z.halves, ignored=ignored, spare=spare.halves)
    if mask is not None:
        scale.masked_fill_(~mask[:, None, None], 0.0)
    z.halves.mul_(scale)
    return part, scale


def features_back(grad_z: _Room, z: _Room, scale: Tensor | None, mask: Tensor | None, spare: _Room) -> None:
    """Turn the gradient of z into that of the projections, in place; ``scale`` as from ``fill_features``."""
    if scale is not None:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
        product = torch.mul(z.flat, grad_z.flat, out=spare.flat)
        along = product.view_as(z.halves).sum(dim=-1, keepdim=True)
        grad_z.halves.addcmul_(z.halves, along, value=-1).mul_(scale)
    elif mask is not None:
        grad_z.flat.masked_fill_(~mask[:, None], 0.0)


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, of matrices or of batches of them."""
    if into.dtype != left.dtype:  # 16-bit products, summed in float32
        into += left @ right
    elif into.dim() == 2:
        into.addmm_(left, right)
    else:
        into.baddbmm_(left, right)


def add_rows(into: Tensor, rows: Tensor) -> None:
    """into (m,) += the sum of rows (n, m)."""
    if into.dtype == rows.dtype:
        into.addmv_(rows.mT, rows.new_ones(rows.size(0)))
    else:
        into += rows.sum(dim=0, dtype=into.dtype)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(n, ..) with the heads in order -> (k, n, ..), one slice for each group of heads."""
    return x.view(x.size(0), groups, -1).transpose(0, 1)
