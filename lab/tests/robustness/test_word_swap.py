"""The word swap: how many words, which, and that nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention_lab.robustness import GENERIC_WORD, swap_words

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 1.5}, "rate=1.5"),
        ({"rate": float("nan")}, "rate=nan"),
        ({"word": "A A"}, "word='A A'"),
        ({"word": ""}, "word=''"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        swap_words(TEXT, **{"rate": 0.1} | options)
