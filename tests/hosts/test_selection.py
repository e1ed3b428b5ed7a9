"""Which layers, which mechanism, and what the report says; on torch's encoder and ours."""

import copy

import pytest
import torch
from hosts.models_of_hosts import (
    BATCH,
    EMBED_DIM,
    HEADS,
    LENGTH,
    SEQUENCE_MECHANISMS,
    largest_difference,
    own_encoder,
    real_tokens,
    small_options,
    torch_encoder,
)
from torch import nn

import kernel_attention as ka
from kernel_attention.models import SequenceClassifier, VisionTransformer


def replaced(layers, **options) -> list[int | None]:
    return [record.layer for record in ka.replace_attention(torch_encoder(), layers, **options)]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (0, [0]),
        (-1, [2]),
        (-3, [0]),
        ("all", [0, 1, 2]),
        ("first", [0]),
        ("last", [2]),
        ("first-2", [0, 1]),
        ("last-2", [1, 2]),
        ("layers.1", [1]),
        ("layers.1.self_attn", [1]),
        ((0, 2), [0, 2]),
        (("last", 0), [0, 2]),
        ("0,2", [0, 2]),
        ("0, last", [0, 2]),
        ("1", [1]),
    ],
)
def test_which_layers(which, expected):
    assert replaced({which: "softmax"}) == expected


def test_several_keys_and_forms_of_a_mechanism():
    model = torch_encoder()
    report = ka.replace_attention(
        model, {2: "softmax", 0: {"primal": {"rank": 4}}, "layers.1": {"primal": {"eta": 0.5}}}, bias=False
    )
    assert [record.attention for record in report] == ["primal", "primal", "softmax"]
    assert report[0].options == {"bias": False, "rank": 4}
    assert report[1].options == {"bias": False, "eta": 0.5}
    assert model.layers[0].self_attn.attention.rank == 4


def test_a_layers_own_option_wins_over_the_common_one():
    report = ka.replace_attention(torch_encoder(), {0: {"primal": {"rank": 4}}, 1: "primal"}, rank=5)
    assert [record.options["rank"] for record in report] == [4, 5]


@pytest.mark.parametrize(
    ("layers", "options", "message"),
    [
        ({}, {}, "must be a mapping"),
        ("primal", {}, "must be a mapping"),
        ({3: "softmax"}, {}, "index 3 is out of range; the model has 3"),
        ({-4: "softmax"}, {}, "index -4 is out of range"),
        ({True: "softmax"}, {}, "must be an index"),
        ({1.0: "softmax"}, {}, "must be an index"),
        ({(): "softmax"}, {}, r"key \(\) must be an index"),
        ({"half": "softmax"}, {}, "unknown layer 'half'.*a key is an index, 'all', .*'0,2'"),
        ({"0,3": "softmax"}, {}, "index 3 is out of range"),
        ({"first-4": "softmax"}, {}, "more than the model's 3"),
        ({"layers": "softmax"}, {}, "holds 3 attention layers"),
        ({"layer.1": "softmax"}, {}, "unknown layer 'layer.1'; did you mean"),
        ({0: "softmax", "layers.0": "primal"}, {}, "chosen twice"),
        ({0: "primol"}, {}, "did you mean 'primal'"),
        ({0: "primal"}, {"ranks": 3}, "option of attention 'primal' 'ranks'; did you mean 'rank'"),
        ({0: "softmax", 1: "primal"}, {"rank": 3}, "option of attention 'softmax' 'rank'"),
    ],
    ids=str,
)
def test_a_refused_call_says_why_and_changes_nothing(layers, options, message):
    model = torch_encoder()
    before = str(model)
    with pytest.raises(ka.InputError, match=message):
        ka.replace_attention(model, layers, **options)
    assert str(model) == before
    assert model.use_nested_tensor


def test_cross_attention_only_where_the_mechanism_has_it():
    host = nn.TransformerDecoder(nn.TransformerDecoderLayer(EMBED_DIM, HEADS, 17), 1)
    with pytest.raises(ka.InputError, match="is cross-attention, which 'primal' does not have"):
        ka.replace_attention(host, {"layers.0.multihead_attn": "primal"})


def test_a_module_shared_by_several_places_is_one_layer():
    host = torch_encoder(layers=1)
    shared = nn.ModuleList([host.layers[0], host.layers[0]])
    report = ka.replace_attention(shared, {"all": "softmax"})
    assert len(report) == 1
    assert shared[0].self_attn is shared[1].self_attn
    owner = nn.ModuleDict(
        {"a": nn.ModuleList([host.layers[0].self_attn]), "b": nn.ModuleList([host.layers[0].self_attn])}
    )
    ka.replace_attention(owner, {0: "primal"}, rank=3)
    assert owner["a"][0] is owner["b"][0]


def test_the_report_reads_well():
    report = ka.replace_attention(torch_encoder(), {-1: "primal"}, rank=3, eta=0.1)
    (record,) = report
    assert record.carried == tuple(
        f"{name}_proj.{kind}" for name in ("q", "k", "out") for kind in ("weight", "bias")
    )
    assert set(record.new) == {"w_e", "w_r", "sqrt_lambda", "concat.weight", "concat.bias"}
    assert record.dropped == ("in_proj_weight[v]", "in_proj_bias[v]")
    lines = str(report).splitlines()
    assert (
        lines[0] == "layer 2 (layers.2.self_attn): MultiheadAttention -> primal(bias=True, rank=3, eta=0.1)"
    )
    assert lines[3] == "  dropped: in_proj_weight[v], in_proj_bias[v]"


@pytest.mark.parametrize("mechanism", SEQUENCE_MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_our_own_models(mechanism):
    model = own_encoder()
    options = {key: value for key, value in small_options(mechanism).items() if key != "max_len"}
    (record,) = ka.replace_attention(model, {-1: {mechanism.name: options}})
    assert record.path == "layers.2.attention"
    given = {"max_len": LENGTH, "dropout": 0.1, "bias": True}
    assert {key: record.options[key] for key in given if key in mechanism.options} == {
        key: value for key, value in given.items() if key in mechanism.options
    }
    y = model(torch.randn(BATCH, LENGTH, 3), real_tokens())
    assert y.isfinite().all()
    again = own_encoder(seed=1)
    ka.replace_attention(again, {-1: {mechanism.name: options}})
    again.load_state_dict(model.state_dict())


def test_our_softmax_for_our_softmax_changes_nothing():
    model = own_encoder().eval()
    x = torch.randn(BATCH, LENGTH, 3)
    expected = model(x, real_tokens(), is_causal=True)
    swapped = copy.deepcopy(model)
    ka.replace_attention(swapped, {"all": "softmax"})
    assert swapped.layers[0].attention is not model.layers[0].attention
    assert largest_difference(swapped(x, real_tokens(), is_causal=True), expected) < 1e-5


def test_one_projection_for_queries_and_keys_serves_as_both():
    """Symmetric attention is softmax attention whose queries are its keys; the pursuit cleans those keys."""
    model = own_encoder().eval()
    ka.replace_attention(model, {"all": "symmetric"})
    x = torch.randn(BATCH, LENGTH, 3)
    before, old = model(x), model.layers[0].attention.q_proj.weight.detach().clone()
    (record, *_) = ka.replace_attention(model, {"all": "softmax"})
    assert (record.new, record.dropped) == ((), ())
    assert largest_difference(model(x), before) < 1e-6
    (record, *_) = ka.replace_attention(model, {"all": "symmetric"})
    assert record.dropped == ("k_proj.weight", "k_proj.bias")
    assert largest_difference(model(x), before) < 1e-6
    (record, *_) = ka.replace_attention(model, {"all": "rpc"})
    assert (record.new, record.dropped) == ((), ())
    assert torch.equal(model.layers[0].attention.k_proj.weight, old)


def test_a_classifier_by_name_with_max_len_from_the_encoder_inside():
    model = SequenceClassifier(3, 2, 13, "softmax", embed_dim=EMBED_DIM, num_heads=HEADS, feedforward_dim=17)
    (record,) = ka.replace_attention(model, {"encoder.layers.0": "primal"}, rank=3)
    assert record.options["max_len"] == 13
    assert model(torch.randn(BATCH, LENGTH, 3)).shape == (BATCH, 2)


def test_a_model_that_is_itself_an_attention_layer_has_none_inside():
    with pytest.raises(ka.InputError, match="holds no attention layer"):
        ka.replace_attention(nn.MultiheadAttention(EMBED_DIM, HEADS), {0: "softmax"})


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_our_vision_transformer_tells_its_grid_class_token_and_length(pooling):
    sizes = {"embed_dim": EMBED_DIM, "num_heads": HEADS, "num_layers": 3, "feedforward_dim": 20}
    model = VisionTransformer((6, 10), 2, 5, dropout=0.1, pooling=pooling, **sizes).eval()
    x = torch.rand(BATCH, 3, 6, 10)
    expected = model(x)
    ka.replace_attention(model, {"all": "softmax"})
    assert torch.equal(model(x), expected)
    report = ka.replace_attention(model, {0: "conv2d", 1: {"scaled": {"scaling": "matrix"}}, 2: "primal"})
    first = int(pooling == "class")
    given = report[0].options
    assert (given["dropout"], given["grid_size"], given["class_tokens"]) == (0.1, (3, 5), first)
    assert report[1].options["max_len"] == report[2].options["max_len"] == 15 + first
    assert model(x).isfinite().all()
