"""Masks of other libraries, translated to padding and causality, which our layers accept.

This module has one polarity: True = may be attended. It refuses a mask that is neither padding nor the causal
triangle, because most mechanisms have no matrix to add a mask to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.errors import InputError

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
