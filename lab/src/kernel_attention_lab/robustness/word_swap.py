"""The word swap of the kernel-PCA paper (appendix A.4): words at random become a generic "AAA"."""

from __future__ import annotations

import re

import numpy as np

from kernel_attention.errors import InputError

GENERIC_WORD = "AAA"

_WORD = re.compile(r"\S+")


def swap_words(text: str, rate: float, seed: int = 0, *, word: str = GENERIC_WORD) -> str:
    """Replace words of a text by one generic word.

    ``round(rate * words)`` of the words between blanks are drawn without replacement from a generator of
    the seed; blanks and line ends stay as they are. The paper names neither its rate nor its seed.

    Args:
        text: any text.
        rate: part of the words to replace, in [0, 1].
        seed: of the draw; the same seed at a higher rate replaces the same words and more.
        word: what stands in their place.

    Raises:
        InputError: for a rate outside [0, 1] or a word with blanks in it.
    """
    if not 0.0 <= rate <= 1.0:
        raise InputError(f"rate={rate!r} must lie between 0 and 1")
    if not word or _WORD.fullmatch(word) is None:
        raise InputError(f"word={word!r} must be one word")
    matches = list(_WORD.finditer(text))
    pieces, end = [], 0
    for index in _drawn(len(matches), rate, seed):
        start, stop = matches[index].span()
        pieces += [text[end:start], word]
        end = stop
    return "".join([*pieces, text[end:]])


def _drawn(count: int, rate: float, seed: int) -> list[int]:
    """Numbers of the words to replace, in order."""
    order = np.random.default_rng(seed).permutation(count)
    return sorted(order[: round(rate * count)].tolist())
