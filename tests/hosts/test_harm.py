"""The harm that a replacement does to a trained model: said in a warning, and least by default."""

from __future__ import annotations

import warnings

import pytest
import torch

import kernel_attention as ka

D, HEADS = 24, 2


def encoder(trained: bool) -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(D, HEADS, 2 * D, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    with torch.no_grad():  # attention that is far from the mean of the values
        for layer in model.layers:
            layer.self_attn.in_proj_weight[: 2 * D].mul_(3)
    if trained:
        torch.nn.init.normal_(model.layers[1].norm1.weight, 1, 0.1)
    return model


@pytest.mark.parametrize(
    "spec",
    [
        "cosine",
        {"primal_values": {"normalize": "output"}},
        {"primal_values": {"normalize": "keys", "feature_map": "elu"}},
    ],
)
def test_a_mechanism_that_destroys_a_trained_model_is_named_in_one_line(spec):
    name = spec if isinstance(spec, str) else "primal_values"
    with pytest.warns(UserWarning, match=f"'{name}' does not do what 2 trained layers did") as found:
        ka.replace_attention(encoder(trained=True), {"last-2": spec})
    assert "ka.convert_attention takes the same arguments" in str(found[0].message)
    assert "\n" not in str(found[0].message)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ka.replace_attention(encoder(trained=False), {"last-2": spec})
        data = [torch.randn(3, 5, D) for _ in range(2)]
        ka.convert_attention(encoder(trained=True), {"last": spec}, data, steps=0)


@pytest.mark.parametrize("spec", ["linear", "sparse", "primal_values", "ridge", "softmax"])
def test_a_mechanism_that_does_not_is_silent(spec):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ka.replace_attention(encoder(trained=True), {"all": spec})


@pytest.mark.parametrize(
    ("options", "normalize"),
    [
        ({}, "keys"),
        ({"feature_map": "relu"}, "rows"),
        ({"feature_map": {"taylor": {"order": 2}}}, "rows"),
        ({"readout": "ridge"}, "none"),
        ({"normalize": "output"}, "output"),
    ],
)
def test_primal_values_takes_the_normalisation_that_keeps_the_size_of_the_values(options, normalize):
    model = encoder(trained=False)
    (found,) = ka.replace_attention(model, {0: "primal_values"}, **options)
    assert found.options["normalize"] == normalize
    assert model.layers[0].self_attn.attention.normalize == normalize
    assert ka.create_attention("primal_values", D, HEADS).normalize == "output"  # a layer alone


def test_a_function_behind_the_interface_is_judged_too(transformers):
    config = transformers.Qwen2Config(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=1, intermediate_size=D,
        num_hidden_layers=2, vocab_size=29,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    torch.nn.init.normal_(model.model.norm.weight, 1, 0.1)
    with pytest.warns(UserWarning, match="1 trained layers"):
        ka.replace_attention(model, {-1: {"primal_values": {"normalize": "output"}}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ka.replace_attention(model, {0: "linear"})


def test_an_older_file_without_the_option_keeps_its_function(transformers, tmp_path):
    config = transformers.BertConfig(
        hidden_size=D, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=D, vocab_size=29
    )
    model = transformers.BertModel(config)
    ka.replace_attention(model, {0: "primal_values"})
    (spec,) = model.config.kernel_attention["BertModel"].values()
    assert spec["primal_values"].pop("normalize") == "keys"
    model.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path)
    assert again.encoder.layer[0].attention.self.attention.normalize == "output"
