"""Sparse attention: each query sees a fixed pattern of positions, and the softmax runs over them.

Source: Child, Gray, Radford, Sutskever, "Generating Long Sequences with Sparse Transformers", 2019, in the
bidirectional form of Nguyen et al., "A Primal-Dual Framework for Transformers and Neural Networks", ICLR 2023
(eq. 16).

Legend: B batch, h heads, N tokens, p head width, l the pattern's stride.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.limits import require_memory
from kernel_attention.mechanisms.sparse.blocked import blocked_attention
from kernel_attention.tensors.blocks import block_causal_attention, softmax_over_blocks
from kernel_attention.tensors.padding import is_exporting
from kernel_attention.tensors.softmax.attention import fused_attention

PatternName = Literal["strided", "fixed"]
Implementation = Literal["auto", "blocked", "dense"]
PATTERNS: tuple[PatternName, ...] = ("strided", "fixed")
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "blocked", "dense")

_LONG = 512  # queries from which the blocked form is faster, measured on a CPU core at l = sqrt(N)
_SAVING = 2  # the blocked form must save this factor of logits, because a fused call computes them faster


class SparsePattern(NamedTuple):
    """Which positions j a query i sees.

    "strided": |i - j| < stride, or i - j a multiple of stride. "fixed": the same block of ``stride``
    positions, or j among the last ``summary`` positions of any block.
    """

    name: PatternName = "strided"
    stride: int = 16
    summary: int = 1

    def check(self) -> SparsePattern:
        """The pattern itself; InputError for values that are not accepted."""
        if self.name not in PATTERNS:
            raise unknown("pattern", self.name, PATTERNS)
        require_positive(stride=self.stride)
        if not isinstance(self.summary, int) or not 1 <= self.summary <= self.stride:
            raise InputError(
                f"summary={self.summary!r} must be a whole number from 1 to stride={self.stride}"
            )
        return self


def sparse_mask(
    pattern: SparsePattern,
    num_queries: int,
    num_keys: int,
    *,
    factor: int = 1,
    device: torch.device | None = None,
) -> Tensor:
    """The pattern as a matrix, (num_queries, num_keys) bool, True = seen; without causality.

    With ``factor`` the keys are blocks of that many positions, and a block is seen where any of its positions
    is seen. A block counts as whole even where the sequence ends in it, so the pattern does not depend on the
    length of the sequence.
    """
    return positions_seen(pattern, torch.arange(num_queries, device=device), num_keys, factor=factor)


def positions_seen(pattern: SparsePattern, queries: Tensor, num_keys: int, *, factor: int = 1) -> Tensor:
    """The rows of ``sparse_mask`` for queries at these positions, (n,) int64 -> (n, num_keys) bool."""
    _, stride, summary = pattern
    i = queries[:, None]
    first = torch.arange(num_keys, device=queries.device) * factor
    last = first + factor - 1
    if pattern.name == "strided":
        near = (first < i + stride) & (last > i - stride)
        return near | (
            (i - first) % stride < factor
        )  # the first position in i's column, from ``first`` on, is inside
    same = (first // stride <= i // stride) & (last // stride >= i // stride)
    return same | ((last % stride >= stride - summary) | (last % stride < factor - 1))


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: SparsePattern,
    *,
    factor: int = 1,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    impl: Implementation = "auto",
) -> Tensor:
    """Softmax attention over the positions of a pattern.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p); blocks of ``factor`` positions.
        v: values, (B, h, S, p).
        pattern: which positions are seen.
        factor: positions per key. With ``is_causal`` row i of k and v is the open block at token i, as in
            ``kernel_attention.tensors.blocks``.
        attention_mask: (B, S) right padding, True = real key. Not read with ``is_causal``: no real query
            sees padding.
        is_causal: query i sees positions 0..i only.
        dropout_p: probability of dropping an attention weight.
        impl: "dense": a fused call with an N x S mask. "blocked": plain products of O(N (l + N / l)) size,
            for self-attention with a stride of at least ``factor``. "auto": blocked for long sequences where
            it is defined and has fewer logits. A stride as long as the sequence excludes nothing: the call
            is then softmax attention without a mask. A graph that ``torch.export`` makes for several
            lengths is dense.

    Returns:
        (B, h, N, p). A query that sees no key gets zeros.

    Raises:
        InputError: for a form that is not defined, or a mask beyond the limit of
            ``kernel_attention.limits``.
    """
    if impl not in IMPLEMENTATIONS:
        raise unknown("impl", impl, IMPLEMENTATIONS)
    blocks = (q.size(2) + factor - 1) // factor  # as pooling counts them: torch.export compares the formulas
    has_blocks = pattern.stride >= factor and (is_causal or blocks == k.size(2))
    if impl == "blocked" and not has_blocks:
        raise InputError(
            f"impl='blocked' needs self-attention and a stride of at least factor={factor}, "
            f"got stride={pattern.stride}, {q.size(2)} queries and {k.size(2)} keys; impl='dense' serves all"
        )
    num_keys = blocks if is_causal else k.size(2)
    # Such lengths would need a compiled graph of their own.
    if not torch.compiler.is_compiling() and pattern.stride >= max(q.size(2), num_keys * factor):
        return softmax_over_blocks(
            q, k, v, factor=factor, attention_mask=attention_mask, is_causal=is_causal,
            dropout_p=dropout_p,
        )  # fmt: skip
    # torch.export cannot prove what blocks need of a length that may vary.
    one_length = not is_exporting() or isinstance(q.size(2), int)
    may_block = has_blocks and one_length and impl != "dense"
    if may_block and (impl == "blocked" or saves_logits(pattern, q.size(2), factor)):
        return blocked_attention(
            q,
            k,
            v,
            stride=pattern.stride,
            summary=None if pattern.name == "strided" else pattern.summary,
            factor=factor,
            attention_mask=attention_mask,
            is_causal=is_causal,
            dropout_p=dropout_p,
        )
    _require_mask(pattern, q, num_keys)
    seen = sparse_mask(pattern, q.size(2), num_keys, factor=factor, device=q.device)
    if is_causal and factor > 1:
        return block_causal_attention(q, k, v, factor=factor, dropout_p=dropout_p, allowed=seen)
    if is_causal:
        seen = seen.tril()
    elif attention_mask is not None:
        seen = seen & attention_mask[:, None, None, :]
    return fused_attention(q, k, v, mask=seen, dropout_p=dropout_p)


def saves_logits(pattern: SparsePattern, length: int, factor: int) -> bool:
    """True where the blocked form was measured to be faster: it saves enough logits of a long sequence.

    A strided query has three rows of l keys and a column of N / l, a fixed one a row and the summaries.
    """
    if length < _LONG:
        return False
    num_keys, stride = length // factor, pattern.stride // factor
    if pattern.name == "strided":
        logits = 3 * stride + num_keys // stride
    else:
        logits = stride + -(-pattern.summary // factor) * (num_keys // stride)
    return _SAVING * logits <= num_keys


def _require_mask(pattern: SparsePattern, q: Tensor, num_keys: int) -> None:
    """Check that the mask, and the numbers that the fused call makes of it, fit into memory."""
    if not torch.compiler.is_compiling():
        require_memory(
            f"sparse_attention: the mask of stride={pattern.stride} over {q.size(2)} queries and "
            f"{num_keys} keys",
            q.size(2) * num_keys * (1 + q.element_size()),
            "choose a stride near the square root of the length, which impl='auto' needs no mask for, or "
            "shorten the sequence",
        )
