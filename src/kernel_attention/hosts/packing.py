"""Packed sequences as transformers says them: boundaries, positions that begin again, masks of blocks.

Legend: B rows, N tokens of a row. Sequences do not reach from one row into the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernel_attention.errors import InputError
from kernel_attention.hosts.masks import verify
from kernel_attention.tensors.packing import PackedSequences, pack_sequences

ENDS = "cu_seq_lens_q"
PACKING = (ENDS, "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments of transformers' calls that say where sequences lie in a row, apart from ``position_ids``."""

# The layers of a model get the same positions: of each tensor, its version and what it says.
_READ: Any = WeakTensorKeyDictionary()


def read_packing(
    owner: str,
    x: Tensor,
    given: Mapping[str, Any],
    padding: Tensor | None,
    blocks: PackedSequences | None = None,
) -> PackedSequences | None:
    """The sequences that the arguments of a call find in the rows, end to end; None: every row is one.

    Args:
        owner: for messages.
        x: (B, N, ...).
        given: the arguments by name.
        padding: (B, N), True = real token; None: all are real. Beside padding, positions may begin anywhere.
        blocks: the sequences that a mask has found.

    Raises:
        InputError: for arguments that contradict one another, and under torch.compile for positions that
            begin again (RuntimeError).
    """
    row = x.flatten(0, 1)[None]
    ends, positions, number = (given.get(name) for name in (ENDS, "position_ids", "seq_idx"))
    packed = blocks
    if ends is not None:
        others = {"attention_mask": padding}
        packed = pack_sequences(owner, row, ends, given.get("max_length_q"), **others)
        if (other := given.get("cu_seq_lens_k")) is not None and other is not ends:
            same = other.shape == ends.shape and bool((other == ends).all())
            if not same:
                raise InputError(f"{owner}: cu_seq_lens_k is not cu_seq_lens_q; queries and keys are one row")
        if blocks is not None and not torch.equal(packed.sequence, blocks.sequence):
            raise InputError(f"{owner}: {ENDS} has other sequences than the mask")
    elif alone := [name for name in PACKING[1:4] if given.get(name) is not None]:
        raise InputError(f"{owner}: {', '.join(alone)} needs {ENDS}")
    elif packed is None and padding is None and x.size(1) > 1 and along_rows(positions, x):
        packed = _packing_of_positions(owner, row, positions.expand(*x.shape[:2]), positions)
    if number is not None:
        changes = number.expand(*x.shape[:2]).flatten().diff() != 0
        found = torch.zeros_like(changes) if packed is None else packed.sequence.diff() != 0
        verify((changes == found).all(), f"seq_idx has other sequences than {ENDS} or position_ids")
    return packed


def along_rows(positions: Any, x: Tensor) -> TypeGuard[Tensor]:
    """True for positions of x (B, N, ...): (B, N), (1, N) or (N,). Those of pictures in a text have more."""
    shapes = (x.shape[:2], (1, x.size(1)), (x.size(1),))
    return isinstance(positions, Tensor) and tuple(positions.shape) in map(tuple, shapes)


def _packing_of_positions(
    owner: str, row: Tensor, positions: Tensor, given: Tensor
) -> PackedSequences | None:
    """The sequences of positions (B, N), which are the tensor ``given`` for every row."""
    again = positions.diff(dim=1) != 1
    if torch.compiler.is_compiling():
        verify(~again.any(), f"position_ids begin again in a row; under torch.compile pass {ENDS}")
        return None
    version = None if given.is_inference() else (given._version, len(positions))
    if version is None or _READ.get(given, (None,))[0] != version:
        packed = None
        if bool(again.any()):
            packed = pack_sequences(owner, row, boundaries_of(again))
        if version is None:
            return packed
        _READ[given] = (version, packed)
    return _READ[given][1]


def boundaries_of(again: Tensor) -> Tensor:
    """Boundaries of sequences, where ``again`` (B, N - 1) says which tokens but the first begin one."""
    begins = torch.nn.functional.pad(again, (1, 0), value=True).flatten()
    return torch.nn.functional.pad(begins.nonzero()[:, 0], (0, 1), value=begins.numel()).cpu()


def packing_of_mask(keep: Tensor, x: Tensor) -> tuple[PackedSequences, bool] | None:
    """The sequences of a mask of blocks, and whether it is causal in each; None for another mask.

    Args:
        keep: True = may be attended, (B or 1, heads or 1, N or 1, S).
        x: (B, N, ...).
    """
    batch, length = x.shape[:2]
    if torch.compiler.is_compiling() or keep.shape[2:] != (length, length) or keep.size(0) not in (1, batch):
        return None
    before = keep[:, 0].diagonal(-1, dim1=-2, dim2=-1)
    if length == 1 or bool(before.all()):
        return None
    again = ~before.expand(batch, -1)
    sequence = torch.nn.functional.pad(again.cumsum(dim=1), (1, 0))
    same = sequence[:, None, :, None] == sequence[:, None, None, :]
    for is_causal in (False, True):
        if bool((keep == (same.tril() if is_causal else same)).all()):
            return pack_sequences("attention_mask", x.flatten(0, 1)[None], boundaries_of(again)), is_causal
    return None
