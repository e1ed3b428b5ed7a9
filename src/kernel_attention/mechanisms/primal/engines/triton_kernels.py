"""``kernel_attention.mechanisms.primal.engines.one_pass`` over the tokens in Triton: a kernel that projects and maps.

A program takes one head of one sequence and ``_TOKENS`` of its tokens, a block at a time. It projects the
block of the input to the head's query and key, normalises them, multiplies them into the output, and adds
them to the head's Gram matrices, which stay in registers. Products are in the precision of the input and
accumulate in float32. Sums over tokens are stored per program and added afterwards, so the result does not
depend on the order in which programs run. The backward kernel computes z again from the input.

Triton comes with the CUDA builds of PyTorch; TRITON_INTERPRET=1 runs the kernels on a CPU.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.mechanisms.primal.engines.cpu import Sums, Tokens
from kernel_attention.tensors.features.feature_maps import SMALLEST_NORM
from kernel_attention.tensors.gpu import float32_products

_TOKENS = 1024  # tokens per program
_LARGEST_HEAD = {
    2: 128,
    4: 64,
}  # by bytes of a number; four wider matrices of float32 do not fit beside each other


def _configs(*choices: tuple[int, int, int]) -> list[Any]:
    """Tokens per step, columns of the input read at a time, and warps.

    Only the first where Triton interprets, which has nothing to time.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        choices = choices[:1]
    return [
        triton.Config({"BN": tokens, "BD": width}, num_warps=warps, num_stages=2)
        for tokens, width, warps in choices
    ]


def _fitting(configs: list[Any], arguments: dict[str, Any], **rest: Any) -> list[Any]:
    """More warps or fewer tokens for wide heads, and for float32, whose exact products need registers."""
    exact = arguments["x"].dtype == torch.float32 and rest["PRECISION"] == "ieee"
    size = rest["PP"] * (2 if exact else 1)
    return [
        config
        for config in configs
        if config.num_warps == (4 if size <= 32 else 8) and (config.kwargs["BN"] < 64 or size <= 64)
    ]


_TUNED = {
    "configs": _configs((64, 32, 4), (32, 32, 4), (64, 32, 8), (32, 32, 8)),
    "key": ["D", "P", "HAS_MASK", "WITH_GRAM", "PRECISION"],
    "prune_configs_by": {"early_config_prune": _fitting},
}


@triton.jit
def _load_weights(w, half, d0, D, P: tl.constexpr, PP: tl.constexpr, BD: tl.constexpr):
    """Transposed columns d0.. of a head's projection to queries (half 0) or keys (1): (BD, PP)."""
    p, d = tl.arange(0, PP), d0 + tl.arange(0, BD)
    inside = (p[None, :] < P) & (d[:, None] < D)
    return tl.load(w + (half * P + p[None, :]) * D + d[:, None], mask=inside, other=0.0)


@triton.jit
def _unit(z, real, SMALLEST: tl.constexpr):
    """z / ||z|| by row, zero where a token is padding or zero, and 1 / ||z||."""
    norm = tl.sqrt(tl.sum(z * z, axis=1))
    scale = tl.where((norm >= SMALLEST) & real, 1.0 / tl.maximum(norm, SMALLEST), 0.0)
    return z * scale[:, None], scale


@triton.jit
def _features(
    x, w, bias, n, real, D, P: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALIZE: tl.constexpr, SMALLEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """phi(q) and phi(k) of a block of one head in float32, (BN, PP) each, and their scales."""
    zq = tl.zeros((BN, PP), dtype=tl.float32)
    zk = tl.zeros((BN, PP), dtype=tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        part = tl.load(x + n[:, None] * D + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        zq += tl.dot(part, _load_weights(w, 0, d0, D, P, PP, BD), input_precision=PRECISION)
        zk += tl.dot(part, _load_weights(w, 1, d0, D, P, PP, BD), input_precision=PRECISION)
    if HAS_BIAS:
        p = tl.arange(0, PP)
        zq += tl.load(bias + p, mask=p < P, other=0.0).to(tl.float32)[None, :]
        zk += tl.load(bias + P + p, mask=p < P, other=0.0).to(tl.float32)[None, :]
    sq = real.to(tl.float32)
    sk = sq
    if NORMALIZE:
        zq, sq = _unit(zq, real, SMALLEST)
        zk, sk = _unit(zk, real, SMALLEST)
    else:
        zq = zq * sq[:, None]
        zk = zk * sk[:, None]
    return zq, zk, sq, sk


@triton.autotune(**_TUNED)
@triton.jit
def _map_kernel(
    x, w, bias, g, c, mask, y, gram, N, D, H, splits, stride_g, P: tl.constexpr, PP: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    WITH_GRAM: tl.constexpr, NORMALIZE: tl.constexpr, SMALLEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * N * D
    y += b * N * H * P + h * P
    w += h * 2 * P * D
    bias += h * 2 * P
    g += b * stride_g + h * 2 * P * P
    p = tl.arange(0, PP)
    square = (p[:, None] < P) & (p[None, :] < P)
    corner = p[:, None] * P + p[None, :]
    gq = tl.load(g + corner, mask=square, other=0.0)
    gk = tl.load(g + P * P + corner, mask=square, other=0.0)
    constant = tl.load(c + h * P + p, mask=p < P, other=0.0).to(tl.float32)
    gram_q = tl.zeros((PP, PP), dtype=tl.float32)
    gram_k = tl.zeros((PP, PP), dtype=tl.float32)
    for start in range(split * TOKENS, tl.minimum(split * TOKENS + TOKENS, N), BN):
        n = start + tl.arange(0, BN)
        real = n < N
        if HAS_MASK:
            real = real & (tl.load(mask + b * N + n, mask=n < N, other=0) != 0)
        zq, zk, _, _ = _features(
            x, w, bias, n, real, D, P, PP, BN, BD, HAS_BIAS, NORMALIZE, SMALLEST, PRECISION
        )
        zq, zk = zq.to(gq.dtype), zk.to(gq.dtype)
        out = tl.dot(zq, gq, input_precision=PRECISION) + tl.dot(zk, gk, input_precision=PRECISION)
        out += constant[None, :]
        inside = (n[:, None] < N) & (p[None, :] < P)
        tl.store(y + n[:, None] * H * P + p[None, :], out.to(y.dtype.element_ty), mask=inside)
        if WITH_GRAM:
            gram_q += tl.dot(tl.trans(zq), zq, input_precision=PRECISION)
            gram_k += tl.dot(tl.trans(zk), zk, input_precision=PRECISION)
    if WITH_GRAM:
        gram += (bh * splits + split) * 2 * P * P
        tl.store(gram + corner, gram_q, mask=square)
        tl.store(gram + P * P + corner, gram_k, mask=square)


@triton.jit
def _tangent(grad, z, scale, NORMALIZE: tl.constexpr):
    """The gradient with respect to the vector before normalisation: (grad - z <z, grad>) / ||z||."""
    if NORMALIZE:
        grad -= z * tl.sum(z * grad, axis=1)[:, None]
    return grad * scale[:, None]


@triton.autotune(**_TUNED)
@triton.jit
def _pull_kernel(
    x, w, bias, g, mask, s, grad_y, grad_u, grad_g, N, D, H, splits, stride_g, P: tl.constexpr,
    PP: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, WITH_GRAM: tl.constexpr, NORMALIZE: tl.constexpr, SMALLEST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    split, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    x += b * N * D
    grad_y += b * N * H * P + h * P
    grad_u += b * N * H * 2 * P + h * 2 * P
    w += h * 2 * P * D
    bias += h * 2 * P
    g += b * stride_g + h * 2 * P * P
    s += bh * 2 * P * P
    p = tl.arange(0, PP)
    square = (p[:, None] < P) & (p[None, :] < P)
    corner = p[:, None] * P + p[None, :]
    gq = tl.load(g + corner, mask=square, other=0.0)
    gk = tl.load(g + P * P + corner, mask=square, other=0.0)
    if WITH_GRAM:
        s_q = tl.load(s + corner, mask=square, other=0.0)
        s_k = tl.load(s + P * P + corner, mask=square, other=0.0)
    own_q = tl.zeros((PP, PP), dtype=tl.float32)
    own_k = tl.zeros((PP, PP), dtype=tl.float32)
    for start in range(split * TOKENS, tl.minimum(split * TOKENS + TOKENS, N), BN):
        n = start + tl.arange(0, BN)
        real = n < N
        if HAS_MASK:
            real = real & (tl.load(mask + b * N + n, mask=n < N, other=0) != 0)
        zq, zk, sq, sk = _features(
            x, w, bias, n, real, D, P, PP, BN, BD, HAS_BIAS, NORMALIZE, SMALLEST, PRECISION
        )
        inside = (n[:, None] < N) & (p[None, :] < P)
        grad = tl.load(grad_y + n[:, None] * H * P + p[None, :], mask=inside, other=0.0)
        low_q, low_k = zq.to(gq.dtype), zk.to(gq.dtype)
        own_q += tl.dot(tl.trans(low_q), grad, input_precision=PRECISION)
        own_k += tl.dot(tl.trans(low_k), grad, input_precision=PRECISION)
        dq = tl.dot(grad, tl.trans(gq), input_precision=PRECISION)
        dk = tl.dot(grad, tl.trans(gk), input_precision=PRECISION)
        if WITH_GRAM:
            dq += tl.dot(low_q, s_q, input_precision=PRECISION)
            dk += tl.dot(low_k, s_k, input_precision=PRECISION)
        dq = _tangent(dq, zq, sq, NORMALIZE)
        dk = _tangent(dk, zk, sk, NORMALIZE)
        where = grad_u + n[:, None] * H * 2 * P + p[None, :]
        tl.store(where, dq.to(grad_u.dtype.element_ty), mask=inside)
        tl.store(where + P, dk.to(grad_u.dtype.element_ty), mask=inside)
    grad_g += (bh * splits + split) * 2 * P * P
    tl.store(grad_g + corner, own_q, mask=square)
    tl.store(grad_g + P * P + corner, own_k, mask=square)


def map_tokens(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As ``kernel_attention.mechanisms.primal.engines.cpu.map_tokens``, with one group per head."""
    size, splits = _check(tokens, x, weight, maps)
    x, maps = x.contiguous(), maps.contiguous()
    y = torch.empty_like(x)
    parts = x.new_empty(x.size(0), tokens.num_heads, splits, 2, size, size, dtype=torch.float32)
    _map_kernel[splits, x.size(0) * tokens.num_heads](
        x, weight.contiguous(), weight if bias is None else bias.contiguous(), maps, constant.contiguous(),
        _mask(tokens, x), y, parts, *_sizes(tokens, x, maps, splits),
        **_options(tokens, size, bias, with_gram),
    )  # fmt: skip
    return y, parts.sum(dim=2) if with_gram else None


def pull_back(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None,
    grad_y: Tensor,
) -> Sums:  # fmt: skip
    """As ``kernel_attention.mechanisms.primal.engines.cpu.pull_back``, with one group per head."""
    size, splits = _check(tokens, x, weight, maps)
    x, maps, grad_y = x.contiguous(), maps.contiguous(), grad_y.contiguous()
    grad_u = x.new_empty(*x.shape[:2], weight.size(0))
    parts = x.new_empty(x.size(0), tokens.num_heads, splits, 2 * size, size, dtype=torch.float32)
    _pull_kernel[splits, x.size(0) * tokens.num_heads](
        x, weight.contiguous(), weight if bias is None else bias.contiguous(), maps, _mask(tokens, x),
        maps if pull is None else pull.contiguous(), grad_y, grad_u, parts, *_sizes(tokens, x, maps, splits),
        **_options(tokens, size, bias, pull is not None),
    )  # fmt: skip
    clean = x if tokens.mask is None else x.masked_fill(~tokens.mask[..., None], 0.0)
    flat = grad_u.flatten(0, 1)
    own = parts.sum(dim=2)
    return Sums(
        grad_u @ weight,
        flat.mT @ clean.flatten(0, 1),
        flat.sum(dim=0, dtype=torch.float32),
        own if maps.size(0) > 1 else own.sum(dim=0, keepdim=True),
        grad_y.sum(dim=(0, 1), dtype=torch.float32),
    )


def _check(tokens: Tokens, x: Tensor, weight: Tensor, maps: Tensor) -> tuple[int, int]:
    """Head width and number of programs per head."""
    size = weight.size(0) // (2 * tokens.num_heads)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InputError(f"impl='triton': x has dtype {x.dtype}, it takes float32, bfloat16 and float16")
    if size > (largest := _LARGEST_HEAD[x.dtype.itemsize]):
        raise InputError(f"impl='triton': head width {size} exceeds {largest}, the widest in {x.dtype}")
    if maps.size(1) != tokens.num_heads:
        raise ValueError(f"maps has {maps.size(1)} groups, expected one for each of {tokens.num_heads} heads")
    return size, triton.cdiv(x.size(1), _TOKENS)


def _mask(tokens: Tokens, x: Tensor) -> Tensor:
    return x if tokens.mask is None else tokens.mask.to(torch.uint8).contiguous()


def _sizes(tokens: Tokens, x: Tensor, maps: Tensor, splits: int) -> tuple[int, ...]:
    stride = 0 if maps.size(0) == 1 else maps.stride(0)
    return x.size(1), x.size(2), tokens.num_heads, splits, stride


def _options(tokens: Tokens, size: int, bias: Tensor | None, with_gram: bool) -> dict[str, object]:
    return {
        "P": size, "PP": max(16, triton.next_power_of_2(size)), "TOKENS": _TOKENS,
        "HAS_BIAS": bias is not None, "HAS_MASK": tokens.mask is not None, "WITH_GRAM": with_gram,
        "NORMALIZE": tokens.normalize, "SMALLEST": SMALLEST_NORM, "PRECISION": float32_products(),
    }  # fmt: skip
