"""Vocabularies: round trips, what they are made of, and what is refused when one is read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.vocabulary import (
    KINDS,
    BytePairVocabulary,
    ByteVocabulary,
    WordVocabulary,
    build_vocabulary,
    require_same_vocabulary,
    vocabulary_from_state,
)

TEXT = " the cat sat \n the <unk> sat on the mat \n\n the end \n"


@pytest.fixture(params=KINDS)
def vocabulary(request):
    if request.param == "bpe":
        pytest.importorskip("tokenizers", reason="the extra language is not installed")
    return build_vocabulary(request.param, TEXT * 20, max_size=270 if request.param == "bpe" else None)


def test_words_are_numbered_by_frequency_then_alphabet():
    vocabulary = WordVocabulary.from_text(TEXT)
    assert vocabulary.words == ["<unk>", "<eos>", "the", "sat", "cat", "end", "mat", "on"]
    assert vocabulary.encode("the dog\nsat").tolist() == [2, 0, 1, 3]


def test_rare_words_are_unknown():
    """min_count and max_size, both counted on the training text alone."""
    assert WordVocabulary.from_text(TEXT, min_count=2).words == ["<unk>", "<eos>", "the", "sat"]
    assert WordVocabulary.from_text(TEXT, max_size=3).words == ["<unk>", "<eos>", "the"]


def test_words_survive_the_round_trip():
    """Every line of known words comes back with single blanks; <eos> is a line feed."""
    vocabulary = WordVocabulary.from_text(TEXT)
    lines = [" ".join(line.split()) for line in TEXT.split("\n")]
    assert vocabulary.decode(vocabulary.encode(TEXT)) == "\n".join(lines)
    assert vocabulary.encode(TEXT).tolist().count(1) == TEXT.count("\n")


@given(st.text(alphabet="a é漢😀\n\t\0"))
def test_bytes_survive_the_round_trip(text):
    vocabulary = ByteVocabulary()
    text = text.encode("utf-8", "ignore").decode()
    tokens = vocabulary.encode(text)
    assert vocabulary.decode(tokens) == text
    assert bytes(tokens.tolist()) == text.encode()


def test_byte_pairs_survive_the_round_trip_and_are_fewer():
    pytest.importorskip("tokenizers", reason="the extra language is not installed")
    vocabulary = BytePairVocabulary.from_text(TEXT * 20, max_size=280)
    for text in (TEXT, "  unseen words, äöü \t 漢字\n", ""):
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary.encode(TEXT)) < len(TEXT) / 2
    assert vocabulary.encode(TEXT).max() < vocabulary.size <= 280


def test_a_saved_vocabulary_numbers_texts_alike(vocabulary):
    again = vocabulary_from_state(json.loads(json.dumps(vocabulary.state())))
    assert again.encode(TEXT).tolist() == vocabulary.encode(TEXT).tolist()
    assert again.describe() == vocabulary.describe()
    require_same_vocabulary(again.describe(), vocabulary.describe())


def test_another_vocabulary_is_a_mismatch(vocabulary):
    other = WordVocabulary.from_text("other words")
    with pytest.raises(InputError, match="tokenizer mismatch: the vocabulary is word of 4 tokens, the model"):
        require_same_vocabulary(other.describe(), vocabulary.describe())


def test_the_same_size_is_a_mismatch_too():
    one, other = WordVocabulary.from_text("a b"), WordVocabulary.from_text("a c")
    with pytest.raises(InputError, match=r"tokenizer mismatch: .*\([0-9a-f]{8}\)"):
        require_same_vocabulary(one.describe(), other.describe())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_vocabulary("char", TEXT), "unknown vocabulary 'char'"),
        (lambda: build_vocabulary("word", TEXT, min_count=0), "min_count=0"),
        (lambda: build_vocabulary("word", TEXT, max_size=2), "max_size=2"),
        (lambda: build_vocabulary("bpe", TEXT, max_size=200), "max_size=200"),
        (lambda: vocabulary_from_state({"kind": "char"}), "not a saved vocabulary"),
        (lambda: vocabulary_from_state({"kind": "word"}), "not a saved vocabulary"),
        (lambda: vocabulary_from_state(None), "not a saved vocabulary"),
        (lambda: WordVocabulary(["a", "<unk>", "<eos>", "a"]), "different words"),
        (lambda: WordVocabulary(["a", "<unk>"]), "must contain <eos>"),
    ],
)
def test_bad_vocabularies(make, message):
    with pytest.raises(InputError, match=message):
        make()
