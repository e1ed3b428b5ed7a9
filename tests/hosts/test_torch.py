"""nn.TransformerEncoder and its kin: our softmax is the same function, and every mechanism works in it."""

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
    real_tokens,
    small_options,
    torch_encoder,
)
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import kernel_attention as ka

every_mechanism = pytest.mark.parametrize(
    "mechanism", SEQUENCE_MECHANISMS, ids=lambda mechanism: mechanism.name
)
both_layouts = pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "length_first"])


def causal_mask(kind: str) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return mask if kind == "additive" else mask < 0


def calls(batch_first: bool) -> dict[str, dict]:
    ignored = ~real_tokens()
    additive = torch.zeros(BATCH, LENGTH).masked_fill(ignored, -torch.inf)
    return {
        "plain": {},
        "padding": {"src_key_padding_mask": ignored},
        "additive_padding": {"src_key_padding_mask": additive},
        "causal": {"mask": causal_mask("additive"), "is_causal": True},
        "causal_found": {"mask": causal_mask("bool")},
        "causal_and_padding": {"mask": causal_mask("bool"), "src_key_padding_mask": ignored},
        "per_head_mask": {"mask": causal_mask("bool").repeat(BATCH * HEADS, 1, 1)},
    }


@both_layouts
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("name", calls(True))
def test_softmax_with_carried_weights_is_the_same_function(batch_first, norm_first, name):
    """In eval mode with and without gradients: the latter is where torch's fused path lurks."""
    host = torch_encoder(batch_first=batch_first, norm_first=norm_first).eval()
    swapped = copy.deepcopy(host)
    ka.replace_attention(swapped, {"all": "softmax"})
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    x = x if batch_first else x.transpose(0, 1)
    call = calls(batch_first)[name]
    real = real_tokens() if "src_key_padding_mask" in call else torch.ones(BATCH, LENGTH, dtype=torch.bool)
    expected = host(x, **call)
    with torch.no_grad():
        without_gradients = swapped(x, **call)
    for y in (swapped(x, **call), without_gradients):
        assert largest_difference(y, expected, real if batch_first else real.T) < 1e-5


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors:UserWarning"
)  # torch's own, in the host
@pytest.mark.parametrize("replaced", [0, -1])
def test_one_layer_among_fused_ones_works_in_eval_with_padding(replaced):
    """The nested tensors of the fused path never reach the replaced layer, whichever it is."""
    host = torch_encoder().eval()
    swapped = copy.deepcopy(host)
    ka.replace_attention(swapped, {replaced: "softmax"})
    x, real = torch.randn(BATCH, LENGTH, EMBED_DIM), real_tokens()
    with torch.no_grad():
        expected, y = (model(x, src_key_padding_mask=~real) for model in (host, swapped))
    assert largest_difference(y, expected, real) < 1e-5


def test_unbatched_input():
    host = torch_encoder().eval()
    x, ignored = torch.randn(LENGTH, EMBED_DIM), ~real_tokens()[1]
    expected = host(x, src_key_padding_mask=ignored)
    ka.replace_attention(host, {"all": "softmax"})
    assert largest_difference(host(x, src_key_padding_mask=ignored), expected, ~ignored) < 1e-5


def test_decoder_self_attention_by_index_and_cross_attention_by_name():
    torch.manual_seed(0)
    host = nn.TransformerDecoder(nn.TransformerDecoderLayer(EMBED_DIM, HEADS, 17, batch_first=True), 2).eval()
    swapped = copy.deepcopy(host)
    report = ka.replace_attention(swapped, {"all": "softmax", "layers.1.multihead_attn": "softmax"})
    assert [record.path for record in report] == [
        "layers.0.self_attn", "layers.1.self_attn", "layers.1.multihead_attn"
    ]  # fmt: skip
    assert [record.layer for record in report] == [0, 1, None]
    x, memory = torch.randn(BATCH, LENGTH, EMBED_DIM), torch.randn(BATCH, 13, EMBED_DIM)
    call = {
        "tgt_mask": causal_mask("bool"),
        "tgt_key_padding_mask": ~real_tokens(),
        "memory_key_padding_mask": torch.arange(13)[None] >= torch.tensor([13, 4, 1, 6, 9])[:, None],
    }
    assert largest_difference(swapped(x, memory, **call), host(x, memory, **call), real_tokens()) < 1e-5


def test_whole_transformer_counts_encoder_and_decoder_layers():
    host = nn.Transformer(EMBED_DIM, HEADS, 2, 2, 17, batch_first=True).eval()
    source, target = torch.randn(BATCH, LENGTH, EMBED_DIM), torch.randn(BATCH, 5, EMBED_DIM)
    expected = host(source, target)
    assert len(ka.replace_attention(host, {"all": "softmax"})) == 4
    assert largest_difference(host(source, target), expected) < 1e-5


@every_mechanism
def test_trains_saves_loads_and_copies(mechanism, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    layers = {0: {mechanism.name: small_options(mechanism)}}
    model = torch_encoder(dropout=0.1)
    ka.replace_attention(model, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, real = torch.randn(BATCH, LENGTH, EMBED_DIM), real_tokens()
    replaced = model.layers[0].self_attn.attention
    before = copy.deepcopy(replaced.state_dict())
    loss = model(x, src_key_padding_mask=~real)[real].square().mean() + ka.auxiliary_loss(model)
    loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in replaced.parameters())
    assert any(not torch.equal(before[key], value) for key, value in replaced.state_dict().items())

    model.eval()
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = torch_encoder(seed=1)
    ka.replace_attention(other, layers)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    for same in (other.eval(), copy.deepcopy(model)):
        assert torch.equal(same(x), model(x))


def test_compiles_and_still_refuses_other_masks():
    model = torch_encoder(layers=1).eval()
    ka.replace_attention(model, {"all": "softmax"})
    attention = model.layers[0].self_attn
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    x, ignored = torch.randn(BATCH, LENGTH, EMBED_DIM), ~real_tokens()
    call = {"attn_mask": causal_mask("bool"), "is_causal": True, "key_padding_mask": ignored}
    assert largest_difference(compiled(x, x, x, **call)[0], attention(x, x, x, **call)[0], ~ignored) < 1e-5
    with pytest.raises(RuntimeError, match="neither padding nor causal"):
        compiled(x, x, x, **{**call, "attn_mask": ~causal_mask("bool").T})


def test_what_the_layer_cannot_honour_is_refused():
    model = torch_encoder()
    ka.replace_attention(model, {0: "softmax"})
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    attention = model.layers[0].self_attn
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2)
    for mask, message in (
        (band, "neither padding nor causal"),
        (causal_mask("bool").T, "neither padding nor causal"),
        (torch.full((LENGTH, LENGTH), 0.5), "bias"),
        (torch.ones(LENGTH, LENGTH, dtype=torch.long), "dtype"),
    ):
        with pytest.raises(ka.InputError, match=message):
            attention(x, x, x, attn_mask=mask)
    with pytest.raises(ka.InputError, match="one tensor"):
        attention(x, x, x.clone())
    assert attention(x, x, x)[1] is None


def test_hosts_that_are_not_a_plain_map_are_refused():
    for options, message in (({"kdim": 3}, "kdim"), ({"add_zero_attn": True}, "add_zero_attn")):
        model = nn.Sequential(nn.MultiheadAttention(EMBED_DIM, HEADS, **options))
        with pytest.raises(ka.InputError, match=message):
            ka.replace_attention(model, {0: "softmax"})
    model = nn.Sequential(nn.MultiheadAttention(EMBED_DIM, HEADS, add_bias_kv=True))
    (record,) = ka.replace_attention(model, {0: "softmax"})
    assert record.dropped == ("bias_k", "bias_v")


def test_parametrized_projections_are_refused():
    model = nn.Sequential(ka.create_attention("softmax", EMBED_DIM, HEADS))
    weight_norm(model[0].k_proj)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    y = model(x)
    with pytest.raises(ka.InputError, match="k_proj has a parametrization"):
        ka.replace_attention(model, {0: "linear"})
    assert torch.equal(model(x), y)


def test_a_host_without_biases_gets_a_layer_without():
    model = torch_encoder(bias=False).eval()
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    expected = model(x)
    (record,) = ka.replace_attention(model, {1: "softmax"})
    assert record.carried == tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "out"))
    assert record.new == ()
    assert largest_difference(model(x), expected) < 1e-5
