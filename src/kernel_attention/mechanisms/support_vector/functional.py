"""Attention-BN, Attention-SH and their combination, which change how the support vector regression is fitted.

Attention is the support vector expansion sum_j k(x, k_j) / h(x) v_j of a regression fitted to keys and
targets. Batch normalisation inside the regression function re-centres queries and keys (Attention-BN, eq. 22
and 26); a smaller training set per head pools them (Attention-SH, eq. 25).

Source: Nguyen, Nguyen, Ho, Bertozzi, Baraniuk, Osher, "A Primal-Dual Framework for Transformers and Neural
Networks", ICLR 2023.

Legend: B batch, h heads, N tokens, S keys, p head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.support_vector.head_groups import head_groups
from kernel_attention.tensors.affine import product_dtype, wide
from kernel_attention.tensors.blocks import completed, softmax_over_blocks
from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.pooling import Pooling, block_within, pool, pool_mask, running_pool
from kernel_attention.tensors.statistics import (
    accumulation_dtype,
    exactly,
    num_real,
    without_autocast,
)

EPSILON = 1e-5


def recentre(
    q: Tensor,
    k: Tensor,
    *,
    beta: float | Tensor = 1.0,
    normalize: bool = False,
    eps: float = EPSILON,
    shift_invariant: bool = True,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    factor: int = 1,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys of Attention-BN: (q - beta mu) / s and (k - beta mu) / s, or an equivalent pair.

    mu and s^2 = sigma^2 + eps are the keys' mean and variance over the sequence, per head and channel. A
    constant added to all logits of a query does not change a softmax, so its keys may be shifted by any
    constant: unscaled keys are not shifted, scaled keys are fully centred. In the causal form the statistics
    are those of each query's prefix, and only the query carries them:
    ((q_i - beta mu_i) / s_i^2) . (k_j - k_0).

    Args:
        q: (B, h, N, p).
        k: (B, h, S, p).
        beta: weight of the mean, eq. 26; a number, or a tensor that broadcasts to (B, h, N, p).
        normalize: whether to divide by s (eq. 22).
        eps: added to the variance.
        shift_invariant: whether the kernel's weights are a softmax; False: the keys of the formula itself.
        attention_mask: (B, S), True = real key. Not read with ``is_causal``, which needs right padding.
        is_causal: statistics of the prefix; needs ``shift_invariant``.
        factor: with ``is_causal``, row i of k is the open block at token i
            (``kernel_attention.tensors.blocks``), and the prefix's keys are the completed blocks and
            that one.
        group: processes that hold the parts of every sequence; not causal.

    Returns:
        queries (B, h, N, p) and keys (B, h, S, p). With ``normalize`` they are in float32 in the place of
        float16: over a small variance they leave its range.
    """
    if is_causal:
        if not shift_invariant:
            raise ValueError("recentre: is_causal=True needs a shift-invariant kernel")
        return _recentre_causal(q, k, beta, normalize, eps, factor)
    mean = _mean(k, attention_mask, group)
    shift = mean * -beta  # added, so that no matrix of gradients is negated
    if not normalize:
        return (q + shift).to(q.dtype), k if shift_invariant else (k + shift).to(k.dtype)
    q, k = wide(q), wide(k)
    centred = k - mean
    inverse = (_mean(centred.square(), attention_mask, group) + eps).rsqrt()
    if not shift_invariant:
        centred = k + shift
    return ((q + shift) * inverse).to(q.dtype), (centred * inverse).to(k.dtype)


def _mean(x: Tensor, attention_mask: Tensor | None, group: SequenceGroup | None = None) -> Tensor:
    """Over the real keys: (B, h, S, p) -> (B, h, 1, p), in float32 for 16-bit inputs."""
    dtype = accumulation_dtype(x.dtype)
    if group is not None:
        x = zero_padding(x, attention_mask)
        count = group.places(num_real(x[:, 0], attention_mask))[1].clamp_min(1)
        return group.total(x.sum(dim=2, keepdim=True, dtype=dtype)) / count[:, None, None, None]
    if attention_mask is None:  # a mean would divide a matrix of gradients by N
        return x.sum(dim=2, keepdim=True, dtype=dtype) / x.size(2)
    mask = attention_mask[:, None, :, None]
    return x.masked_fill(~mask, 0.0).sum(dim=2, keepdim=True, dtype=dtype) / mask.sum(
        dim=2, keepdim=True
    ).clamp_min(1)


def _recentre_causal(
    q: Tensor, k: Tensor, beta: float | Tensor, normalize: bool, eps: float, factor: int
) -> tuple[Tensor, Tensor]:
    if not normalize:
        return (q + _prefix_shift(k, beta, factor)).to(q.dtype), k
    first = k[:, :, :1]
    mean, variance = _prefix_moments(exactly(k) - first, factor)
    queries = q - beta * (mean + first)
    q, k = wide(q), wide(k)
    return (queries / (variance + eps)).to(q.dtype), k - first


def _prefix_shift(k: Tensor, beta: float | Tensor, factor: int) -> Tensor:
    """-beta times the mean of the keys of every prefix: the completed blocks and row i. (B, h, N, p)."""
    length, k = k.size(2), exactly(k)
    if factor == 1:
        total = k.cumsum(dim=2)
    else:
        total = k + _for_each_token(_exclusive_sum(completed(k, factor, length)), factor, length)
    of_number = -beta if not isinstance(beta, Tensor) else -1.0

    def make() -> Tensor:
        count = torch.arange(length, device=k.device).div(factor, rounding_mode="floor") + 1
        return (of_number / count.to(k.dtype))[:, None]

    shift = total * kept_constant(("prefix shares", length, factor, of_number, k.dtype), k, make)
    return shift * beta if isinstance(beta, Tensor) else shift


def _prefix_moments(k: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the keys of every prefix: the completed blocks and row i. (B, h, N, p) each.

    Welford's recurrence: a new key adds (k - mean before)^2 count / (count + 1) to the sum of squares. It
    never subtracts two large numbers.
    """
    length, dtype = k.size(2), accumulation_dtype(k.dtype)
    k = k.to(dtype)
    blocks = completed(k, factor, length)
    at_least_1, share, number, share_of = kept_constant(
        ("block counts", factor, length, dtype), k, lambda: _block_counts(factor, length, blocks)
    )
    mean = _exclusive_sum(blocks) / at_least_1
    own = _for_each_token(mean, factor, length)
    change = k - own
    squares = _exclusive_sum((blocks - mean[:, :, :-1]).square() * share)
    squares = _for_each_token(squares, factor, length)
    return own + change / number, (squares + change.square() * share_of) / number


def _block_counts(factor: int, length: int, blocks: Tensor) -> tuple[Tensor, ...]:
    """With n blocks before: max(n, 1) and n / (n + 1) for each, and n + 1 and n / (n + 1) for each token."""
    count = torch.arange(blocks.size(2) + 1, device=blocks.device, dtype=blocks.dtype)[:, None]
    of_token = _for_each_token(count, factor, length)
    return count.clamp_min(1), (count / (count + 1))[:-1], of_token + 1, of_token / (of_token + 1)


def _for_each_token(x: Tensor, factor: int, length: int) -> Tensor:
    """Repeat what belongs to a block for its tokens: (.., M + 1, p) -> (.., N, p)."""
    return x.repeat_interleave(factor, dim=-2)[..., :length, :]


def _exclusive_sum(x: Tensor) -> Tensor:
    """The sum of the rows before each row, and of all rows: (B, h, M, p) -> (B, h, M + 1, p)."""
    return torch.nn.functional.pad(x.cumsum(dim=2), (0, 0, 1, 0))


def support_vector_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention: Callable[..., Tensor] = softmax_over_blocks,
    shift_invariant: bool = True,
    beta: float | Tensor = 0.0,
    normalize: bool = False,
    eps: float = EPSILON,
    factor: int = 1,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    group: SequenceGroup | None = None,
    **options: Any,
) -> Tensor:
    """Attention with a choice of kernel, centring and training set. The defaults give softmax attention.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p), already pooled: blocks of ``factor`` tokens. With ``is_causal``, row i is the
            open block at token i (``kernel_attention.tensors.blocks``).
        v: values, (B, h, S, p_v), pooled like the keys.
        attention: the kernel, called with ``factor``, ``attention_mask``, ``is_causal`` and ``options``.
        shift_invariant: as in ``recentre``, of that kernel.
        beta: as in ``recentre``; the number 0 without ``normalize`` changes neither queries nor keys.
        normalize: as in ``recentre``.
        eps: as in ``recentre``.
        factor: tokens per key.
        attention_mask: (B, S), True = real key; right padding with ``is_causal`` and for kernels that read
            positions.
        is_causal: token i sees the completed blocks before its own block, and its own block up to itself.
        group: processes that hold the parts of every sequence; for the linear kernel.
        options: further arguments of the kernel.

    Returns:
        (B, h, N, p_v).
    """
    if is_causal and group is None:
        factor = block_within(factor, k.size(-2))
    if normalize or isinstance(beta, Tensor) or beta != 0:
        q, k = recentre(
            q, k, beta=beta, normalize=normalize, eps=eps, shift_invariant=shift_invariant,
            attention_mask=attention_mask, is_causal=is_causal, factor=factor, group=group,
        )  # fmt: skip
    if group is not None:
        options["group"] = group
    options |= {"factor": factor, "attention_mask": attention_mask, "is_causal": is_causal}
    dtype = product_dtype(v)
    if not normalize or dtype != torch.float16:
        return attention(q, k, v, **options)
    with without_autocast(v):
        return attention(q, k, v.float(), **options).to(dtype)


def batch_norm_attention(
    q: Tensor, k: Tensor, v: Tensor, *, beta: float | Tensor = 1.0, **options: Any
) -> Tensor:
    """Attention-BN (eq. 26; eq. 22 with ``normalize=True``): q, k, v (B, h, N or S, p) -> (B, h, N, p).

    One fused call with the softmax kernel. Options as in ``support_vector_attention``.
    """
    return support_vector_attention(q, k, v, beta=beta, **options)


def scaled_heads_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factors: Sequence[int],
    *,
    pooling: Pooling = "average",
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Attention-SH (eq. 25): head i attends to keys and values pooled by ``factors[i]``.

    With ``beta`` or ``normalize`` it is Attention-BN+SH (eq. 49 and 51), with the statistics of a head's
    pooled keys. Neighbouring heads of one factor share a call.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p).
        factors: h whole numbers.
        pooling: "average" or "max".
        attention_mask: (B, S) right padding, True = real token.
        is_causal: token i sees the completed blocks before its own block, and its own block up to itself.
        options: as in ``support_vector_attention``.

    Returns:
        (B, h, N, p).
    """
    outputs = []
    mask = None if is_causal else attention_mask  # causality hides right padding from all real tokens
    for heads, factor in head_groups(factors):
        if is_causal:
            keys, values = (running_pool(x[:, heads], factor, pooling) for x in (k, v))
        else:
            keys, values = (
                pool(x[:, heads], factor, pooling, mask=None if mask is None else mask[:, None])
                for x in (k, v)
            )
        outputs.append(
            support_vector_attention(
                q[:, heads],
                keys,
                values,
                factor=factor,
                is_causal=is_causal,
                attention_mask=None if mask is None else pool_mask(mask, factor),
                **options,
            )
        )
    return torch.cat(outputs, dim=1)
