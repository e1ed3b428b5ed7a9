"""Perplexity by sliding window against a plain loop, and the baselines against plain counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.analysis.ngrams import Bigrams, unigram_perplexity
from kernel_attention.analysis.perplexity import perplexity, sliding_windows
from kernel_attention.errors import InputError
from kernel_attention.models import CausalLanguageModel

VOCABULARY, CONTEXT, LENGTH = 7, 5, 23


@pytest.fixture
def model():
    return CausalLanguageModel(
        VOCABULARY, CONTEXT, embed_dim=6, num_heads=2, num_layers=1, feedforward_dim=5, dropout=0.5
    ).double()


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3))


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
def test_windows_count_every_prediction_once(predictions, context, stride):
    stride = min(stride, context)
    windows = list(sliding_windows(predictions, context, stride))
    counted = [place for window in windows for place in range(window.stop - window.counted, window.stop)]
    assert counted == list(range(predictions))
    assert all(window.start >= 0 and window.stop - window.start == windows[0].stop for window in windows)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_stride_1_is_the_paper_s_loop(model, tokens, batch_size):
    """Each token is predicted from the L before it (fewer at the beginning), one at a time."""
    model.eval()
    losses = []
    with torch.no_grad():
        for place in range(1, LENGTH):
            past = tokens[max(0, place - CONTEXT) : place]
            losses.append(-model(past[None])[0, -1].log_softmax(dim=0)[tokens[place]].item())
    found = perplexity(model.train(), tokens, context=CONTEXT, stride=1, batch_size=batch_size)
    assert found.tokens == LENGTH - 1
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)  # log-softmax is in float32 there
    assert found.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_other_targets(model, tokens):
    """An attacked text that is to predict the clean one: the inputs are one text, the targets another."""
    attacked = tokens.clone()
    attacked[[4, 9]] = 0
    mixed = perplexity(model, attacked, context=CONTEXT, targets=tokens[1:])
    with torch.no_grad():
        first = model(attacked[None, :CONTEXT])[0].log_softmax(dim=1)
    assert mixed.tokens == LENGTH - 1
    only = perplexity(model, attacked[: CONTEXT + 1], context=CONTEXT, targets=tokens[1 : CONTEXT + 1])
    expected = -first.gather(1, tokens[1 : CONTEXT + 1, None]).mean().item()
    assert only.loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("k", [1.0, 0.05])
def test_baselines_are_plain_counts(k):
    generator = np.random.default_rng(0)
    train, text = (generator.integers(0, VOCABULARY - 2, size) for size in (60, 20))
    text[5] = VOCABULARY - 1  # a word that training never saw
    words, pairs = train.tolist(), list(zip(train.tolist(), train.tolist()[1:], strict=False))
    unigram, bigram = [], []
    for before, word in zip(text.tolist(), text.tolist()[1:], strict=False):
        unigram.append((words.count(word) + k) / (len(words) + k * VOCABULARY))
        starts = sum(first == before for first, _ in pairs)
        bigram.append((pairs.count((before, word)) + k) / (starts + k * VOCABULARY))
    for found, expected in (
        (unigram_perplexity(train, text, VOCABULARY, k), unigram),
        (Bigrams(train, VOCABULARY).perplexity(text, k), bigram),
    ):
        assert found == pytest.approx(math.prod(expected) ** (-1 / len(expected)), rel=1e-10)


def test_probabilities_of_a_bigram_add_up():
    """Over all words after one word: the perplexities of two-token texts are 1 / p."""
    counts = Bigrams(np.array([0, 1, 2, 1, 2, 0, 1]), 4)
    total = sum(1 / counts.perplexity(np.array([1, word]), 0.3) for word in range(4))
    assert total == pytest.approx(1.0)


def test_smoothing_is_chosen_on_validation():
    counts = Bigrams(np.array([0, 1] * 50), 4)
    assert counts.choose_smoothing(np.array([0, 1] * 5)) == 0.0001
    assert counts.choose_smoothing(np.array([0, 3, 2, 3])) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context=0"),
        ({"stride": 0}, "stride=0"),
        ({"stride": CONTEXT + 1}, "stride=6 exceeds context=5"),
        ({"context": CONTEXT + 1}, "exceeds max_len=5"),
        ({"tokens": torch.zeros(1, dtype=torch.long)}, r"tokens has shape \(1,\)"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets has shape \(3,\)"),
    ],
)
def test_bad_arguments(model, tokens, options, message):
    with pytest.raises(InputError, match=message):
        perplexity(model, **{"tokens": tokens, "context": CONTEXT} | options)


def test_bad_counts():
    with pytest.raises(InputError, match="k=0"):
        Bigrams(np.array([0, 1]), 2).perplexity(np.array([0, 1]), 0)
    with pytest.raises(InputError, match="outside 0 to 1"):
        unigram_perplexity(np.array([0, 2]), np.array([0, 1]), 2)
    with pytest.raises(InputError, match="at least 2 tokens"):
        unigram_perplexity(np.array([0, 1]), np.array([0]), 2)
