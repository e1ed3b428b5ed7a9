"""The pass of ``kernel_attention.mechanisms.primal.engines.one_pass`` over the tokens, as an operator of PyTorch.

A compiler does not look into an operator. So ``torch.compile``, ``torch.export`` and activation checkpointing
keep the hand-written pass, and need only the sizes of its results and the formula of its gradients. An eager
call takes the same functions without the operator, because its dispatch would cost a short sequence a tenth
of its training step. Where the gradient itself is differentiated, it comes from the formulas, which keep z.

Three modules pass over the tokens: ``token_slices`` in PyTorch on any device, ``native_kernels`` in C++ on
CPUs, ``triton_kernels`` on GPUs. An ``Engine`` names them.

Legend as in ``fused``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.engines import cpu as token_slices
from kernel_attention.mechanisms.primal.engines import native as native_kernels
from kernel_attention.mechanisms.primal.engines.cpu import Tokens
from kernel_attention.tensors.features.feature_maps import cosine
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    eager_twin,
    needs_operator,
)
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, without_autocast

Engine: TypeAlias = Literal["slices", "native", "triton"]


def features_and_maps(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor, tokens: Tokens,
    *, with_gram: bool, engine: Engine,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y = z maps + constant, (B, N, k o), and Z^T Z of every head's two halves, (B, h, 2, p, p), or None.

    z is phi of the projections of x, and zero at padded tokens, whose y is ``constant``. It is not kept: the
    backward pass computes it again.

    Args:
        x: (B, N, d).
        weight: (h * 2 * p, d), in the precision of x; a head's query and key lie side by side.
        bias: (h * 2 * p,) or None.
        maps: (B or 1, k, 2d / k, o), in float32 or better.
        constant: (k o,), in float32 or better.
        tokens: heads, feature map and mask.
        with_gram: whether Z^T Z is wanted; it is in float32 or better.
        engine: what passes over the tokens.
    """
    inputs = (
        x,
        weight,
        bias,
        maps,
        constant,
        tokens.mask,
        tokens.num_heads,
        tokens.normalize,
        with_gram,
        engine,
    )
    y, gram = _map(*inputs) if needs_operator(x) else _eager_map(*inputs)
    return y, gram if with_gram else None


def with_rows(x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """x, and the rows that are sampled from it, (B, M, d)."""
    return (x, samples.read(x)) if needs_operator(x) else _Rows.apply(x, samples)


class _Rows(torch.autograd.Function):
    """x and rows of it. The gradient of the rows is added to that of x in place, which saves two passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        ctx.samples = samples
        ctx.set_materialize_grads(False)
        ctx.sizes = x.shape
        return x, samples.read(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad_rows: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_rows is None:
            return grad_x, None
        if grad_x is None:
            grad_x = grad_rows.new_zeros(ctx.sizes)
        if torch.is_grad_enabled():
            grad_x = grad_x.clone()
        # x goes from here to the operator alone, whose gradient of it is a tensor of its own.
        ctx.samples.add_to(grad_x, grad_rows)
        return grad_x, None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor, mask: Tensor | None,
    num_heads: int, normalize: bool, with_gram: bool, engine: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y (B, N, k o) and Z^T Z (B, h, 2, p, p); empty where it is not wanted: operators return no None."""
    tokens = Tokens(num_heads, normalize, mask)
    inputs = tokens, x, weight, bias, maps.to(x.dtype), constant, with_gram
    with without_autocast(x):
        if engine == "triton":
            from kernel_attention.mechanisms.primal.engines import (
                triton_kernels,  # only where they are asked for
            )

            with torch.cuda.device_of(x):
                y, gram = triton_kernels.map_tokens(*inputs)
        elif engine == "native":
            y, gram = native_kernels.map_tokens(*inputs)
        else:
            y, gram = token_slices.map_tokens(*inputs)
    return y, x.new_empty(0) if gram is None else gram


def _gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None, grad_y: Tensor,
    mask: Tensor | None, num_heads: int, normalize: bool, engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By x, weight, bias, maps and constant; ``pull`` (B, h, 2, p, p) is twice the gradient of Z^T Z."""
    tokens = Tokens(num_heads, normalize, mask)
    inputs = tokens, x, weight, bias, maps.to(x.dtype), pull, grad_y
    with without_autocast(x):
        if engine == "triton":
            from kernel_attention.mechanisms.primal.engines import triton_kernels

            with torch.cuda.device_of(x):
                sums = triton_kernels.pull_back(*inputs)
        elif engine == "native":
            sums = native_kernels.pull_back(*inputs)
        else:
            sums = token_slices.pull_back(*inputs)
    return sums.x, sums.weight.to(weight.dtype), sums.bias.to(weight.dtype), sums.maps, sums.constant


_map = torch.library.custom_op("kernel_attention::primal_map", _forward, mutates_args=())
_map_backward = torch.library.custom_op("kernel_attention::primal_map_backward", _gradients, mutates_args=())


@_map.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor, mask: Tensor | None,
    num_heads: int, normalize: bool, with_gram: bool, engine: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.size(0), x.size(1), maps.size(1) * maps.size(3))
    if not with_gram:
        return y, x.new_empty(0)
    size = weight.size(0) // (2 * num_heads)
    return y, x.new_empty(x.size(0), num_heads, 2, size, size, dtype=accumulation_dtype(x.dtype))


@_map_backward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None, grad_y: Tensor,
    mask: Tensor | None, num_heads: int, normalize: bool, engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    exact = accumulation_dtype(x.dtype)
    return (
        x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.size(0)),
        x.new_empty(maps.shape, dtype=exact), x.new_empty(grad_y.size(2), dtype=exact),
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, maps, constant, mask, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, maps, constant, mask)
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any, grad_y: Tensor | None, grad_gram: Tensor | None, gradients: Callable[..., Any] = _map_backward
) -> tuple[Tensor | None, ...]:
    x, weight, bias, maps, constant, mask = ctx.saved_tensors
    num_heads, normalize, with_gram, engine = ctx.options
    others = (None,) * 5
    if torch.is_grad_enabled():
        needed = ctx.needs_input_grad[:5]
        leaves = differentiable_leaves((x, weight, bias, maps, constant), needed)
        with without_autocast(x):
            outputs = _formulas(Tokens(num_heads, normalize, mask), *leaves, with_gram=with_gram)
            return (*differentiable_gradients(outputs, leaves, needed, (grad_y, grad_gram)), *others)
    if grad_y is None:
        grad_y = x.new_zeros(x.size(0), x.size(1), constant.size(0))
    pull = None
    if with_gram and grad_gram is not None:
        pull = (grad_gram + grad_gram.mT).to(x.dtype)
    found = gradients(x, weight, bias, maps, pull, grad_y, mask, num_heads, normalize, engine)
    return (*found[:2], None if bias is None else found[2], *found[3:], *others)


_map.register_autograd(_pull_back, setup_context=_keep)


_eager_map = eager_twin(_forward, _keep, partial(_pull_back, gradients=_gradients))


def _formulas(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    *, with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The results of the operator, from differentiable operations that keep z."""
    z = differentiable_features(tokens, x, weight, bias)
    maps = maps.to(x.dtype)
    by_group = z.flatten(2).unflatten(-1, (maps.size(1), -1)).transpose(1, 2)  # (B, k, N, 2d / k)
    y = (by_group @ maps).transpose(1, 2).flatten(2) + constant.to(x.dtype)
    if not with_gram:
        return y, None
    halves = exactly(z).transpose(1, 2).unflatten(1, (-1, 2))  # (B, h, 2, N, p)
    return y, halves.mT @ halves


def differentiable_features(tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z by differentiable operations, (B, N, 2h, p)."""
    if tokens.mask is not None:
        x = x.masked_fill(~tokens.mask[..., None], 0.0)
    z = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2 * tokens.num_heads, -1))
    if tokens.normalize:
        z = cosine(z)
    if tokens.mask is not None:
        z = z.masked_fill(~tokens.mask[..., None, None], 0.0)
    return z
