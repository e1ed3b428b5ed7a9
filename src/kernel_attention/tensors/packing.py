"""Packed sequences: several sequences end to end in one row, which do not see one another.

Legend: S sequences, L tokens of the longest, N tokens of all, d model width.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError


class PackedSequences(NamedTuple):
    """Where the sequences of a row begin and end, and where their tokens lie in a padded batch.

    It is made once for a model, see ``pack_sequences``, and its layers share it: each unpacks the row into a
    padded batch, (1, N, d) -> (S, L, d), and packs the result again. That is exact because padding is.

    Attributes:
        boundaries: (S + 1,) int64, from 0 to N.
        max_length: L, or more.
        sequence: the number of each token's sequence, (N,).
        place: the number of the token in its sequence, (N,).
        attention_mask: the real tokens of the padded batch, (S, L).
        source: the token in the row for each place of the padded batch, (S L,); any token for padding.
    """

    boundaries: Tensor
    max_length: int
    sequence: Tensor
    place: Tensor
    attention_mask: Tensor
    source: Tensor

    def unpack(self, x: Tensor) -> Tensor:
        """(1, N, ...) -> (S, L, ...), zero at padding."""
        padded = x[0].index_select(0, self.source).unflatten(0, self.attention_mask.shape)
        return padded.masked_fill(~self.attention_mask[(...,) + (None,) * (padded.dim() - 2)], 0)

    def pack(self, x: Tensor) -> Tensor:
        """(S, L, ...) -> (1, N, ...)."""
        return x.flatten(0, 1).index_select(0, self.sequence * self.max_length + self.place)[None]

    def unpack_heads(self, x: Tensor) -> Tensor:
        """(1, h, N, p) -> (S, h, L, p), zero at padding."""
        return self.unpack(x.transpose(1, 2)).transpose(1, 2)

    def pack_heads(self, x: Tensor) -> Tensor:
        """(S, h, L, p) -> (1, h, N, p)."""
        return self.pack(x.transpose(1, 2)).transpose(1, 2)

    def in_patches(self, size: int) -> PackedSequences:
        """The sequences of the patches of ``size`` tokens; the last patch of a sequence may be short."""
        if size == 1:
            return self
        lengths = (self.boundaries.diff() + size - 1) // size
        boundaries = torch.nn.functional.pad(lengths.cumsum(dim=0), (1, 0))
        return _located(boundaries, int(boundaries[-1]), -(-self.max_length // size))


def pack_sequences(
    owner: str,
    x: Tensor,
    cu_seqlens: Tensor | PackedSequences,
    max_seqlen: int | None = None,
    **others: object,
) -> PackedSequences:
    """The sequences of the row x, (1, N, ...), that these boundaries divide.

    Boundaries on the CPU are checked. Those on another device are read once, which waits for it, unless
    ``max_seqlen`` is given; the device itself then checks them.

    Args:
        owner: the module's name, for messages.
        x: the row; its device is that of the result.
        cu_seqlens: (S + 1,) int32 or int64, where each sequence begins, and N; or what was made of them.
        max_seqlen: the length of the longest sequence, or more; None: read from the boundaries.
        others: arguments that exclude packed sequences: each must be None.

    Raises:
        InputError: for boundaries that do not divide the row, and arguments that exclude them.
    """
    for name, value in others.items():
        if value is not None:
            raise InputError(f"{owner}: {name} cannot be combined with cu_seqlens")
    if x.size(0) != 1:
        raise InputError(
            f"{owner}: cu_seqlens was given, and x has {x.size(0)} rows, expected 1 of all sequences"
        )
    length = x.size(1)
    if isinstance(cu_seqlens, PackedSequences):
        if cu_seqlens.place.size(0) != length:
            raise InputError(
                f"{owner}: cu_seqlens is for {cu_seqlens.place.size(0)} tokens, but x has {length}"
            )
        return cu_seqlens
    if cu_seqlens.dim() != 1 or cu_seqlens.size(0) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{owner}: cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, expected "
            "(S + 1,) and torch.int32 or torch.int64"
        )
    if max_seqlen is not None and max_seqlen < 1:
        raise InputError(f"{owner}: max_seqlen={max_seqlen} must be at least 1")
    boundaries = cu_seqlens.long()
    if torch.compiler.is_compiling():
        if max_seqlen is None:
            raise InputError(f"{owner}: cu_seqlens needs max_seqlen under torch.compile")
    elif max_seqlen is None or cu_seqlens.device.type == "cpu":
        longest = _longest(owner, boundaries.tolist(), length)
        if max_seqlen is not None and max_seqlen < longest:
            raise InputError(
                f"{owner}: max_seqlen={max_seqlen}, but cu_seqlens has a sequence of {longest} tokens"
            )
        max_seqlen = max(longest, 1) if max_seqlen is None else max_seqlen
    else:
        sizes = boundaries.diff()
        fits = (
            (boundaries[0] == 0)
            & (boundaries[-1] == length)
            & (sizes >= 0).all()
            & (sizes <= max_seqlen).all()
        )
        torch._assert_async(fits, f"{owner}: cu_seqlens does not divide the row into sequences of max_seqlen")
    return _located(boundaries.to(x.device, non_blocking=True), length, max_seqlen)


def _longest(owner: str, boundaries: list[int], length: int) -> int:
    """The length of the longest sequence."""
    if boundaries[0] != 0:
        raise InputError(f"{owner}: cu_seqlens begins with {boundaries[0]}, expected 0")
    if boundaries[-1] != length:
        raise InputError(
            f"{owner}: cu_seqlens ends with {boundaries[-1]}, expected the number of tokens, {length}"
        )
    sizes = [end - start for start, end in itertools.pairwise(boundaries)]
    if min(sizes) < 0:
        place = next(place for place, size in enumerate(sizes) if size < 0)
        start, end = boundaries[place], boundaries[place + 1]
        raise InputError(f"{owner}: cu_seqlens decreases from {start} to {end}, expected boundaries in order")
    return max(sizes)


def _located(boundaries: Tensor, length: int, max_length: int) -> PackedSequences:
    token = torch.arange(length, device=boundaries.device)
    sequence = torch.searchsorted(boundaries[1:], token, right=True)
    column = torch.arange(max_length, device=boundaries.device)
    mask = column < boundaries.diff()[:, None]
    source = (boundaries[:-1, None] + column).clamp_max(length - 1).flatten()
    return PackedSequences(boundaries, max_length, sequence, token - boundaries[sequence], mask, source)
