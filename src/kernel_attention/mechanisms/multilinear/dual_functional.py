"""Multilinear (KMLSVD) attention in the dual: the kernel tensor, its multilinear SVD, the scores. For short
sequences.

Source: Verbeek, "3D Primal Attention", TU Delft 2025 (eq. 2-20, 2-23, 3-3 to 3-7), here for any order D >= 2.

Legend: B batch, h heads, N tokens, p head width, M sampled tokens (N without sampling), R rank.
Everything runs in float32 or better, autocast or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kernel_attention.mechanisms.multilinear.dual_slices import joined_slices, summed_slices
from kernel_attention.tensors.kernel_tensors import cubemax_kernel, masked_logits
from kernel_attention.tensors.statistics import accumulation_dtype, without_autocast
from kernel_attention.tensors.unfoldings import fold, leading_eigenvectors, mode_gram, project_modes, unfold


class _Kernel:
    """The kernel tensor of the sampled tokens, whole or in slices that are computed again whenever they are
    read.
    """

    def __init__(
        self, sequences: Sequence[Tensor], mask: Tensor | None, chunk_size: int | None, is_sample: bool
    ) -> None:
        self.sequences, self.mask, self.chunk_size, self.order = sequences, mask, chunk_size, len(sequences)
        self.whole = cubemax_kernel(sequences, [mask] * self.order) if chunk_size is None else None
        # Of every i-slice, (B, h, M); for slices that run across, and for tokens outside the sample.
        self.log_normalizer: Tensor | None = None
        if is_sample or chunk_size is not None:
            self.log_normalizer = self._over(self._slice_normalizer, sequences[0], mask)

    def _slice_normalizer(self, queries: Tensor, mask: Tensor | None, *shared: Tensor) -> Tensor:
        logits = masked_logits([queries, *shared[1:]], [mask] + [self.mask] * (self.order - 1))
        return logits.flatten(3).logsumexp(dim=-1)

    def _block(self, mode: int, tokens: Tensor, mask: Tensor | None, *shared: Tensor) -> Tensor:
        """K with ``mode`` read at these tokens (B, h, n, p) instead; the other modes at the sample.

        ``shared`` are the sample's sequences, and the slices' normalizer where there is one.
        """
        parts, masks = list(shared[: self.order]), [self.mask] * self.order
        parts[mode], masks[mode] = tokens, mask
        normalizer = shared[self.order] if mode > 0 and len(shared) > self.order else None
        return cubemax_kernel(parts, masks, normalizer)

    def grams(self) -> list[Tensor]:
        """K_(n) K_(n)^T of every mode, (B, h, M, M)."""
        if self.whole is not None:
            return [mode_gram(self.whole, n, self.order) for n in range(self.order)]
        # Slices along the second mode hold whole rows of every unfolding but the second's, which slices of
        # the first hold.
        grams = {1: self._summed_gram(1, along=0)}
        for n in range(self.order):
            if n != 1:
                grams[n] = self._summed_gram(n, along=1)
        return [grams[n] for n in range(self.order)]

    def _summed_gram(self, mode: int, along: int) -> Tensor:
        def read(tokens: Tensor, mask: Tensor | None, *shared: Tensor) -> Tensor:
            return mode_gram(self._block(along, tokens, mask, *shared), mode, self.order)

        return self._over(read, self.sequences[along], self.mask, summed=True)

    def contract(
        self, mode: int, bases: Sequence[Tensor], tokens: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """K_(n) (.. (x) U (x) ..), (B, h, n, R^(D - 1)), at the given tokens of this mode; None: the sampled
        ones.
        """
        if tokens is None:
            if self.whole is not None:
                return project_modes(self.whole, bases, mode)
            tokens, mask = self.sequences[mode], self.mask

        def read(tokens: Tensor, mask: Tensor | None, *shared: Tensor) -> Tensor:
            block = self._block(mode, tokens, mask, *shared[: -self.order])
            return project_modes(block, shared[-self.order :], mode)

        return self._over(read, tokens, mask, *bases)

    def _over(
        self, read: Callable[..., Tensor], tokens: Tensor, mask: Tensor | None, *more: Tensor,
        summed: bool = False,
    ) -> Tensor:  # fmt: skip
        """read(tokens, mask, the sample's sequences, the slices' normalizer, more), in slices of tokens."""
        normalizer = () if self.log_normalizer is None else (self.log_normalizer,)
        shared = (*self.sequences, *normalizer, *more)
        if self.chunk_size is None:
            return read(tokens, mask, *shared)

        def of_slice(start: int, stop: int, tokens: Tensor, *shared: Tensor) -> Tensor:
            return read(tokens[:, :, start:stop], None if mask is None else mask[:, start:stop], *shared)

        over = summed_slices if summed else joined_slices
        return over(of_slice, tokens.size(2), self.chunk_size, tokens, *shared)


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
    projected on them. Columns past N are zero. With ``samples`` the SVD is that of the sampled tokens' kernel
    tensor, and every token is scored against it (the mode in question reads all tokens, the others the
    sample): the full form where M = N.

    Args:
        sequences: queries, keys, fibers of all tokens, (B, h, N, p) each.
        rank: R of every mode.
        samples: the same of the sampled tokens, (B, h, M, p); None: all tokens.
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
