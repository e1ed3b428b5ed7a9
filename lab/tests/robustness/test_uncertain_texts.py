"""The texts that uncertainty is measured on, and a run of texts through the plan."""

from __future__ import annotations

import json

import numpy as np
import pytest
from runs.small_runs import trained_run
from tasks.token_data import TOKENS, make_tokens

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.vocabulary import WordVocabulary
from kernel_attention_lab.data.tokens.loading import encode_texts
from kernel_attention_lab.robustness import GENERIC_WORD
from kernel_attention_lab.robustness.uncertain_texts import RATES, uncertain_texts
from kernel_attention_lab.runs.attack import attack_run
from kernel_attention_lab.runs.saved import load_run

TEXTS = [f"{word} {word} film and a plot" for word in ("fine", "dull", "lovely", "empty", "moving", "tired")]
TARGETS = np.array([1, 0, 1, 0, 1, 0])


@pytest.fixture
def articles(tmp_path):
    folder = tmp_path / "ptb"
    folder.mkdir()
    for name in ("train", "valid", "test"):
        (folder / f"{name}.txt").write_text("shares <unk> rose N a plot\n" * 4)
    return tmp_path


def test_the_sets_and_their_order(articles):
    asked = []

    def encode(texts, targets):
        asked.append((list(texts), targets.tolist()))
        vocabulary = WordVocabulary.from_text(" ".join(TEXTS))
        return encode_texts(texts, targets, vocabulary)

    cases, absent = uncertain_texts(TEXTS, TARGETS, encode, cases=4, data_root=articles)
    (known, targets), (swapped, repeated), (pieces, _) = asked
    assert not absent
    assert [TARGETS[TEXTS.index(text)] for text in known] == targets == cases.known.targets.tolist()
    assert cases.distinct == 4
    assert repeated == targets * len(RATES)
    for version, rate in enumerate(RATES):
        for text, original in zip(swapped[4 * version : 4 * version + 4], known, strict=True):
            words = list(zip(text.split(), original.split(), strict=True))
            gone = [word == GENERIC_WORD for word, _ in words]
            assert sum(gone) == round(rate * 6)
            assert all(new == old for (new, old), is_gone in zip(words, gone, strict=True) if not is_gone)
    # Eight lines of four words; a known text has six.
    words = ["shares", "rose", "a", "plot"] * 8
    assert [piece.split() for piece in pieces] == [words[6 * i : 6 * i + 6] for i in range(4)]


def test_articles_that_are_not_there_are_said(tmp_path):
    vocabulary = WordVocabulary.from_text(" ".join(TEXTS))
    cases, absent = uncertain_texts(
        TEXTS, TARGETS, lambda texts, targets: encode_texts(texts, targets, vocabulary), data_root=tmp_path
    )
    assert cases.unseen is None
    assert "ptb" in absent["unseen"]


def test_articles_shorter_than_one_text_are_said(articles):
    texts, vocabulary = [f"{text} " * 9 for text in TEXTS], WordVocabulary.from_text(" ".join(TEXTS))
    cases, absent = uncertain_texts(
        texts, TARGETS, lambda texts, targets: encode_texts(texts, targets, vocabulary), data_root=articles
    )
    assert cases.unseen is None
    assert absent["unseen"] == "ptb has 32 words here, and a known text 54"


def test_a_run_of_reviews(tmp_path, articles):
    root = make_tokens(articles)
    attention = ["softmax", {"kernel_gp": {"rank": 3}}]
    run = load_run(trained_run(tmp_path / "run", TOKENS | {"dataset": "sst2", "attention": attention}, root))
    record = attack_run(run, [], shifts=["uncertainty"], shift_cases=5, data_root=root)[0]
    found = record["uncertainty"]
    assert list(found["methods"]) == ["plain", "temperature", "samples"]
    assert found["cases"] == {"known": 5, "corrupted": 25, "unseen": 4}  # articles of 32 words
    assert found == json.loads((tmp_path / "run" / "seed-0" / "robustness.json").read_text())["uncertainty"]
    with pytest.raises(InputError, match="task tokens has no images to attack"):
        attack_run(run, [], shifts=["corruptions"], data_root=root)
