"""The engine of :mod:`kernel_attention.ops.primal` in PyTorch: slices of tokens that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.kernels.feature_maps import SMALLEST_NORM
from kernel_attention.kernels.statistics import accumulation_dtype

_SLICE = 2048  # tokens; their z and its gradient stay in the second-level caches at common widths


class Tokens(NamedTuple):
    """How z is made of the tokens."""

    num_heads: int
    normalize: bool
    mask: Tensor | None

    def features(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[slice, slice], room: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tokens themselves (b, n, d), their z (b, n, 2h, p) in ``room``, and 1 / norm (b, n, 2h, 1)."""
        part = x[where]
        mask = None if self.mask is None else self.mask[where]
        if mask is not None:
            part = part.masked_fill(~mask[..., None], 0.0)  # padding may hold anything, NaN included
        flat = part.flatten(0, 1)
        z = room[: flat.size(0)]
        if bias is None:
            torch.mm(flat, weight.mT, out=z)
        else:
            torch.addmm(bias, flat, weight.mT, out=z)
        z = z.view(*part.shape[:2], 2 * self.num_heads, -1)
        scale = None
        if self.normalize:
            norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype))
            scale = torch.threshold_(norm, SMALLEST_NORM, torch.inf).reciprocal_()
            if mask is not None:
                scale.masked_fill_(~mask[..., None, None], 0.0)
            z.mul_(scale)
        elif mask is not None:
            z.masked_fill_(~mask[..., None, None], 0.0)
        return part, z, scale

    def back(
        self, grad_z: Tensor, z: Tensor, scale: Tensor | None, where: tuple[slice, slice], room: Tensor
    ) -> Tensor:
        """The gradient before the normalisation, in the place of ``grad_z`` (b, n, 2h, p)."""
        if scale is not None:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
            product = torch.mul(z, grad_z, out=room[: z.size(0) * z.size(1)].view_as(z))
            return grad_z.addcmul_(z, product.sum(dim=-1, keepdim=True), value=-1).mul_(scale)
        return grad_z if self.mask is None else grad_z.masked_fill_(~self.mask[where][..., None, None], 0.0)


class Sums(NamedTuple):
    """Gradients: of the tokens (B, N, d), and of what is shared by them, as sums in float32 or better."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    maps: Tensor
    constant: Tensor


def map_tokens(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y (B, N, k o) = z maps + constant, and Z^T Z of every head's two halves, (B, h, 2, p, p), or None."""
    groups, width = maps.size(1), maps.size(3)
    constant = constant.to(x.dtype)
    y = x.new_empty(x.size(0), x.size(1), groups * width)
    gram = None
    if with_gram:
        size = weight.size(0) // (2 * tokens.num_heads)
        exact = accumulation_dtype(x.dtype)
        gram = x.new_zeros(x.size(0), tokens.num_heads, 2, size, size, dtype=exact)
    room = _room(x, weight)
    for where in _slices(x):
        _, z, _ = tokens.features(x, weight, bias, where, room)
        y[where] = constant
        _add_product(_by_group(y[where], groups), _by_group(z, groups), _of(maps, where))
        if gram is not None:
            _add_product(gram[where[0]].flatten(1, 2), z.permute(0, 2, 3, 1), z.transpose(1, 2))
    return y, gram


def pull_back(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None,
    grad_y: Tensor,
) -> Sums:  # fmt: skip
    """The gradients of :func:`map_tokens`; ``pull`` (B, h, 2, p, p) is twice the gradient of Z^T Z."""
    exact = accumulation_dtype(x.dtype)
    groups = maps.size(1)
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=exact)
    grad_bias = x.new_zeros(weight.size(0), dtype=exact)
    grad_maps = torch.zeros_like(maps, dtype=exact)
    grad_constant = x.new_zeros(groups * maps.size(3), dtype=exact)
    pull = None if pull is None else pull.flatten(1, 2)
    rooms = [_room(x, weight) for _ in range(3)]
    for where in _slices(x):
        part, z, scale = tokens.features(x, weight, bias, where, rooms[0])
        grad = grad_y[where]
        _add_rows(grad_constant, grad.flatten(0, 1))
        grad, mapped = _by_group(grad, groups), _by_group(z, groups)
        _add_product(_of(grad_maps, where), mapped.mT, grad)
        grad_z = rooms[1][: z.size(0) * z.size(1)].view_as(z)
        _add_product(_by_group(grad_z, groups), grad, _of(maps, where).mT, beta=0)
        if pull is not None:
            _add_product(grad_z.transpose(1, 2), z.transpose(1, 2), _of(pull, where))
        flat = tokens.back(grad_z, z, scale, where, rooms[2]).flatten(2).flatten(0, 1)
        torch.mm(flat, weight, out=grad_x[where].flatten(0, 1))
        _add_product(grad_weight[None, None], flat.mT[None, None], part.flatten(0, 1)[None, None])
        _add_rows(grad_bias, flat)
    return Sums(grad_x, grad_weight, grad_bias, grad_maps, grad_constant)


def _slices(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and tokens of every slice: part of one sequence, or several whole short ones."""
    batch, length = x.size(0), x.size(1)
    together = max(_SLICE // length, 1)
    for first in range(0, batch, together):
        for start in range(0, length, _SLICE):
            yield slice(first, first + together), slice(start, start + _SLICE)


def _room(x: Tensor, weight: Tensor) -> Tensor:
    """Memory for the z of a slice, used again for every one: new memory would have to be mapped in first."""
    tokens = x.size(1) * max(_SLICE // x.size(1), 1)
    return x.new_empty(min(tokens, max(_SLICE, x.size(1)), x.size(0) * x.size(1)), weight.size(0))


def _add_product(into: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """into = beta into + left @ right, (b, groups, ..); ``into`` or ``right`` may be shared by the samples.

    One product over two strided axes would copy all of its operands.
    """
    shape = (left.size(0), -1, -1, -1)
    for own, one, other in zip(into.expand(shape), left, right.expand(shape), strict=True):
        if own.dtype == one.dtype:
            own.baddbmm_(one, other, beta=beta)
        else:  # 16-bit products, summed in float32
            own += one @ other


def _add_rows(into: Tensor, rows: Tensor) -> None:
    """into (m,) += the sum of rows (n, m)."""
    if into.dtype == rows.dtype:
        into.addmv_(rows.mT, rows.new_ones(rows.size(0)))
    else:
        into += rows.sum(dim=0, dtype=into.dtype)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(b, n, ..) with heads in order -> (b, k, n, what one group of heads has)."""
    return x.flatten(2).unflatten(-1, (groups, -1)).transpose(1, 2)


def _of(batched: Tensor, where: tuple[slice, slice]) -> Tensor:
    """The slice's samples of what may be shared by all."""
    return batched[where[0]] if batched.size(0) > 1 else batched
