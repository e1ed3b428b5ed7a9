"""Perplexities that need no network, for comparison with a language model on the same split.

Legend: T tokens of the training text, V vocabulary. Every token of the evaluated text but the first is
predicted once, as in ``kernel_attention.analysis.perplexity.perplexity``.
"""

import math
from collections.abc import Sequence

import numpy as np

from kernel_attention.errors import InputError, require_positive

SMOOTHING = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
"""The values of k that ``Bigrams.choose_smoothing`` tries."""


def uniform_perplexity(vocabulary_size: int) -> float:
    """p(w) = 1 / V: the perplexity is V."""
    require_positive(vocabulary_size=vocabulary_size)
    return float(vocabulary_size)


def unigram_perplexity(train: np.ndarray, text: np.ndarray, vocabulary_size: int, k: float = 1.0) -> float:
    """p(w) = (c(w) + k) / (T + k V) with the counts c of the training text.

    Args:
        train: (T,) tokens that are counted.
        text: tokens that are predicted, at least two.
        vocabulary_size: V.
        k: added to every count, positive.
    """
    train, text = _checked(train, text, vocabulary_size, k)
    counts = np.bincount(train, minlength=vocabulary_size)
    probabilities = (counts + k) / (len(train) + k * vocabulary_size)
    return math.exp(-np.log(probabilities[text[1:]]).mean())


class Bigrams:
    """The counts of a training text: p(w | v) = (c(v, w) + k) / (c(v) + k V).

    Args:
        train: (T,) tokens that are counted.
        vocabulary_size: V.
    """

    def __init__(self, train: np.ndarray, vocabulary_size: int) -> None:
        train, _ = _checked(train, train, vocabulary_size, 1.0)
        self.vocabulary_size = vocabulary_size
        self._pairs, self._counts = np.unique(_pairs(train, vocabulary_size), return_counts=True)
        self._starts = np.bincount(train[:-1], minlength=vocabulary_size)

    def perplexity(self, text: np.ndarray, k: float) -> float:
        """Perplexity of a text of at least two tokens; k, which is positive, is added to every count."""
        text, _ = _checked(text, text, self.vocabulary_size, k)
        wanted = _pairs(text, self.vocabulary_size)
        places = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        found = np.where(self._pairs[places] == wanted, self._counts[places], 0)
        starts = self._starts[text[:-1]] + k * self.vocabulary_size
        return math.exp(-np.log((found + k) / starts).mean())

    def choose_smoothing(self, validation: np.ndarray, candidates: Sequence[float] = SMOOTHING) -> float:
        """The k with the lowest perplexity on the validation text."""
        return min(candidates, key=lambda k: self.perplexity(validation, k))


def _pairs(tokens: np.ndarray, vocabulary_size: int) -> np.ndarray:
    return tokens[:-1].astype(np.int64) * vocabulary_size + tokens[1:]


def _checked(
    train: np.ndarray, text: np.ndarray, vocabulary_size: int, k: float
) -> tuple[np.ndarray, np.ndarray]:
    require_positive(vocabulary_size=vocabulary_size)
    train, text = np.asarray(train), np.asarray(text)
    if not k > 0:
        raise InputError(f"k={k!r} must be positive")
    for name, tokens in (("train", train), ("text", text)):
        if tokens.ndim != 1 or len(tokens) < 2:
            raise InputError(f"{name} has shape {tokens.shape}, expected at least 2 tokens in a row")
        if tokens.min() < 0 or tokens.max() >= vocabulary_size:
            raise InputError(f"{name} has tokens outside 0 to {vocabulary_size - 1}")
    return train, text
