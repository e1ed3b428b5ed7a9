"""Texts to measure uncertainty on: those of the classes, swapped ones, and newspaper articles."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.text import load_text
from kernel_attention_lab.data.tokens.batches import padded_batch
from kernel_attention_lab.data.tokens.sets import TokenSplit
from kernel_attention_lab.robustness.image_attack import attacked_cases
from kernel_attention_lab.robustness.uncertainty import LabelledInputs, UncertainCases
from kernel_attention_lab.robustness.word_swap import swap_words

TEXT_CASES = {"known": 5000, "corrupted": 500, "unseen": 2500}
RATES = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of the words that a corrupted version has swapped."""
UNSEEN_TEXT = "ptb"
"""The data set whose validation and test text is of no known class."""

_NO_WORDS = ("<unk>", "N")  # what that set has for rare words and numbers would give it away
_BATCH = 64


def uncertain_texts(
    texts: Sequence[str],
    targets: np.ndarray,
    encode: Callable[[Sequence[str], np.ndarray], TokenSplit],
    validation: TokenSplit | None = None,
    *,
    cases: int | None = None,
    data_root: str | os.PathLike[str] | None = None,
) -> tuple[UncertainCases, dict[str, str]]:
    """Test texts, versions with words swapped, and pieces of ``UNSEEN_TEXT``.

    A piece of text of no known class has as many words as half of the known texts have at most.

    Args:
        texts: of the test split. The first of ``attacked_cases`` are taken.
        targets: their classes, (n,).
        encode: makes tokens of texts and classes, no longer than the model reads.
        validation: cases that choose the temperature; None: there is no temperature.
        cases: number of texts of each set, by default ``TEXT_CASES``.
        data_root: the folder that is searched first for data sets.

    Returns:
        the cases, and by the name of an absent set why it is absent.
    """
    counts = TEXT_CASES if cases is None else dict.fromkeys(TEXT_CASES, cases)
    chosen = {name: attacked_cases(len(texts), counts[name]) for name in ("known", "corrupted")}
    known = encode([texts[i] for i in chosen["known"]], targets[chosen["known"]])
    places = chosen["corrupted"]
    swapped = [swap_words(texts[i], rate, int(i)) for rate in RATES for i in places]
    found = UncertainCases(
        labelled(known),
        labelled(encode(swapped, np.tile(targets[places], len(RATES)))),
        validation=None if validation is None else labelled(validation),
        distinct=len(places),
    )
    try:
        elsewhere = load_text(UNSEEN_TEXT, data_root)
    except InputError as error:
        return found, {"unseen": str(error)}
    words = [word for word in f"{elsewhere.validation} {elsewhere.test}".split() if word not in _NO_WORDS]
    length = int(np.median(known.lengths))
    count = min(counts["unseen"], len(words) // length)
    if not count:
        return found, {"unseen": f"{UNSEEN_TEXT} has {len(words)} words here, and a known text {length}"}
    pieces = [" ".join(words[length * i : length * (i + 1)]) for i in range(count)]
    unseen = labelled(encode(pieces, np.zeros(count, dtype=np.int64)))
    return found._replace(unseen=unseen.inputs), {}


def labelled(split: TokenSplit) -> LabelledInputs:
    """The cases of a split in their order."""
    cases = list(range(len(split)))
    parts = (cases[start : start + _BATCH] for start in range(0, len(split), _BATCH))
    return LabelledInputs([padded_batch(split, part).arguments for part in parts], split.targets)
