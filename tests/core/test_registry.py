"""The table of mechanisms: what it says, what it makes, what it refuses."""

from __future__ import annotations

import doctest
import re

import pytest
import torch

from kernel_attention import InputError, create_attention, list_attention
from kernel_attention.core import registry
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.mechanisms import get_mechanism, layer_specs

mechanisms = pytest.mark.parametrize("mechanism", list_attention(), ids=lambda mechanism: mechanism.name)


@mechanisms
def test_every_row_says_what_there_is_to_know(mechanism):
    for column in ("name", "paper", "equation", "time", "memory", "mixes_tokens", "decoding"):
        assert getattr(mechanism, column), column
    assert re.fullmatch("[a-z0-9_]+", mechanism.name)
    assert isinstance(mechanism.causal, bool)
    assert isinstance(mechanism.cross, bool)
    assert mechanism.decoding in ("no", "constant", "N", "N / f")
    assert get_mechanism(mechanism.name) is mechanism


@mechanisms
def test_the_table_makes_the_layer_with_its_preset(mechanism):
    sizes = {"grid_size": (2, 3), "max_len": 7}  # what some mechanisms cannot do without
    options = {name: size for name, size in sizes.items() if name in mechanism.options}
    layer = create_attention(mechanism.name, embed_dim=12, num_heads=3, **options)
    assert type(layer) is mechanism.layer
    assert isinstance(layer, AttentionLayer)
    assert layer.supports(context=True) == mechanism.cross
    assert layer.supports(decoding=True) == (mechanism.decoding != "no")
    for option, value in mechanism.preset.items():
        kept = getattr(layer, option, value)  # as it is, one for every head, or a module made from it
        assert kept in (value, (value,) * 3) or isinstance(kept, torch.nn.Module)


@mechanisms
def test_an_unknown_option_is_refused_with_the_accepted_ones(mechanism):
    with pytest.raises(InputError) as error:
        create_attention(mechanism.name, 12, 3, no_such_option=1)
    message = str(error.value)
    assert f"unknown option of attention '{mechanism.name}' 'no_such_option'" in message
    assert all(option in message for option in mechanism.options)
    assert "\n" not in message


@mechanisms
def test_what_the_preset_fixes_is_no_option(mechanism):
    assert not {"embed_dim", "num_heads", *mechanism.preset} & set(mechanism.options)
    for option in mechanism.preset:
        with pytest.raises(InputError, match=f"unknown option of attention '{mechanism.name}' '{option}'"):
            create_attention(mechanism.name, 12, 3, **{option: mechanism.preset[option]})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("primale", "primal"), ("Softmax", "softmax"), ("sofmax", "softmax"), ("symetric", "symmetric")],
)
def test_an_unknown_mechanism_offers_the_nearest(name, nearest):
    with pytest.raises(InputError, match=f"unknown attention mechanism '{name}'; did you mean '{nearest}'"):
        create_attention(name, 12, 3)


@pytest.mark.parametrize("name", ["", "xyz", 7, None, ["primal"]])
def test_something_else_altogether_lists_the_names(name):
    with pytest.raises(InputError, match=re.escape(f"unknown attention mechanism {name!r} (accepted: ")):
        create_attention(name, 12, 3)


def test_the_examples_in_the_docstrings_run():
    results = doctest.testmod(registry)
    assert results.attempted
    assert not results.failed


@mechanisms
def test_device_and_dtype_are_of_every_layer_and_no_options_of_a_mechanism(mechanism):
    assert not {"device", "dtype"} & set(mechanism.options)
    with pytest.raises(InputError, match=f"unknown option of attention '{mechanism.name}' 'dtype'"):
        layer_specs({mechanism.name: {"dtype": torch.float64}}, 1)
    layer = mechanism.build(
        12, 3, **mechanism.example, **_max_len(mechanism), dtype=torch.float64, device="meta"
    )
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float64, "meta")}


def _max_len(mechanism):
    return {"max_len": 7} if "max_len" in mechanism.options else {}


@pytest.mark.parametrize("spec", ["softmax_plus", "taylor"])
def test_device_and_dtype_are_no_options_of_kernels_and_feature_maps(spec):
    for attention, options in (
        ("linear", {"feature_map": {spec: {"device": "cpu"}}}),
        ("batch_norm", {"kernel": {"linear": {"device": "cpu"}}}),
    ):
        with pytest.raises(InputError, match=r"unknown option of .* 'device'"):
            create_attention(attention, 12, 3, **options)
    nested = {"kernel": {"linear": {"feature_map": spec}}}
    layer = create_attention("scaled_heads", 12, 3, **nested, device="meta", dtype=torch.bfloat16)
    buffers = list(layer.buffers())
    assert buffers
    assert all(b.is_meta and (b.dtype == torch.bfloat16 or not b.is_floating_point()) for b in buffers)


def test_a_layer_without_device_or_dtype_says_so():
    class Bare(type(create_attention("softmax", 12, 3))):
        def __init__(self, embed_dim, num_heads):
            super().__init__(embed_dim, num_heads)

    row = registry.Mechanism("bare", Bare, "paper", "equation", "time", "memory")
    registry.MECHANISMS["bare"] = row
    try:
        assert create_attention("bare", 12, 3).embed_dim == 12
        with pytest.raises(InputError, match="device='meta': Bare has no argument device"):
            create_attention("bare", 12, 3, device="meta")
    finally:
        del registry.MECHANISMS["bare"]


def test_a_feature_map_that_was_given_as_a_module_keeps_its_weights_in_a_new_layer():
    class Scaled(torch.nn.Linear):
        def forward(self, x, attention_mask=None, is_causal=False):
            return super().forward(x)

    for name in ("linear", "primal", "multilinear"):
        given = Scaled(4, 4)
        before = given.weight.clone()
        layer = create_attention(name, 12, 3, feature_map=given)
        assert torch.equal(given.weight, before)
        layer.reset_parameters()
        assert not torch.equal(given.weight, before)
