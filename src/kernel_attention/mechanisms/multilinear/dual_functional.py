"""Multilinear (KMLSVD) attention in the dual, for short sequences: the kernel tensor, its SVD, the scores.

Source: Verbeek, "3D Primal Attention", TU Delft 2025 (eq. 2-20, 2-23, 3-3 to 3-7), here for any order D >= 2.

Legend: B batch, h heads, N tokens, p head width, M sampled tokens (N without sampling), R rank.
Everything runs in float32 or better, also under autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from kernel_attention.tensors.multilinear.kernel_tensors import cubemax_kernel, masked_logits
from kernel_attention.tensors.multilinear.unfoldings import (
    fold,
    leading_eigenvectors,
    mode_gram,
    project_modes,
    unfold,
)
from kernel_attention.tensors.recompute import is_transformed, only_formulas
from kernel_attention.tensors.statistics import accumulation_dtype, without_autocast


class _Reading(NamedTuple):
    """The reading of the kernel tensor at tokens of one mode, the other modes standing at the sample.

    * "normalizer": the logarithm of what the softmax of every i-slice divides by, (B, h, n); ``mode`` is 0.
    * "gram": K_(m) K_(m)^T for m = ``gram_mode``, (B, h, M, M). It is a sum over the tokens.
    * "contraction": K_(n) (.. (x) U (x) ..) for n = ``mode``, (B, h, n, R^(D - 1)).

    The tensors that go with it are the tokens, the sample's D sequences, the normalizer where
    ``has_normalizer``, and for a contraction the D bases U.
    """

    wanted: Literal["normalizer", "gram", "contraction"]
    mode: int
    order: int
    mask: Tensor | None  # of the tokens, (B, N)
    sample_mask: Tensor | None  # (B, M)
    has_normalizer: bool = True
    gram_mode: int = 0


class _Kernel:
    """The kernel tensor of the sampled tokens: whole, or in slices that every reader computes again."""

    def __init__(
        self, sequences: Sequence[Tensor], mask: Tensor | None, chunk_size: int | None, is_sample: bool
    ) -> None:
        self.mask, self.chunk_size, self.order = mask, chunk_size, len(sequences)
        self.whole = cubemax_kernel(sequences, [mask] * self.order) if chunk_size is None else None
        self.shared = tuple(sequences)
        self.has_normalizer = is_sample or chunk_size is not None
        if self.has_normalizer:
            # Of every i-slice, (B, h, M). Slices along other modes and tokens outside the sample need it.
            reading = _Reading("normalizer", 0, self.order, mask, mask, has_normalizer=False)
            self.shared += (_over_slices(reading, chunk_size, sequences[0], *sequences),)

    def grams(self) -> list[Tensor]:
        """K_(n) K_(n)^T of every mode, (B, h, M, M)."""
        if self.whole is not None:
            return [mode_gram(self.whole, n, self.order) for n in range(self.order)]
        grams = []
        for n in range(self.order):
            # Slices along the second mode hold whole rows of every unfolding but the second. Slices along the
            # first mode hold whole rows of the second.
            along = 0 if n == 1 else 1
            reading = _Reading("gram", along, self.order, self.mask, self.mask, gram_mode=n)
            grams.append(_over_slices(reading, self.chunk_size, self.shared[along], *self.shared))
        return grams

    def contract(
        self, mode: int, bases: Sequence[Tensor], tokens: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """K_(n) (.. (x) U (x) ..), (B, h, n, R^(D - 1)), at the given tokens; None: the sampled tokens."""
        if tokens is None:
            if self.whole is not None:
                return project_modes(self.whole, bases, mode)
            tokens, mask = self.shared[mode], self.mask
        reading = _Reading("contraction", mode, self.order, mask, self.mask, self.has_normalizer)
        return _over_slices(reading, self.chunk_size, tokens, *self.shared, *bases)


def _over_slices(reading: _Reading, size: int | None, tokens: Tensor, *shared: Tensor) -> Tensor:
    """The reading of all tokens (B, h, N, p), from slices of ``size`` of them; None: at once.

    One slice's intermediate tensors exist at a time, in either pass. First derivatives only.
    """
    length = tokens.size(2)
    if size is None:
        return _read(reading, 0, length, tokens, *shared)
    if not torch.compiler.is_compiling() and only_formulas() is None:
        return _Slices.apply(reading, size, tokens, *shared)
    # torch.func has no checkpointing: its slices keep what they have.
    read = _read if is_transformed() else functools.partial(
        checkpoint, _read, use_reentrant=False, preserve_rng_state=False
    )  # fmt: skip
    parts = [read(reading, start, start + size, tokens, *shared) for start in range(0, length, size)]
    return functools.reduce(torch.add, parts) if reading.wanted == "gram" else torch.cat(parts, dim=2)


def _read(reading: _Reading, start: int, stop: int, tokens: Tensor, *shared: Tensor) -> Tensor:
    """The reading of the tokens from ``start`` to ``stop``."""
    sample, rest = shared[: reading.order], shared[reading.order :]
    parts, masks = list(sample), [reading.sample_mask] * reading.order
    parts[reading.mode] = tokens[:, :, start:stop]
    masks[reading.mode] = None if reading.mask is None else reading.mask[:, start:stop]
    if reading.wanted == "normalizer":
        return masked_logits(parts, masks).flatten(3).logsumexp(dim=-1)
    normalizer = rest[0] if reading.mode > 0 and reading.has_normalizer else None
    block = cubemax_kernel(parts, masks, normalizer)
    if reading.wanted == "gram":
        return mode_gram(block, reading.gram_mode, reading.order)
    return project_modes(block, rest[-reading.order :], reading.mode)


class _Slices(torch.autograd.Function):
    """Only the result outlives a slice.

    Graphs that outlive their slices would lie between the freed blocks of memory, and the allocator could not
    use these blocks again.
    """

    @staticmethod
    def forward(ctx: Any, reading: _Reading, size: int, tokens: Tensor, *shared: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, *shared)
        ctx.reading, ctx.size = reading, size
        length, result = tokens.size(2), None
        for start in range(0, length, size):
            part = _read(reading, start, start + size, tokens, *shared)
            if reading.wanted == "gram":
                result = part if result is None else result.add_(part)
                continue
            if result is None:
                result = part.new_empty(*part.shape[:2], length, *part.shape[3:])
            result[:, :, start : start + size] = part
        assert result is not None  # a sequence has at least one token
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reading, needed = ctx.reading, ctx.needs_input_grad[2:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        sums = [torch.zeros_like(leaf) for leaf in asked]
        for start in range(0, leaves[0].size(2), ctx.size):
            own = grad if reading.wanted == "gram" else grad[:, :, start : start + ctx.size]
            with torch.enable_grad():
                part = _read(reading, start, start + ctx.size, *leaves)
            if part.requires_grad:
                found = torch.autograd.grad(part, asked, own, materialize_grads=True)
                for into, each in zip(sums, found, strict=True):
                    into += each
        given = iter(sums)
        return None, None, *(next(given) if need else None for need in needed)


def dual_multilinear_scores(
    sequences: Sequence[Tensor],
    rank: int,
    *,
    samples: Sequence[Tensor] | None = None,
    attention_mask: Tensor | None = None,
    sample_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, ...]:
    """E_n = K_(n) (U_D (x) .. without U_n .. (x) U_1) S_(n)^T (eq. 2-23) from K's truncated multilinear SVD.

    U_n are the leading left singular vectors of K_(n), from its Gram matrix, with deterministic signs; S is K
    projected on them. Columns past N are zero. With ``samples``, the SVD is that of the sampled tokens'
    kernel tensor. Every token is scored against it: mode n reads all tokens, the other modes the sample. This
    is the full form where M = N.

    Args:
        sequences: queries, keys, fibers of all tokens, (B, h, N, p) each.
        rank: R of every mode.
        samples: the same for the sampled tokens, (B, h, M, p); None: all tokens.
        attention_mask: (B, N), True = real token.
        sample_mask: (B, M), True = real token; needed with ``samples`` where a sequence has fewer than M.
        chunk_size: tokens of a slice of K held at once; None: all of K, B h N M^(D - 1) numbers.

    Returns:
        D tensors (B, h, N, R), zero at padded tokens.
    """
    order = len(sequences)
    with without_autocast(sequences[0]):
        dtype = accumulation_dtype(sequences[0].dtype)
        tokens = [sequence.to(dtype) for sequence in sequences]
        if samples is None:
            kernel = _Kernel(tokens, attention_mask, chunk_size, is_sample=False)
        else:
            kernel = _Kernel(
                [sample.to(dtype) for sample in samples], sample_mask, chunk_size, is_sample=True
            )
        bases = [leading_eigenvectors(gram, rank) for gram in kernel.grams()]
        contracted = [kernel.contract(n, bases, None, None) for n in range(order if samples is None else 1)]
        core = fold(bases[0].mT @ contracted[0], 0, (rank,) * order)
        if samples is not None:
            contracted = [kernel.contract(n, bases, tokens[n], attention_mask) for n in range(order)]
        scores = [part @ unfold(core, n, order).mT for n, part in enumerate(contracted)]
    return tuple(score.to(sequences[0].dtype) for score in scores)
