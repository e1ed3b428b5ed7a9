"""Principal Attention Pursuit in Triton: a step of the recursion is an attention and its epilogue.

A program of the forward kernel owns a block of tokens. It runs over the keys with a running maximum, writes
the block of L_t, shrinks, moves the dual variable, and writes the keys of the next step. A step is thus one
launch, and nothing of size N x N is in memory. The keys change from step to step, so every step has row
statistics of its own; they are kept for the backward pass.

Kept for the backward pass: L_1, .., L_n in the precision of the input, and the log-sum-exp of every row. The
rest of the recursion follows from them token by token and is computed again. Where the cleaned keys attend
to themselves, a tile of logits serves both of its triangles: the program that owns a block of tokens takes
their gradient as queries and as keys from five products, without atomic additions. So the result does not
depend on the order in which programs run. Separate queries take a launch of their own.

Triton comes with the CUDA builds of PyTorch; TRITON_INTERPRET=1 runs the kernels on a CPU.

Legend: B batch, h heads, N tokens, p head width. Tensors are (B, N, h, p), statistics (B, h, N).
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_attention.tensors.gpu import float32_products

_LOG2_E = 1.4426950408889634
_LARGEST_BUCKET = 16384  # longer sequences take the block sizes of this length


def _configs(*choices: tuple[int, int, int, int]) -> list[Any]:
    """Block sizes, warps and stages; only the first where Triton interprets, which has nothing to time."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        choices = choices[:1]
    return [
        triton.Config({"BM": rows, "BN": columns}, num_warps=warps, num_stages=stages)
        for rows, columns, warps, stages in choices
    ]


def _fitting(configs: list[Any], arguments: dict[str, Any], **rest: Any) -> list[Any]:
    """Small tiles for exact products, which leave the tensor cores, and for wide float32; else the others.

    In wide heads of float32 a block of 64 rows, or of 4 warps, leaves the compiler no registers.
    """
    is_float32, is_wide = arguments["values"].dtype == torch.float32, rest["PP"] > 64
    is_small = is_float32 and (rest["PRECISION"] == "ieee" or is_wide)
    fitting = [
        config for config in configs if (config.kwargs["BM"] * config.kwargs["BN"] <= 2048) == is_small
    ]
    if is_float32 and is_wide:
        return [config for config in fitting if config.kwargs["BM"] <= 32 and config.num_warps == 8]
    return fitting


@triton.jit
def _attend_blocks(
    acc, top, total, own, other, values, mask, i, low, high, N, stride, factor, p, inside_p,
    BN: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, CHECKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys of [low, high) to the running maximum, sum and output of a block of queries."""
    for start in range(low, high, BN):
        j = start + tl.arange(0, BN)
        seen = (j < N)[:, None] & inside_p[None, :]
        place = j[:, None] * stride + p[None, :]
        key = tl.load(other + place, mask=seen, other=0.0)
        value = tl.load(values + place, mask=seen, other=0.0)
        logits = tl.dot(own, tl.trans(key), input_precision=PRECISION) * factor
        if CHECKED:
            allowed = (j < N)[None, :]
            if HAS_MASK:
                allowed = allowed & (tl.load(mask + j, mask=j < N, other=0) != 0)[None, :]
            if IS_CAUSAL:
                allowed = allowed & (j[None, :] <= i[:, None])
            logits = tl.where(allowed, logits, float("-inf"))
        new = tl.maximum(top, tl.max(logits, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc += tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def _clamp(x, threshold):
    return tl.minimum(tl.maximum(x, -threshold[:, None]), threshold[:, None])


@triton.autotune(
    configs=_configs(
        (32, 32, 4, 2), (32, 32, 8, 2), (64, 32, 8, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2),
    ),
    key=["bucket", "P", "IS_CAUSAL", "HAS_MASK", "PRECISION"],
    prune_configs_by={"early_config_prune": _fitting},
    restore_value=["dual", "out"],
)  # fmt: skip
@triton.jit(do_not_specialize=["done", "is_last", "bucket"])
def _step_kernel(
    queries, keys, values, data, threshold, mask, before, dual, out, lse, next_keys, N, H, done, is_last,
    bucket, factor, P: tl.constexpr, PP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """L_t and its log-sum-exp in base 2; then Y_t and the keys of step t + 1, unless the step is the last.

    ``done`` is N after an earlier step. It is 0 in the first, which comes from L = Y = 0.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    stride = H * P
    corner = bh // H * N * stride + bh % H * P
    i, p = block * BM + tl.arange(0, BM), tl.arange(0, PP)
    inside_p = p < P
    inside = (i < N)[:, None] & inside_p[None, :]
    place = i[:, None] * stride + p[None, :]
    real = i < N
    if HAS_MASK:
        mask += bh // H * N
        real = real & (tl.load(mask + i, mask=i < N, other=0) != 0)
    own = tl.load(queries + corner + place, mask=inside, other=0.0)
    acc = tl.zeros((BM, PP), dtype=tl.float32)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    end = N
    plain = N // BN * BN
    if IS_CAUSAL:
        end = tl.minimum(N, block * BM + BM)
        plain = block * BM // BN * BN
    if HAS_MASK:
        plain = 0
    acc, top, total = _attend_blocks(
        acc, top, total, own, keys + corner, values + corner, mask, i, 0, plain, N, stride, factor, p,
        inside_p, BN, IS_CAUSAL, HAS_MASK, False, PRECISION,
    )  # fmt: skip
    acc, top, total = _attend_blocks(
        acc, top, total, own, keys + corner, values + corner, mask, i, plain, end, N, stride, factor, p,
        inside_p, BN, IS_CAUSAL, HAS_MASK, True, PRECISION,
    )  # fmt: skip
    # A padded query, and one that sees no key, has zeros as output. Its infinite sum makes its weights zero.
    attends = real & (total != 0.0)
    low = tl.where(attends[:, None], acc / tl.where(attends, total, 1.0)[:, None], 0.0)
    low = low.to(out.dtype.element_ty)
    statistic = tl.where(attends, top + tl.log2(tl.where(attends, total, 1.0)), float("inf"))
    tl.store(lse + bh * N + i, statistic, mask=i < N)
    if is_last == 0:
        rounded = low.to(tl.float32)
        tau = _thresholds(threshold, bh, i, N, IS_CAUSAL)
        k = tl.load(data + corner + place, mask=inside & real[:, None], other=0.0).to(tl.float32)
        later = (i < done)[:, None] & inside_p[None, :]
        previous = tl.load(before + corner + place, mask=later, other=0.0).to(tl.float32)
        y = tl.load(dual + corner + place, mask=later, other=0.0)
        y = previous - rounded + _clamp(k - previous + y, tau)
        tl.store(dual + corner + place, y, mask=inside)
        cleaned = rounded - 2 * y + _clamp(k - rounded + y, tau)
        tl.store(next_keys + corner + place, cleaned.to(next_keys.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # ``out`` may be the tensor that ``before`` was read from, by other threads
    tl.store(out + corner + place, low, mask=inside)


@triton.jit
def _thresholds(threshold, bh, i, N, IS_CAUSAL: tl.constexpr):
    """tau of every row: one for the sequence and head, or one for each prefix."""
    if IS_CAUSAL:
        return tl.load(threshold + bh * N + i, mask=i < N, other=0.0)
    return tl.load(threshold + bh + 0 * i)


@triton.jit
def _replay(k, tau, kept, place, inside, count, size, BM: tl.constexpr, PP: tl.constexpr):
    """L, Y and T after ``count`` steps, from the kept L_1, .., L_count; all zero after none."""
    low = tl.zeros((BM, PP), dtype=tl.float32)
    y = tl.zeros((BM, PP), dtype=tl.float32)
    cleaned = tl.zeros((BM, PP), dtype=tl.float32)
    for _ in range(0, count):
        taken = _clamp(k - low + y, tau)
        cleaned = low - 2 * y + taken
        new = tl.load(kept + place, mask=inside, other=0.0).to(tl.float32)
        y = low - new + taken
        low = new
        kept += size
    return low, y, cleaned


@triton.jit(do_not_specialize=["count"])
def _keys_kernel(
    data, threshold, mask, kept, out, grad, keys, delta, N, H, count, size, P: tl.constexpr,
    PP: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, WITH_DELTA: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """The keys of step ``count`` + 1, and <grad, out> of every row."""
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, p = block * BM + tl.arange(0, BM), tl.arange(0, PP)
    corner = bh // H * N * H * P + bh % H * P
    inside = (i < N)[:, None] & (p < P)[None, :]
    place = corner + i[:, None] * H * P + p[None, :]
    real = i < N
    if HAS_MASK:
        real = real & (tl.load(mask + bh // H * N + i, mask=i < N, other=0) != 0)
    tau = _thresholds(threshold, bh, i, N, IS_CAUSAL)
    k = tl.load(data + place, mask=inside & real[:, None], other=0.0).to(tl.float32)
    low, y, _ = _replay(k, tau, kept, place, inside, count, size, BM, PP)
    cleaned = low - 2 * y + _clamp(k - low + y, tau)
    tl.store(keys + place, cleaned.to(keys.dtype.element_ty), mask=inside)
    if WITH_DELTA:
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(delta + bh * N + i, tl.sum(slope * low, axis=1), mask=i < N)


@triton.jit
def _pull_blocks(
    grad_own, grad_value, own, value, slope, own_lse, own_delta, other, values, grad, lse, delta, i, low,
    high, N, stride, factor, p, inside_p, BN: tl.constexpr, AS_QUERY: tl.constexpr, AS_KEY: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the tokens of [low, high) give to the gradients of a block of tokens and of its values.

    ``AS_QUERY``: the block attends to these tokens; ``AS_KEY``: these tokens attend to it. Tokens beyond the
    end, and padding, have keys, queries and values of zero and an infinite log-sum-exp, so they add nothing.
    """
    for start in range(low, high, BN):
        j = start + tl.arange(0, BN)
        seen = (j < N)[:, None] & inside_p[None, :]
        place = j[:, None] * stride + p[None, :]
        there = tl.load(other + place, mask=seen, other=0.0)
        logits = tl.dot(own, tl.trans(there), input_precision=PRECISION) * factor
        change = tl.zeros_like(logits)
        if AS_QUERY:
            # The weights are at most 1; the minimum keeps a rounding error of huge logits from overflowing.
            weights = tl.exp2(tl.minimum(logits - own_lse[:, None], 0.0))
            if IS_CAUSAL:
                weights = tl.where(j[None, :] <= i[:, None], weights, 0.0)
            read = tl.load(values + place, mask=seen, other=0.0)
            products = tl.dot(slope, tl.trans(read), input_precision=PRECISION)
            change += weights * (products - own_delta[:, None])
        if AS_KEY:
            statistic = tl.load(lse + j, mask=j < N, other=float("inf"))
            weights = tl.exp2(tl.minimum(logits - statistic[None, :], 0.0))
            if IS_CAUSAL:
                weights = tl.where(i[:, None] <= j[None, :], weights, 0.0)
            arriving = tl.load(grad + place, mask=seen, other=0.0)
            grad_value += tl.dot(weights.to(arriving.dtype), arriving, input_precision=PRECISION)
            products = tl.dot(value, tl.trans(arriving), input_precision=PRECISION)
            change += weights * (products - tl.load(delta + j, mask=j < N, other=0.0)[None, :])
        grad_own += tl.dot(change.to(there.dtype), there, input_precision=PRECISION)
    return grad_own, grad_value


@triton.autotune(
    configs=_configs(
        (32, 32, 4, 2), (32, 32, 8, 2), (64, 32, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (128, 64, 8, 2),
    ),
    key=["bucket", "P", "AS_QUERY", "AS_KEY", "IS_CAUSAL", "HAS_MASK", "PRECISION"],
    prune_configs_by={"early_config_prune": _fitting},
    restore_value=["grad_query", "grad_value", "grad_dual", "grad_data", "grad_threshold"],
)  # fmt: skip
@triton.jit(do_not_specialize=["count", "done", "bucket"])
def _pull_kernel(
    queries, keys, values, data, threshold, mask, kept, grad, lse, delta, grad_query, grad_value, grad_dual,
    grad_data, grad_threshold, before_keys, before_grad, before_delta, N, H, count, done, size, bucket,
    factor, scale, P: tl.constexpr, PP: tl.constexpr, AS_QUERY: tl.constexpr, AS_KEY: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The gradients of step t = ``count`` + 1, from those of L_t less those of Y_t.

    It adds to the gradients of queries, values, data and threshold where ``done`` is N, after a later step,
    and writes them where it is 0. It leaves the gradient of Y_{t-1} in ``grad_dual``, and of step t - 1 the
    keys, the gradient of its attention's output and the products of that gradient with the output.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    stride = H * P
    corner = bh // H * N * stride + bh % H * P
    i, p = block * BM + tl.arange(0, BM), tl.arange(0, PP)
    inside_p = p < P
    inside = (i < N)[:, None] & inside_p[None, :]
    place = corner + i[:, None] * stride + p[None, :]
    real = i < N
    if HAS_MASK:
        real = real & (tl.load(mask + bh // H * N + i, mask=i < N, other=0) != 0)
    grad_own = tl.zeros((BM, PP), dtype=tl.float32)
    own_grad_value = tl.zeros((BM, PP), dtype=tl.float32)
    # Each token is a query of ``queries`` and a key of ``keys``; symmetric, these are the same tensor.
    own = tl.load((keys if AS_KEY else queries) + place, mask=inside, other=0.0)
    other = (keys if AS_QUERY else queries) + corner
    value = own
    slope = own
    own_lse = tl.zeros((BM,), dtype=tl.float32)
    own_delta = own_lse
    if AS_KEY:
        value = tl.load(values + place, mask=inside, other=0.0)
    if AS_QUERY:
        slope = tl.load(grad + place, mask=inside, other=0.0)
        own_lse = tl.load(lse + bh * N + i, mask=i < N, other=float("inf"))
        own_delta = tl.load(delta + bh * N + i, mask=i < N, other=0.0)
    values += corner
    grad += corner
    lse += bh * N
    delta += bh * N
    if IS_CAUSAL:
        first = block * BM // BN * BN
        last = tl.minimum(tl.cdiv(block * BM + BM, BN) * BN, N)
        if AS_QUERY:
            grad_own, own_grad_value = _pull_blocks(
                grad_own, own_grad_value, own, value, slope, own_lse, own_delta, other, values, grad, lse,
                delta, i, 0, first, N, stride, factor, p, inside_p, BN, True, False, False, PRECISION,
            )  # fmt: skip
        grad_own, own_grad_value = _pull_blocks(
            grad_own, own_grad_value, own, value, slope, own_lse, own_delta, other, values, grad, lse, delta,
            i, first, last, N, stride, factor, p, inside_p, BN, AS_QUERY, AS_KEY, True, PRECISION,
        )  # fmt: skip
        if AS_KEY:
            grad_own, own_grad_value = _pull_blocks(
                grad_own, own_grad_value, own, value, slope, own_lse, own_delta, other, values, grad, lse,
                delta, i, last, N, N, stride, factor, p, inside_p, BN, False, True, False, PRECISION,
            )  # fmt: skip
    else:
        grad_own, own_grad_value = _pull_blocks(
            grad_own, own_grad_value, own, value, slope, own_lse, own_delta, other, values, grad, lse, delta,
            i, 0, N, N, stride, factor, p, inside_p, BN, AS_QUERY, AS_KEY, False, PRECISION,
        )  # fmt: skip
    grad_own = tl.where(real[:, None], grad_own * scale, 0.0)
    earlier = (i < done)[:, None] & inside_p[None, :]
    if not AS_KEY:
        grad_own += tl.load(grad_query + place, mask=earlier, other=0.0)
        tl.store(grad_query + place, grad_own, mask=inside)
    else:
        own_grad_value = tl.where(real[:, None], own_grad_value, 0.0)
        own_grad_value += tl.load(grad_value + place, mask=earlier, other=0.0)
        tl.store(grad_value + place, own_grad_value, mask=inside)
        tau = _thresholds(threshold, bh, i, N, IS_CAUSAL)
        k = tl.load(data + place, mask=inside & real[:, None], other=0.0).to(tl.float32)
        low, y, cleaned = _replay(k, tau, kept, place, inside, count, size, BM, PP)
        residual = k - low + y
        grad_y = tl.load(grad_dual + place, mask=earlier, other=0.0)
        grad_taken = grad_y + grad_own
        above = residual > tau[:, None]
        below = residual < -tau[:, None]
        grad_residual = tl.where(above | below, 0.0, grad_taken)
        clipped = tl.where(above, grad_taken, 0.0) - tl.where(below, grad_taken, 0.0)
        grad_tau = tl.sum(clipped, axis=1) + tl.load(grad_threshold + bh * N + i, mask=i < done, other=0.0)
        tl.store(grad_threshold + bh * N + i, grad_tau, mask=i < N)
        own_data = grad_residual + tl.load(grad_data + place, mask=earlier, other=0.0)
        tl.store(grad_data + place, own_data, mask=inside)
        if count > 0:
            tl.store(grad_dual + place, grad_residual - 2 * grad_own, mask=inside)
            tl.store(before_keys + place, cleaned.to(before_keys.dtype.element_ty), mask=inside)
            grad_low = grad_y + 3 * grad_own - 2 * grad_residual
            grad_low = grad_low.to(before_grad.dtype.element_ty)
            tl.store(before_grad + place, grad_low, mask=inside)
            product = tl.sum(grad_low.to(tl.float32) * low, axis=1)
            tl.store(before_delta + bh * N + i, product, mask=i < N)


class KeptSteps(NamedTuple):
    """Needs of the backward pass: L_1, .., L_{n-1} (n - 1, B, N, h, p), L_n, and lse (n, B, h, N)."""

    kept: Tensor
    low_rank: Tensor
    lse: Tensor


class PursuitGradients(NamedTuple):
    """Gradients in float32: (B, N, h, p), and (B, h, N) of the threshold of every row."""

    queries: Tensor | None
    data: Tensor
    values: Tensor
    threshold: Tensor


def pursue(
    queries: Tensor | None,
    data: Tensor,
    values: Tensor,
    threshold: Tensor,
    mask: Tensor | None,
    *,
    iterations: int,
    is_causal: bool,
    keep: bool,
) -> KeptSteps:
    """n = ``iterations`` steps of the recursion; all tensors are contiguous, and zero at padded tokens.

    Args:
        queries: (B, N, h, p); None: the cleaned keys attend to themselves.
        data: the keys K, (B, N, h, p).
        values: (B, N, h, p).
        threshold: tau in float32, (B, h), or (B, h, N) where causal.
        mask: (B, N) uint8, not 0 = real token.
        iterations: n.
        is_causal: token i sees tokens 0..i only.
        keep: whether earlier steps are kept and not written over.
    """
    b, n, h, _ = data.shape
    steps = iterations - 1
    kept = data.new_empty(steps if keep else 0, *data.shape)
    low_rank = torch.empty_like(data)
    lse = data.new_empty(iterations, b, h, n, dtype=torch.float32)
    dual = torch.empty_like(data, dtype=torch.float32) if steps else lse
    keys, spare = torch.empty_like(data), torch.empty_like(data) if steps else data
    sizes = _sizes(data, mask, is_causal)
    _keys_kernel[_grid(data, 64)](
        data, threshold, data if mask is None else mask, data, data, data, keys, lse, n, h, 0, 0, **sizes,
        WITH_DELTA=False, BM=64,
    )  # fmt: skip
    for step in range(iterations):
        out = kept[step] if keep and step < steps else low_rank
        before = kept[step - 1] if keep and step else low_rank
        _step_kernel[lambda config: _grid(data, config["BM"])](
            keys if queries is None else queries, keys, values, data, threshold,
            data if mask is None else mask, before, dual, out, lse[step], spare, n, h,
            n if step else 0, int(step == steps), _bucket(n), _factor(data), **sizes,
            PRECISION=float32_products(),
        )  # fmt: skip
        keys, spare = spare, keys
    return KeptSteps(kept, low_rank, lse)


def pull_back(
    grad: Tensor,
    pursuit: KeptSteps,
    queries: Tensor | None,
    data: Tensor,
    values: Tensor,
    threshold: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> PursuitGradients:
    """The gradients of ``pursue``; ``grad`` is that of L_n, contiguous and zero at padded tokens."""
    n, h = data.shape[1:3]
    steps = pursuit.kept.size(0)
    sizes = _sizes(data, mask, is_causal)
    keys, spare_keys = torch.empty_like(data), torch.empty_like(data) if steps else data
    spare_grad = torch.empty_like(data) if steps else grad
    delta, spare_delta = torch.empty_like(pursuit.lse[0]), torch.empty_like(pursuit.lse[0])
    _keys_kernel[_grid(data, 64)](
        data, threshold, data if mask is None else mask, pursuit.kept, pursuit.low_rank, grad, keys, delta,
        n, h, steps, data.numel(), **sizes, WITH_DELTA=True, BM=64,
    )  # fmt: skip
    found = PursuitGradients(
        None if queries is None else torch.empty_like(data, dtype=torch.float32),
        torch.empty_like(data, dtype=torch.float32),
        torch.empty_like(data, dtype=torch.float32),
        torch.empty_like(pursuit.lse[0]),
    )
    dual = torch.empty_like(data, dtype=torch.float32) if steps else found.data
    roles = [(True, True)] if queries is None else [(True, False), (False, True)]
    for step in range(steps, -1, -1):
        for as_query, as_key in roles:
            _pull_kernel[lambda config: _grid(data, config["BM"])](
                keys if queries is None else queries, keys, values, data, threshold,
                data if mask is None else mask, pursuit.kept, grad, pursuit.lse[step], delta,
                found.data if found.queries is None else found.queries, found.values, dual, found.data,
                found.threshold, spare_keys, spare_grad, spare_delta, n, h, step,
                0 if step == steps else n, data.numel(), _bucket(n), _factor(data), data.size(3) ** -0.5,
                **sizes, AS_QUERY=as_query, AS_KEY=as_key, PRECISION=float32_products(),
            )  # fmt: skip
        # The gradient that came from outside is not written to.
        before = torch.empty_like(data) if step == steps and step > 1 else grad
        keys, spare_keys = spare_keys, keys
        grad, spare_grad = spare_grad, before
        delta, spare_delta = spare_delta, delta
    return found


def _grid(data: Tensor, rows: int) -> tuple[int, int]:
    return triton.cdiv(data.size(1), rows), data.size(0) * data.size(2)


def _bucket(length: int) -> int:
    """Lengths that share tuned block sizes."""
    return min(triton.next_power_of_2(length), _LARGEST_BUCKET)


def _factor(data: Tensor) -> float:
    """1 / sqrt(p) in logits to base 2."""
    return data.size(3) ** -0.5 * _LOG2_E


def _sizes(data: Tensor, mask: Tensor | None, is_causal: bool) -> dict[str, Any]:
    width = data.size(3)
    return {
        "P": width, "PP": max(16, triton.next_power_of_2(width)), "IS_CAUSAL": is_causal,
        "HAS_MASK": mask is not None,
    }  # fmt: skip
