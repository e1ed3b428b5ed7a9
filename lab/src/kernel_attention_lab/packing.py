"""Answers to cases as text in a record: bits for right and wrong, a character for the level of a score.

Records keep them so that any two runs can be compared later.
"""

from __future__ import annotations

import string

import numpy as np

from kernel_attention.errors import InputError

LEVELS = 64
"""The levels that ``pack_levels`` can write: a character each."""

_CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


def pack_bits(correct: np.ndarray) -> str:
    """Right (1) or wrong (0) as hexadecimal digits, one bit a case from the highest of the first byte."""
    return np.packbits(np.asarray(correct, dtype=bool)).tobytes().hex()


def unpack_bits(text: str, cases: int) -> np.ndarray:
    """The bits of ``pack_bits``, (cases,) bool.

    Raises:
        InputError: where the text does not hold exactly that number of cases.
    """
    try:
        packed = np.frombuffer(bytes.fromhex(text), dtype=np.uint8)
    except (ValueError, TypeError):
        raise InputError(f"bits {str(text)[:40]!r} are not hexadecimal digits") from None
    bits = np.unpackbits(packed)
    if len(packed) != -(-cases // 8) or bits[cases:].any():
        raise InputError(f"bits of {len(bits)} places are not those of {cases} cases")
    return bits[:cases].astype(bool)


def pack_levels(levels: np.ndarray) -> str:
    """Levels 0 to 63 as text, one character a case: A to Z, a to z, 0 to 9, + and /."""
    return "".join(_CHARACTERS[level] for level in np.asarray(levels).tolist())


def unpack_levels(text: str, cases: int) -> np.ndarray:
    """The levels of ``pack_levels``, (cases,) int64.

    Raises:
        InputError: for another text, or another number of cases.
    """
    numbers = {character: level for level, character in enumerate(_CHARACTERS)}
    if not isinstance(text, str) or len(text) != cases or not numbers.keys() >= set(text):
        raise InputError(f"levels {str(text)[:40]!r} are not those of {cases} cases, a character each")
    return np.array([numbers[character] for character in text], dtype=np.int64)
