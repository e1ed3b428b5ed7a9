"""Capture: the tensors caught give the attention that the host itself computes, and leave no trace."""

import collections
import math

import pytest
import torch
from hosts.models_of_hosts import (
    BATCH,
    EMBED_DIM,
    HEADS,
    LENGTH,
    own_encoder,
    real_tokens,
    scatter,
    torch_encoder,
)
from torch import nn
from torch.nn import functional as F

import kernel_attention as ka
from kernel_attention.analysis import attention_layers, capture
from kernel_attention.analysis.capture import call_model
from kernel_attention.models import SequenceEncoder

SIZES = {
    "bert": (
        "Bert",
        {"hidden_size": 14, "num_attention_heads": 2, "intermediate_size": 17, "vocab_size": 50},
    ),
    "gpt2": ("GPT2", {"n_embd": 14, "n_head": 2, "n_layer": 2, "vocab_size": 50, "n_positions": 40}),
    "llama": (
        "Llama",
        {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 17}
        | {"vocab_size": 50},
    ),
    "t5": ("T5Encoder", {"d_model": 14, "d_kv": 7, "d_ff": 17, "num_heads": 2, "vocab_size": 50}),
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}


def hugging_face(transformers, name, implementation):
    family, sizes = SIZES[name]
    layers = {} if name == "gpt2" else {"num_layers" if name == "t5" else "num_hidden_layers": 2}
    config = getattr(transformers, f"{family.removesuffix('Encoder')}Config")(**sizes, **layers, **ENDS)
    torch.manual_seed(0)
    kind = getattr(transformers, f"{family}Model")
    return scatter(kind._from_config(config, attn_implementation=implementation)).eval()


def assert_same_matrices(captured, weights, real):
    """Rows and columns of real tokens, of every layer and sequence."""
    assert len(captured) == len(weights)
    for attention, expected in zip(captured.values(), weights, strict=True):
        for case in range(len(expected)):
            tokens = real[case]
            found = attention.matrix(case)
            assert found.shape == expected[case][:, tokens][..., tokens].shape
            torch.testing.assert_close(found, expected[case][:, tokens][..., tokens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left", "none"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SIZES)
def test_hugging_face_weights(transformers, name, implementation, side):
    """Rotary positions, grouped keys, fused projections, causality, position biases: as `eager` has them."""
    torch.manual_seed(1)
    real = real_tokens() if side == "right" else real_tokens().flip(1)
    real = torch.ones_like(real) if side == "none" else real
    batch = {"input_ids": torch.randint(3, 50, (BATCH, LENGTH)), "attention_mask": real.long()}
    weights = hugging_face(transformers, name, "eager")(**batch, output_attentions=True).attentions
    captured = capture(hugging_face(transformers, name, implementation), batch)
    assert_same_matrices(captured, weights, real)
    for attention in captured.values():
        assert attention.is_causal == (name in ("gpt2", "llama"))
        assert attention.is_softmax == (name != "t5"), "T5 adds a position bias to the logits"
        assert torch.equal(attention.real_keys, real)


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "additive", "heads"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_weights(mask, batch_first):
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(EMBED_DIM, HEADS, batch_first=batch_first)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    call, real = {}, torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if mask == "padding":
        real = real_tokens()
        call["key_padding_mask"] = ~real
    elif mask == "causal":
        call["attn_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    elif mask == "additive":
        call["attn_mask"] = torch.randn(LENGTH, LENGTH)
    elif mask == "heads":
        call["attn_mask"] = torch.randn(BATCH * HEADS, LENGTH, LENGTH)
    tokens = x if batch_first else x.transpose(0, 1)
    inputs = {"query": tokens, "key": tokens, "value": tokens, **call}
    expected = layer(**inputs, average_attn_weights=False)[1]
    model = nn.ModuleDict({"attention": layer})
    model.forward = lambda **kwargs: layer(**kwargs)
    captured = capture(model, inputs)
    assert_same_matrices(captured, [expected], real)
    assert captured["attention"].is_causal == (mask == "causal")
    assert captured["attention"].is_softmax == (mask in ("none", "padding", "causal"))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"qkv_bias": False}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_timm_weights(timm, options, fused):
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "depth": 3, "embed_dim": 14, "num_heads": 2}
    model = scatter(timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes, **options)).eval()
    images, weights = torch.randn(3, 3, 16, 16), []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(
            lambda module, args, output: weights.append(output.detach())
        )
    model(images)
    for block in model.blocks:
        block.attn.fused_attn = fused
    count = len(weights)
    captured = capture(model, images)
    assert list(captured) == [f"blocks.{index}.attn" for index in range(3)]
    assert_same_matrices(captured, weights[:count], torch.ones(3, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    "name", ["softmax", "symmetric", "cosine", "primal", "batch_norm", "scaled_heads", "rpc"]
)
def test_own_layers(name):
    torch.manual_seed(0)
    options = {"rank": 3} if name == "primal" else {}
    sizes = {"embed_dim": 14, "num_heads": 2, "num_layers": 2, "feedforward_dim": 17}
    model = scatter(SequenceEncoder(3, LENGTH, {name: options}, **sizes)).eval()
    inputs = []
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    x, real = torch.randn(BATCH, LENGTH, 3), real_tokens()
    model(x, real)
    pairs = zip(list(inputs), model.layers, strict=True)
    expected = [layer.attention.kernel_matrix(at, attention_mask=real).detach() for at, layer in pairs]
    assert_same_matrices(capture(model, (x, real)), expected, real)


def test_values_give_the_output():
    """softmax(q k^T / sqrt(p)) v, joined and projected, is what the layer returned."""
    model, x, real = own_encoder().eval(), torch.randn(BATCH, LENGTH, 3), real_tokens()
    outputs = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    captured = capture(model, (x, real))
    for index, attention in enumerate(captured.values()):
        for case in range(BATCH):
            q, k, v = attention.parts(case)
            heads = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
            found = model.layers[index].attention.out_proj(heads.transpose(0, 1).flatten(1))
            torch.testing.assert_close(found, outputs[-3 + index][case][real[case]], rtol=1e-4, atol=1e-5)


def test_layers_of_ours_in_a_host_go_by_the_hosts_name_and_their_mechanism():
    model = torch_encoder().eval()
    ka.replace_attention(model, {1: "symmetric"})
    captured = capture(model, torch.randn(BATCH, LENGTH, EMBED_DIM))
    assert [attention.mechanism for attention in captured.values()] == [*("softmax", "symmetric", "softmax")]
    assert list(captured) == [f"layers.{index}.self_attn" for index in range(3)]


def test_choice_of_layers(transformers):
    model, batch = torch_encoder().eval(), torch.randn(BATCH, LENGTH, EMBED_DIM)
    assert list(capture(model, batch, -1)) == ["layers.2.self_attn"]
    assert list(capture(model, batch, [2, "layers.0"])) == ["layers.0.self_attn", "layers.2.self_attn"]
    assert list(capture(model, batch, "first-2")) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_cross_attention_is_chosen_by_name():
    torch.manual_seed(0)
    model = nn.Transformer(EMBED_DIM, HEADS, 1, 1, 17, batch_first=True).eval()
    batch = {"src": torch.randn(2, 11, EMBED_DIM), "tgt": torch.randn(2, 5, EMBED_DIM)}
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert attention_layers(model, batch) == names
    assert list(capture(model, batch)) == names[:2]
    cross = capture(model, batch, names[2])[names[2]]
    assert cross.is_cross
    assert cross.matrix(0).shape == (HEADS, 5, 11)


class Shared(nn.Module):
    """One attention run twice, and one that is never run."""

    def __init__(self):
        super().__init__()
        self.attention = ka.SoftmaxAttention(8, 2)
        self.idle = ka.SoftmaxAttention(8, 2)

    def forward(self, x):
        if x.size(1) == 1:
            raise RuntimeError("a model that fails")
        return self.attention(self.attention(x))


def test_a_layer_that_runs_twice_is_two():
    captured = capture(Shared(), torch.randn(2, 5, 8))
    assert list(captured) == ["attention", "attention#1"]
    assert not torch.equal(captured["attention"].queries, captured["attention#1"].queries)


def test_a_layer_that_never_runs():
    with pytest.raises(ka.InputError, match=r"idle did not attend when the model was called .*attention#1"):
        capture(Shared(), torch.randn(2, 5, 8), "idle")
    with pytest.raises(ka.InputError, match="unknown layer 'idel'; did you mean 'idle'"):
        capture(Shared(), torch.randn(2, 5, 8), "idel")


def test_a_model_without_attention():
    with pytest.raises(ka.InputError, match="no attention was seen in Linear"):
        capture(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(ka.InputError, match="batch is a int"):
        capture(nn.Linear(3, 3), 3)


@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_is_left(fails):
    model = Shared().train()
    model.idle.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 1 if fails else 5, 8)
    if fails:
        with pytest.raises(RuntimeError, match="a model that fails"):
            capture(model, x)
    else:
        capture(model, x)
    assert model.training
    assert model.attention.training
    assert not model.idle.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.overrides._get_current_function_mode_stack()


def test_padding_that_torch_would_pack_away():
    """In evaluation mode nn.TransformerEncoder packs padded batches and calls no attention at all."""
    model, real = torch_encoder().eval(), real_tokens()
    batch = {"src": torch.randn(BATCH, LENGTH, EMBED_DIM), "src_key_padding_mask": ~real}
    captured = capture(model, batch)
    assert len(captured) == 3
    assert all(torch.equal(attention.real_keys, real) for attention in captured.values())


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_attention_written_by_hand(scale, as_module):
    """A product, any scale, a softmax or a module that is one, a product; a softmax elsewhere is none."""

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x):
            logits = scale * torch.bmm(x, x.transpose(1, 2))
            weights = self.softmax(logits) if as_module else F.softmax(logits, dim=-1)
            return F.softmax(torch.bmm(weights, x), dim=-1)

    model = nn.Sequential(ByHand())
    x = torch.randn(3, 5, 7)
    (attention,) = capture(model, x).values()
    expected = (scale * x @ x.mT).softmax(-1)
    for case in range(3):
        torch.testing.assert_close(attention.matrix(case)[0], expected[case])
    assert attention.is_softmax


def test_a_mapping_with_attributes_of_its_entries_is_read_by_names():
    """As the output of a tokenizer: its attribute ``attention_mask`` makes it no batch of a loader."""

    class Encoding(collections.UserDict):
        def __getattr__(self, name):
            return self.data[name]

    batch = Encoding(input_ids=torch.ones(2, 3), attention_mask=torch.ones(2, 3))
    assert call_model(lambda **given: sorted(given), batch) == ["attention_mask", "input_ids"]
    lists = Encoding(input_ids=[[4, 7], [1]], attention_mask=[[1, 1], [1]])
    with pytest.raises(ka.InputError, match="batch: input_ids is a list of numbers, expected a tensor"):
        call_model(lambda **given: None, lists)
