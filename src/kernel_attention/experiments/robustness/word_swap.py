"""The word swap of the kernel-PCA paper (appendix A.4): words at random become a generic "AAA"."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, unknown

GENERIC_WORD = "AAA"

LIBRARIES = ("auto", "own", "textattack")

_WORD = re.compile(r"\S+")


def swap_words(
    text: str, rate: float, seed: int = 0, *, word: str = GENERIC_WORD, library: str = "own"
) -> str:
    """Replace words of a text by one generic word.

    ``round(rate * words)`` of the words between blanks are drawn without replacement from a generator of
    the seed; blanks and line ends stay as they are. The paper names neither its rate nor its seed.

    Args:
        text: any text.
        rate: part of the words to replace, in [0, 1].
        seed: of the draw; the same seed at a higher rate replaces the same words and more.
        word: what stands in their place.
        library: "own"; "textattack" to let that library's ``AttackedText`` replace the words drawn, line by
            line, with its own idea of a word (punctuation beside it stays); "auto", that library where it can
            be imported, else "own". TextAttack 0.3 does not install beside transformers 5.

    Raises:
        InputError: for a rate outside [0, 1], a word with blanks in it, or a library that is not there.
    """
    if not 0.0 <= rate <= 1.0:
        raise InputError(f"rate={rate!r} must lie between 0 and 1")
    if not word or _WORD.fullmatch(word) is None:
        raise InputError(f"word={word!r} must be one word")
    if library not in LIBRARIES:
        raise unknown("library", library, LIBRARIES)
    if library != "own":
        attacked = _attacked_text()
        if attacked is not None:
            return _through_textattack(text, rate, seed, word, attacked)
        if library == "textattack":
            raise InputError(
                "library='textattack' cannot be imported here (it does not install beside transformers 5): "
                "use library='own'"
            )
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


def _attacked_text() -> Any:
    """TextAttack's class, or None where the library is missing or fails on what it finds installed."""
    try:
        from textattack.shared import AttackedText
    except Exception:  # it raises many kinds beside newer releases of what it needs
        return None
    return AttackedText


def _through_textattack(text: str, rate: float, seed: int, word: str, attacked: Any) -> str:
    lines = [attacked(line) for line in text.split("\n")]
    counts = [len(line.words) for line in lines]
    starts = np.cumsum([0, *counts])
    drawn = np.array(_drawn(int(starts[-1]), rate, seed), dtype=int)
    texts = []
    for number, line in enumerate(lines):
        inside = drawn[(drawn >= starts[number]) & (drawn < starts[number + 1])] - starts[number]
        replaced = line.replace_words_at_indices(inside.tolist(), [word] * len(inside))
        texts.append(replaced.text)
    return "\n".join(texts)
