"""The causal sum of linear attention in Triton, chunk by chunk.

One operation serves the forward pass and the three gradients. It takes a, b and c and gives
sum_{j <= i} (a_i . b_j) c_j, or, reversed, the sum over j >= i. With y = sum_{j <= i} (phi_q_i . phi_k_j) v_j
and g the gradient of y,

    y     = (phi_q, phi_k, v),            d phi_q = (g, v, phi_k),
    d phi_k = (v, g, phi_q) reversed,     d v     = (phi_k, phi_q, g) reversed.

The sums of the weights, the denominators of normalised attention, come with y. Their gradient is one more
column of g beside a column of ones in v.

Three launches make the operation: the sum of b_j c_j^T over each chunk, the running sums of these over the
chunks, and for each block of tokens its own chunk's part and the product with the sum of the chunks before.
The sums over chunks are in float32. Nothing is added atomically, so the result does not depend on the order
in which programs run.

Triton comes with the CUDA builds of PyTorch; TRITON_INTERPRET=1 runs the kernels on a CPU.

Legend: B batch, h heads, N tokens, m columns of a and b, w columns of c.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_attention.tensors.gpu import float32_products

_CHUNK = 128  # tokens whose products are summed in one state
_SCANNED = 16  # chunks that are summed at a time
_ENTRIES = 128  # entries of the state that a program sums
_LARGEST_BUCKET = 16384  # longer sequences take the block sizes of this length


def _configs(*choices: tuple[int, int, int]) -> list[Any]:
    """Tokens of a block, warps and stages; only the first where Triton interprets, with nothing to time."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        choices = choices[:1]
    return [
        triton.Config({"BT": tokens}, num_warps=warps, num_stages=stages) for tokens, warps, stages in choices
    ]


def _fitting(configs: list[Any], arguments: dict[str, Any], **rest: Any) -> list[Any]:
    """Blocks of 64 tokens take more warps in float32, whose exact products leave the tensor cores."""
    warps = 8 if arguments["b"].dtype == torch.float32 else 4
    return [config for config in configs if config.kwargs["BT"] < 64 or config.num_warps == warps]


_CONFIGS = _configs((32, 4, 2), (64, 4, 2), (64, 8, 2))


@triton.autotune(
    configs=_CONFIGS,
    key=["bucket", "M", "W", "SUMS", "WEIGHTED", "PRECISION"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["bucket"])
def _states_kernel(
    b, c, column, states, sums, N, H, chunks, bucket, M: tl.constexpr, PM: tl.constexpr, W: tl.constexpr,
    PW: tl.constexpr, CHUNK: tl.constexpr, SUMS: tl.constexpr, WEIGHTED: tl.constexpr,
    PRECISION: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """sum_j b_j c_j^T over a chunk, and one vector beside it.

    ``SUMS`` is "keys" for sum_j b_j (M,), "values" for sum_j c_j (W,), times column_j where ``WEIGHTED``, or
    "" for no vector.
    """
    chunk, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b += bh // H * N * H * M + bh % H * M
    c += bh // H * N * H * W + bh % H * W
    m, w = tl.arange(0, PM), tl.arange(0, PW)
    state = tl.zeros((PM, PW), dtype=tl.float32)
    keys = tl.zeros((PM,), dtype=tl.float32)
    values = tl.zeros((PW,), dtype=tl.float32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, N), BT):
        n = start + tl.arange(0, BT)
        key = tl.load(
            b + n[:, None] * H * M + m[None, :], mask=(n < N)[:, None] & (m < M)[None, :], other=0.0
        )
        value = tl.load(
            c + n[:, None] * H * W + w[None, :], mask=(n < N)[:, None] & (w < W)[None, :], other=0.0
        )
        state += tl.dot(tl.trans(key), value, input_precision=PRECISION)
        if SUMS == "keys":
            keys += tl.sum(key.to(tl.float32), axis=0)
        if SUMS == "values":
            value = value.to(tl.float32)
            if WEIGHTED:
                value *= tl.load(column + bh * N + n, mask=n < N, other=0.0)[:, None]
            values += tl.sum(value, axis=0)
    place = (bh * chunks + chunk) * M * W + m[:, None] * W + w[None, :]
    tl.store(states + place, state, mask=(m < M)[:, None] & (w < W)[None, :])
    if SUMS == "keys":
        tl.store(sums + (bh * chunks + chunk) * M + m, keys, mask=m < M)
    if SUMS == "values":
        tl.store(sums + (bh * chunks + chunk) * W + w, values, mask=w < W)


@triton.jit
def _scan_kernel(states, chunks, size, REVERSED: tl.constexpr, SCANNED: tl.constexpr, ENTRIES: tl.constexpr):
    """Every state becomes the sum of those up to it, or from it on; states are (B h, chunks, size)."""
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    states += tl.program_id(1).to(tl.int64) * chunks * size
    total = tl.zeros((ENTRIES,), dtype=tl.float32)
    for start in range(0, chunks, SCANNED):
        turn = start + tl.arange(0, SCANNED)
        chunk = turn
        if REVERSED:
            chunk = chunks - 1 - turn
        place = states + chunk.to(tl.int64)[:, None] * size + entry[None, :]
        inside = (turn < chunks)[:, None] & (entry < size)[None, :]
        here = tl.load(place, mask=inside, other=0.0)
        tl.store(place, total[None, :] + tl.cumsum(here, axis=0), mask=inside)
        total += tl.sum(here, axis=0)


@triton.autotune(
    configs=_CONFIGS,
    key=["bucket", "M", "W", "REVERSED", "SUMS", "COLUMN", "PRECISION"],
    prune_configs_by={"early_config_prune": _fitting},
)
@triton.jit(do_not_specialize=["bucket"])
def _apply_kernel(
    a, b, c, column, states, sums, out, totals, N, H, chunks, bucket, M: tl.constexpr, PM: tl.constexpr,
    W: tl.constexpr, PW: tl.constexpr, CHUNK: tl.constexpr, REVERSED: tl.constexpr, SUMS: tl.constexpr,
    COLUMN: tl.constexpr, PRECISION: tl.constexpr, STATE_PRECISION: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The own chunk's part of a block of tokens, and the product with the sum of the chunks before it.

    ``SUMS`` as in ``_states_kernel``. With "keys", ``totals`` gets the sums of the weights. ``COLUMN`` says
    whose further column is ``column``: that of "a", beside ones in b, or that of "b", beside ones in a.
    """
    block, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head_m = bh // H * N * H * M + bh % H * M
    head_w = bh // H * N * H * W + bh % H * W
    i, m, w = block * BT + tl.arange(0, BT), tl.arange(0, PM), tl.arange(0, PW)
    own = tl.load(
        a + head_m + i[:, None] * H * M + m[None, :], mask=(i < N)[:, None] & (m < M)[None, :], other=0.0
    )
    chunk = block * BT // CHUNK
    before = chunk - 1
    low = chunk * CHUNK
    high = tl.minimum(block * BT + BT, N)
    if REVERSED:
        before = chunk + 1
        low = block * BT
        high = tl.minimum(chunk * CHUNK + CHUNK, N)
    exists = (before >= 0) & (before < chunks)
    state_m = m < tl.where(exists, M, 0)
    state_w = w < tl.where(exists, W, 0)
    place = (bh * chunks + before) * M * W + m[:, None] * W + w[None, :]
    state = tl.load(states + place, mask=state_m[:, None] & (w < W)[None, :], other=0.0)
    # In 16 bits the state is read in TF32, whose range is that of float32.
    acc = tl.dot(own.to(tl.float32), state, input_precision=STATE_PRECISION)
    total = tl.zeros((BT,), dtype=tl.float32)
    if SUMS == "keys":
        keys = tl.load(sums + (bh * chunks + before) * M + m, mask=state_m, other=0.0)
        total += tl.sum(own.to(tl.float32) * keys[None, :], axis=1)
    own_column = total
    if COLUMN == "a":
        own_column = tl.load(column + bh * N + i, mask=i < N, other=0.0)
    if SUMS == "values":
        values = tl.load(sums + (bh * chunks + before) * W + w, mask=state_w, other=0.0)
        if COLUMN == "a":
            acc += own_column[:, None] * values[None, :]
        else:
            acc += values[None, :]
    for start in range(low, high, BT):
        j = start + tl.arange(0, BT)
        key = tl.load(
            b + head_m + j[:, None] * H * M + m[None, :], mask=(j < N)[:, None] & (m < M)[None, :], other=0.0
        )
        value = tl.load(
            c + head_w + j[:, None] * H * W + w[None, :], mask=(j < N)[:, None] & (w < W)[None, :], other=0.0
        )
        weights = tl.dot(own, tl.trans(key), input_precision=PRECISION)
        if COLUMN == "a":
            weights += own_column[:, None]
        if COLUMN == "b":
            weights += tl.load(column + bh * N + j, mask=j < N, other=0.0)[None, :]
        if REVERSED:
            weights = tl.where(i[:, None] <= j[None, :], weights, 0.0)
        else:
            weights = tl.where(j[None, :] <= i[:, None], weights, 0.0)
        weights = weights.to(value.dtype)
        if SUMS == "keys":  # numerator and denominator come from the same rounded weights
            total += tl.sum(weights.to(tl.float32), axis=1)
        acc += tl.dot(weights, value, input_precision=PRECISION)
    inside = (i < N)[:, None] & (w < W)[None, :]
    tl.store(out + head_w + i[:, None] * H * W + w[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if SUMS == "keys":
        tl.store(totals + bh * N + i, total, mask=i < N)


def causal_sums(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    is_reversed: bool = False,
    with_totals: bool = False,
    column: Tensor | None = None,
    column_of: str = "",
) -> tuple[Tensor, Tensor | None]:
    """sum_{j <= i} (a_i . b_j) c_j, and sum_{j <= i} a_i . b_j ``with_totals``.

    Args:
        a: (B, N, h, m), contiguous as all tensors are.
        b: (B, N, h, m).
        c: (B, N, h, w).
        is_reversed: the sums are over j >= i.
        with_totals: whether the sums of the weights are wanted.
        column: (B, h, N) in float32, one more column of ``column_of`` beside ones in the other; None: no
            such column.
        column_of: "a" or "b".

    Returns:
        (B, N, h, w) in the precision of c, and (B, h, N) in float32 or None.
    """
    batch, n, h, m = a.shape
    w = c.size(3)
    bucket = min(triton.next_power_of_2(n), _LARGEST_BUCKET)
    chunks = triton.cdiv(n, _CHUNK)
    sums_of = "keys" if with_totals else "values" if column is not None else ""
    exact: dict[str, Any] = {"dtype": torch.float32, "device": a.device}
    states = torch.empty(batch * h, chunks, m, w, **exact)
    sums = torch.empty(batch * h, chunks, {"keys": m, "values": w, "": 0}[sums_of], **exact)
    out = torch.empty_like(c)
    totals = torch.empty(batch, h, n, **exact) if with_totals else None
    precision = float32_products()
    sizes: dict[str, Any] = {
        "M": m, "PM": _padded(m), "W": w, "PW": _padded(w), "CHUNK": _CHUNK, "SUMS": sums_of,
        "PRECISION": precision,
    }  # fmt: skip
    column_of = "" if column is None else column_of
    column = a if column is None else column
    _states_kernel[chunks, batch * h](
        b, c, column, states, sums, n, h, chunks, bucket, **sizes, WEIGHTED=column_of == "b"
    )
    for summed in (states, sums):
        if size := summed[0, 0].numel():
            _scan_kernel[triton.cdiv(size, _ENTRIES), batch * h](
                summed, chunks, size, REVERSED=is_reversed, SCANNED=_SCANNED, ENTRIES=_ENTRIES
            )
    _apply_kernel[lambda config: (triton.cdiv(n, config["BT"]), batch * h)](
        a, b, c, column, states, sums, out, out if totals is None else totals, n, h, chunks, bucket,
        **sizes,
        REVERSED=is_reversed, COLUMN=column_of,
        STATE_PRECISION=precision if a.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out, totals


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
