"""A name or ``{name: options}``: one reader for mechanisms, kernels, feature maps and contenders."""

from __future__ import annotations

import re

import pytest

from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms import create_attention, layer_specs
from kernel_attention.specs import Choice, SpecReader
from kernel_attention.tensors.features.feature_maps import get_feature_map

FRUIT = {"apple": ("size", "colour"), "pear": ()}
READER = SpecReader(argument="fruit", kind="fruit", names=FRUIT, options_of=FRUIT.__getitem__)


@pytest.mark.parametrize(
    ("spec", "choice"),
    [
        ("apple", Choice("apple", {})),
        ({"apple": None}, Choice("apple", {})),
        ({"apple": {}}, Choice("apple", {})),
        ({"apple": {"size": 3}}, Choice("apple", {"size": 3})),
    ],
)
def test_a_spec_is_a_name_or_a_name_with_options(spec, choice):
    assert READER.read(spec) == choice


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (("apple", {"size": 3}), "fruit=('apple', {'size': 3}) must be a name or {name: options}"),
        (["apple"], "fruit=['apple'] must be a name or {name: options}"),
        ({"apple": {}, "pear": {}}, "must be a name or {name: options}"),
        ({}, "fruit={} must be"),
        (None, "fruit=None must be"),
        (3, "fruit=3 must be"),
        ({"apple": 3}, "must be a name or {name: options}"),
        ({"apple": "size"}, "must be a name or {name: options}"),
        ({3: {}}, "must be a name or {name: options}"),
        ("applle", "unknown fruit 'applle'; did you mean 'apple'? (accepted: apple, pear)"),
        ("", "unknown fruit '' (accepted: apple, pear)"),
        (
            {"apple": {"siz": 3}},
            "unknown option of fruit 'apple' 'siz'; did you mean 'size'? (accepted: colour, size)",
        ),
        ({"pear": {"size": 3}}, "unknown option of fruit 'pear' 'size' (accepted: none)"),
    ],
)
def test_anything_else_is_refused_in_one_line(spec, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        READER.read(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "read",
    [
        lambda spec: layer_specs(spec, 1),
        lambda spec: get_feature_map(spec, 4),
        lambda spec: create_attention("batch_norm", 8, 2, kernel=spec),
    ],
    ids=["attention", "feature_map", "kernel"],
)
def test_everything_with_options_is_said_in_this_way_alone(read):
    for pair in (("linear", {}), ("elu", {})):
        with pytest.raises(InputError, match=r"must be a name(,| or) \{name: options\}"):
            read(pair)
    with pytest.raises(InputError, match=r"^unknown \S+.*'no_such_name'"):
        read({"no_such_name": {"rank": 3}})


def test_the_callers_options_are_not_shared():
    options = {"size": 3}
    READER.read({"apple": options}).options["size"] = 5
    assert options == {"size": 3}


def test_a_list_has_one_entry_a_layer():
    assert READER.read_layers(["apple", {"pear": None}], 2) == [Choice("apple", {}), Choice("pear", {})]
    assert READER.read_layers("apple", 2) == [Choice("apple", {})] * 2
    for specs in ([], ["apple"], ["apple"] * 3):
        with pytest.raises(InputError, match=f"lists {len(specs)} entries for num_layers=2"):
            READER.read_layers(specs, 2)


def test_many_names_are_counted_and_few_are_given():
    names = [f"name_{number}" for number in range(100)]
    many = str(unknown("thing", "name_10x", names, listing="list things"))
    assert many.startswith("unknown thing 'name_10x'; did you mean 'name_10'")
    assert many.endswith("? (all 100: list things)")
    assert "name_55" not in many
    assert str(unknown("thing", "zzz", names[:3])) == (
        "unknown thing 'zzz' (accepted: name_0, name_1, name_2)"
    )
