"""The word swap: how many words, which, and that nothing else changes."""

from __future__ import annotations

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention.experiments.robustness import GENERIC_WORD, swap_words

TEXT = " no it was n't \n black monday \n\n but <unk>  fell\n"


@given(st.text(alphabet="ab \n", max_size=60), st.floats(0, 1), st.integers(0, 5))
def test_so_many_words_and_nothing_else(text, rate, seed):
    attacked = swap_words(text, rate, seed)
    before, after = text.split(), attacked.split()
    assert after.count(GENERIC_WORD) == round(rate * len(before))
    assert all(new in (old, GENERIC_WORD) for old, new in zip(before, after, strict=True))
    spaces = [character for character in text if character.isspace()]
    assert [character for character in attacked if character.isspace()] == spaces
    assert attacked == swap_words(text, rate, seed)


def test_a_higher_rate_swaps_the_same_words_and_more():
    text = " ".join(f"w{number}" for number in range(100))
    places = []
    for rate in (0.1, 0.2, 0.5):
        words = swap_words(text, rate, seed=3).split()
        places.append({place for place, word in enumerate(words) if word == GENERIC_WORD})
    assert places[0] < places[1] < places[2]
    other = swap_words(text, 0.5, seed=4).split()
    assert {place for place, word in enumerate(other) if word == GENERIC_WORD} != places[2]


def test_extremes():
    assert swap_words(TEXT, 0.0) == TEXT
    assert swap_words(TEXT, 1.0, word="X") == " X X X X \n X X \n\n X X  X\n"
    assert swap_words("", 1.0) == ""


@pytest.fixture
def textattack(monkeypatch):
    """A stand-in with the parts of TextAttack 0.3's ``AttackedText`` that we call.

    The library itself does not install beside transformers 5.
    """

    class AttackedText:
        def __init__(self, text):
            self.text = text
            self.words = text.replace("<", " ").replace(">", " ").split()

        def replace_words_at_indices(self, indices, new_words):
            text, end = "", 0
            chosen = dict(zip(indices, new_words, strict=True))
            for index, word in enumerate(self.words):
                start = self.text.index(word, end)
                text += self.text[end:start] + chosen.get(index, word)
                end = start + len(word)
            return AttackedText(text + self.text[end:])

    shared = types.ModuleType("textattack.shared")
    shared.AttackedText = AttackedText
    monkeypatch.setitem(sys.modules, "textattack", types.ModuleType("textattack"))
    monkeypatch.setitem(sys.modules, "textattack.shared", shared)


def test_through_the_library_the_same_words_are_swapped(textattack):
    """Where both agree on what a word is; beside punctuation the library keeps it."""
    plain = TEXT.replace("<unk>", "it")
    for library in ("textattack", "auto"):
        assert swap_words(plain, 0.4, 1, library=library) == swap_words(plain, 0.4, 1)
    assert "<AAA>" in swap_words(TEXT, 1.0, library="textattack")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "textattack", None)
    assert swap_words(TEXT, 0.4, 1, library="auto") == swap_words(TEXT, 0.4, 1)
    with pytest.raises(InputError, match="library='textattack' cannot be imported"):
        swap_words(TEXT, 0.4, library="textattack")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, "rate=1.5"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"word": "A A"}, "word='A A'"),
        ({"word": ""}, "word=''"),
        ({"library": "nltk"}, "unknown library 'nltk'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        swap_words(TEXT, **{"rate": 0.1} | options)
