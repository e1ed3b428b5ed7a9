"""Results over slices of a sequence. In either pass, the intermediate tensors of only one slice exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kernel_attention.tensors.recompute import is_traced

Read = Callable[..., Tensor]
"""``read(start, stop, *tensors)``: the result of the tokens from start to stop."""


def summed_slices(read: Read, length: int, size: int, *tensors: Tensor) -> Tensor:
    """The sum of the results of ``read`` over slices of ``size`` of the tokens. First derivatives only."""
    return _over_slices(read, length, size, tensors, summed=True)


def joined_slices(read: Read, length: int, size: int, *tensors: Tensor) -> Tensor:
    """The results (B, h, n, ..) of ``read`` concatenated, (B, h, N, ..). First derivatives only."""
    return _over_slices(read, length, size, tensors, summed=False)


def _over_slices(read: Read, length: int, size: int, tensors: tuple[Tensor, ...], *, summed: bool) -> Tensor:
    if not is_traced():
        return _Slices.apply(read, length, size, summed, *tensors)
    parts = [
        checkpoint(read, start, start + size, *tensors, use_reentrant=False, preserve_rng_state=False)
        for start in range(0, length, size)
    ]
    return functools.reduce(torch.add, parts) if summed else torch.cat(parts, dim=2)


class _Slices(torch.autograd.Function):
    """Only the result outlives a slice.

    Graphs that outlive their slices would lie between the freed blocks of memory, and the allocator could not
    use these blocks again.
    """

    @staticmethod
    def forward(ctx: Any, read: Read, length: int, size: int, summed: bool, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.read, ctx.length, ctx.size, ctx.summed = read, length, size, summed
        result = None
        for start in range(0, length, size):
            part = read(start, start + size, *tensors)
            if result is None:
                shape = part.shape if summed else (*part.shape[:2], length, *part.shape[3:])
                result = part.new_zeros(shape)
            into = result if summed else result[:, :, start : start + size]
            into += part
        assert result is not None  # a sequence has at least one token
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf) for leaf in asked]
        for start in range(0, ctx.length, ctx.size):
            own = grad if ctx.summed else grad[:, :, start : start + ctx.size]
            with torch.enable_grad():
                part = ctx.read(start, start + ctx.size, *leaves)
            if part.requires_grad:
                found = torch.autograd.grad(part, asked, own, materialize_grads=True)
                for into, each in zip(sums, found, strict=True):
                    into += each
        given = iter(sums)
        return None, None, None, None, *(next(given) if need else None for need in needed)
