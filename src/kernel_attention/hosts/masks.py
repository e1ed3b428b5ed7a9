"""Masks and packed sequences of other libraries, translated to what our layers accept.

This module has one polarity: True = may be attended. It refuses a mask that is neither padding nor the causal
triangle, because most mechanisms have no matrix to add a mask to.

Legend of packed sequences: B rows, N tokens of a row. Sequences do not reach from one row into the next.
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernel_attention.errors import InputError
from kernel_attention.tensors.packing import PackedSequences, pack_sequences

# Hosts write -inf, finfo.min, -1e9 or -10000 (rounded in bfloat16) for an ignored token.
_IGNORED_BELOW = -1e3


def kept(mask: Tensor, *, true_is_kept: bool) -> Tensor:
    """A boolean or additive mask of any shape as booleans, True = may be attended.

    Args:
        mask: bool, or numbers added to the logits: 0 keeps, large negative ones ignore.
        true_is_kept: the host's reading of a boolean mask (scaled_dot_product_attention: True keeps;
            nn.MultiheadAttention: True ignores).

    Raises:
        InputError: for another dtype, or values in between (a bias).
    """
    if mask.dtype == torch.bool:
        return mask if true_is_kept else ~mask
    if not mask.is_floating_point():
        raise InputError(f"the mask has dtype {mask.dtype}, expected torch.bool or floating-point numbers")
    keep = mask == 0
    verify(
        (keep | (mask < _IGNORED_BELOW)).all(),
        "the mask adds a bias to the logits, which this attention cannot apply; accepted: 0 and -inf",
    )
    return keep


def padding_of_tokens(mask: Tensor) -> Tensor:
    """A mask (B, N) of 1 for a real token and 0 for padding, of any dtype, as booleans.

    Raises:
        InputError: for other numbers.
    """
    padding = mask != 0
    verify(
        ((mask == 1) | ~padding).all(), "attention_mask (B, N) must be 1 for a real token and 0 for padding"
    )
    return padding


def read_attention_mask(keep: Tensor, batch: int, length: int, is_causal: bool) -> tuple[Tensor | None, bool]:
    """Key padding and causality of a mask over pairs of tokens.

    Rows of padded queries are not read, because hosts fill them with any values.

    Args:
        keep: True = may be attended, (B or 1, heads or 1, N or 1, S).
        batch: B.
        length: N, the number of queries.
        is_causal: whether the host says that the mask is causal. If not, an eager call looks at the mask;
            under torch.compile a triangular mask is then an error.

    Returns:
        (padding, causal): (B, S) bool, True = real token, None where all are real; and whether the mask is
        causal.

    Raises:
        InputError: for any other pattern (RuntimeError under torch.compile).
    """
    num_keys = keep.size(-1)
    real = keep.any(dim=2).any(dim=1)
    padding = real[:, None, None, :]
    rows_given = keep.size(2) == length
    square = num_keys == length
    triangle = torch.ones(length, num_keys, dtype=torch.bool, device=keep.device).tril()
    free = ~real[:, None, :, None] if rows_given and square else torch.zeros_like(padding[..., :1])

    def matches(causal: bool) -> Tensor:
        expected = padding & triangle if causal and rows_given else padding
        return ((keep == expected) | free).all()

    if torch.compiler.is_compiling():  # a text with the mask's sizes would break the graph
        verify(
            matches(is_causal),
            "a mask is neither padding nor causal, the only accepted ones; under torch.compile a causal mask "
            "needs is_causal=True",
        )
        return real.expand(batch, -1), is_causal
    if keep.size(0) not in (1, batch):
        raise InputError(f"a mask of shape {tuple(keep.shape)} is for another batch than one of {batch}")
    if not is_causal and not bool(matches(False)):
        is_causal = square
    verify(
        matches(is_causal),
        f"a mask of shape {tuple(keep.shape)} is neither padding nor causal, the only accepted ones",
    )
    return (None if bool(real.all()) else real.expand(batch, -1)), is_causal


def causal_hint(keep: Tensor, is_causal: bool) -> bool:
    """``is_causal`` for ``read_attention_mask`` in a host where a mask over pairs alone decides.

    So it is in transformers: ``is_causal`` counts where there is no such mask. A compiled call cannot look at
    the mask, and takes the host at its word.
    """
    return is_causal and torch.compiler.is_compiling() and keep.size(2) > 1


def join_padding(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Tokens that are real in both masks; None: all are real."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def verify(condition: Tensor, message: str) -> None:
    """InputError unless the 0-dimensional bool is True; a compiled graph raises RuntimeError instead."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise InputError(message)


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
    """The sequences that the arguments of a call find in the rows of x (B, N, ...), end to end; None: every
    row is one.

    ``given`` are the arguments by name, ``blocks`` the sequences that a mask has found. Beside ``padding``
    (B, N), True = real token, positions may begin anywhere.

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
