"""Settings: what a field accepts is said by its annotation, and by it alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention.fields import (
    DIFFERENT,
    Count,
    NonNegative,
    Number,
    Part,
    Positive,
    Probability,
    Share,
    Whole,
    check_fields,
    checked,
    field_names,
)


@dataclass(frozen=True)
class Base:
    """A base."""

    count: Count = 1
    whole: Whole = 0


@dataclass(frozen=True)
class Example(Base):
    """Settings of every kind."""

    number: Number = 0.0
    positive: Positive = 1.0
    nonnegative: NonNegative = 0.0
    share: Share = 0.5
    part: Part = 0.5
    probability: Probability = 0.5
    flag: bool = False
    word: str = "a"
    choice: Literal["one", "two"] = "one"
    numbers: Annotated[list[Whole], *DIFFERENT] = field(default_factory=lambda: [0])
    words: list[str] = field(default_factory=list)
    mapping: dict[str, Any] = field(default_factory=dict)
    mappings: list[dict[str, Any]] = field(default_factory=list)
    maybe: int | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


ACCEPTED = {
    "count": ([1, 5, np.int64(3)], [0, -1, 1.0, 1.5, True, "1", None, float("nan"), [1]]),
    "whole": ([0, 5], [-1, 0.0, False]),
    "number": ([0, -1.5, 1e300, np.float32(2)], [float("inf"), float("nan"), "1", True, None, 1j]),
    "positive": ([1e-9, 3], [0, -1.0, float("inf")]),
    "nonnegative": ([0, 3.5], [-1e-9]),
    "share": ([0, 1, 0.5], [-0.1, 1.1]),
    "part": ([0.5, 1e-9], [0, 1]),
    "probability": ([0, 0.5], [1, -0.1]),
    "flag": ([True, False], [0, 1, "true", None]),
    "word": (["", "a b"], [1, None, ["a"], b"a"]),
    "choice": (["one", "two"], ["three", "One", 1, ["one"], None]),
    "numbers": ([[0], (1, 2), [np.int32(3)]], [[], [1, 1], [1.5], [-1], [True], 3, "0,1", None]),
    "words": ([[], ["a"], ("a", "b")], ["a", [1], None]),
    "mapping": ([{}, {"a": 1}], [[], "a", None, {1: 2}]),
    "mappings": ([[], [{"a": 1}, {}]], [{"a": 1}, ["a"], "a", None]),
    "maybe": ([None, 3], ["3", 1.5]),
    "anything": ([None, {"a": (1,)}, "x"], []),
}
WORDS = {
    "count": "a whole number of at least 1",
    "whole": "a whole number of at least 0",
    "number": "a finite number",
    "positive": "a finite number above 0",
    "nonnegative": "a finite number of at least 0",
    "share": "a finite number between 0 and 1",
    "part": "a finite number above 0 and below 1",
    "probability": "a finite number of at least 0 and below 1",
    "flag": "true or false",
    "word": "a name",
    "choice": "one of one, two",
    "numbers": "one or more different whole numbers of at least 0, such as [0, 1, 2]",
    "words": "names",
    "mapping": "a mapping",
    "mappings": "mappings",
    "maybe": "a whole number",
}


def test_every_kind_is_tried():
    assert set(ACCEPTED) == set(field_names(Example)) == {*WORDS, "anything"}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_values_come_back_in_the_types_of_yaml(name):
    for value in ACCEPTED[name][0]:
        kept = getattr(Example(**{name: value}), name)
        assert np.array_equal(kept, value) or kept == value or kept == {"a": [1]}
        assert type(kept) in (int, float, bool, str, list, dict, type(None))
    copied = dataclasses.replace(Example(), **{name: ACCEPTED[name][0][0]})
    assert getattr(copied, name) == getattr(Example(**{name: ACCEPTED[name][0][0]}), name)


@pytest.mark.parametrize("name", WORDS)
def test_a_refusal_names_the_field_the_value_and_what_is_accepted(name):
    for value in ACCEPTED[name][1]:
        with pytest.raises(InputError) as error:
            Example(**{name: value})
        message = str(error.value)
        assert message.startswith(f"{name}=")
        assert f" must be {WORDS[name]}" in message
        assert repr(value) in message or isinstance(value, float | tuple)
        assert "\n" not in message


def test_a_near_miss_is_offered():
    with pytest.raises(InputError, match=r"^choice='tow' must be one of one, two; did you mean 'two'\?$"):
        Example(choice="tow")


def test_a_long_value_is_cut_short():
    with pytest.raises(InputError) as error:
        Example(word=["x" * 10_000])
    assert len(str(error.value)) < 200


def test_a_field_is_checked_alone_too():
    assert checked(Example, "number", np.float64(1.5)) == 1.5
    with pytest.raises(InputError, match=r"^here must be a finite number$"):
        checked(Example, "number", "x", "here")
