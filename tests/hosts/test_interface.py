"""Mechanisms behind the attention interface of transformers: grouped keys, rotary positions, caches."""

import copy

import pytest
import torch
from hosts.models_of_hosts import BATCH, LENGTH, largest_difference, real_tokens, scatter

import kernel_attention as ka

# 6 heads of width 10 in 2 groups, in a model of width 18: the heads together are wider than the model.
SIZES = {
    "hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10,
    "intermediate_size": 17, "num_hidden_layers": 2, "vocab_size": 50, "max_position_embeddings": 40,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "n_embd": 20, "n_head": 4, "n_layer": 2, "n_positions": 40, "vocab_size": 50,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
DECODERS = {"Llama": SIZES, "Qwen2": SIZES, "Qwen3": SIZES, "Mistral": SIZES, "GPT2": GPT2}
PLAIN = {**SIZES, "hidden_size": 20, "num_attention_heads": 2}
PLAIN = {key: value for key, value in PLAIN.items() if key not in ("num_key_value_heads", "head_dim")}
ENCODERS = {
    "ModernBert": {**PLAIN, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 64},
    "Albert": {**PLAIN, "embedding_size": 8},
}
TAKE_HEADS = {
    "softmax", "symmetric", "linear", "cosine", "sparse", "batch_norm", "scaled_heads",
    "batch_norm_scaled_heads", "primal_values", "ridge", "rpc", "scaled",
}  # fmt: skip


def build(transformers, family="Llama", implementation="sdpa"):
    sizes = {**DECODERS, **ENCODERS}[family]
    if family == "GPT2":
        config = transformers.GPT2Config(**sizes)
    else:
        config = getattr(transformers, f"{family}Config")(**sizes)
    kind = "Model" if family in ENCODERS else "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)._from_config(config, attn_implementation=implementation)
    return scatter(model).eval()


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 50, (BATCH, LENGTH)), "attention_mask": real_tokens().long()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_softmax_is_the_same_function(transformers, family, implementation):
    model, call = build(transformers, family, implementation), tokens()
    expected, unmasked = model(**call)[0], model(input_ids=call["input_ids"])[0]
    names = set(model.state_dict())
    report = ka.replace_attention(model, {"all": "softmax"})
    assert len(report) == (1 if family == "Albert" else 2)
    assert not any(record.new or record.carried or record.dropped for record in report)
    assert set(model.state_dict()) == names
    assert largest_difference(model(**call)[0], expected, real_tokens()) < 1e-5
    assert largest_difference(model(input_ids=call["input_ids"])[0], unmasked) < 1e-5


@pytest.mark.parametrize("family", DECODERS)
def test_softmax_generates_with_the_hosts_cache_what_the_host_generates(transformers, family):
    model = build(transformers, family)
    call = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "use_cache": True}
    left = {"input_ids": torch.randint(3, 50, (3, 5)), "attention_mask": torch.ones(3, 5, dtype=torch.long)}
    left["attention_mask"][1, :3] = 0
    expected = model.generate(**left, **call)
    ka.replace_attention(model, {"all": "softmax"})
    seen = []
    model.register_forward_hook(
        lambda _, __, options, ___: seen.append(options["input_ids"].size(1)), with_kwargs=True
    )
    assert torch.equal(model.generate(**left, **call), expected)
    assert seen == [5, *[1] * 6], "one token at a time"


def test_linear_attention_generates_from_the_cache_what_it_computes_without(transformers):
    model = build(transformers)
    ka.replace_attention(model, {"all": "linear"})
    text = torch.randint(3, 50, (3, 5))
    call = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    assert torch.equal(
        model.generate(text, use_cache=True, **call), model.generate(text, use_cache=False, **call)
    )


@pytest.mark.parametrize("name", sorted(TAKE_HEADS))
def test_a_mechanism_trains_a_step_and_reads_no_later_token(transformers, name):
    model, call = build(transformers, "Qwen2"), tokens()
    (record,) = ka.replace_attention(
        model, {"last": name}, **({"eta": 0.1} if name == "primal_values" else {})
    )
    before = copy.deepcopy(model.state_dict())
    model.train()
    loss = model(**call, labels=call["input_ids"]).loss + ka.auxiliary_loss(model)
    loss.backward()
    new = [f"{record.path}.kernel_attention.attention.{part}" for part in record.new]
    assert all(model.get_parameter(part).grad is not None for part in new)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(not torch.equal(model.get_parameter(part), before[part]) for part in new)
    model.eval()
    changed = call["input_ids"].clone()
    changed[:, 7:] = 3
    with torch.no_grad():
        outputs = [model(input_ids=text, use_cache=False).logits for text in (call["input_ids"], changed)]
    assert largest_difference(outputs[0][:, :7], outputs[1][:, :7]) < 1e-5


def test_every_mechanism_takes_heads_or_is_refused_with_its_name(transformers):
    for mechanism in ka.list_attention():
        model = build(transformers)
        before = str(model)
        if mechanism.name in TAKE_HEADS:
            ka.replace_attention(model, {"all": mechanism.name})
        else:
            options = {"max_len": 40} if "max_len" in mechanism.options else {}
            with pytest.raises(ka.InputError, match=f"'{mechanism.name}' cannot") as error:
                ka.replace_attention(model, {"all": {mechanism.name: {**mechanism.example, **options}}})
            assert "\n" not in str(error.value)
            assert str(model) == before


def test_symmetric_attention_takes_every_query_head_for_its_own_keys(transformers):
    """The host's keys are not read, so any give the same."""
    for name in ("symmetric", "rpc"):
        model, call = build(transformers), tokens()
        ka.replace_attention(model, {"all": name})
        expected = model(**call, use_cache=False).logits
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight.normal_()
        assert torch.equal(model(**call, use_cache=False).logits, expected)


def test_a_mechanism_that_cannot_use_the_cache_says_so_and_generates_without(transformers):
    model = build(transformers)
    ka.replace_attention(model, {"all": "batch_norm"})
    text = torch.randint(3, 50, (2, 5))
    assert model.generate(text, max_new_tokens=3, min_new_tokens=3).shape == (2, 8)
    cache = model(text, use_cache=True).past_key_values
    with pytest.raises(ka.InputError, match=r"'batch_norm' needs what a cache .* use_cache=False"):
        model(text[:, :1], past_key_values=cache)


def test_a_sliding_window_is_served_as_long_as_it_hides_nothing(transformers):
    config = transformers.MistralConfig(**SIZES, sliding_window=6)
    model = transformers.MistralForCausalLM(config).eval()
    text = torch.randint(3, 50, (2, 11))
    expected = model(text[:, :6]).logits
    ka.replace_attention(model, {"all": "softmax"})
    assert largest_difference(model(text[:, :6]).logits, expected) < 1e-5
    with pytest.raises(ka.InputError, match="neither padding nor causal"):
        model(text)


def test_a_replaced_model_is_saved_and_loaded(transformers, tmp_path):
    import kernel_attention.hosts.hugging_face  # noqa: F401

    model, call = build(transformers), tokens()
    ka.replace_attention(model, {"first": {"batch_norm": {"learn_beta": True}}, "last": "softmax"})
    with torch.no_grad():
        model.model.layers[0].self_attn.kernel_attention.attention.beta.fill_(0.3)
    model.save_pretrained(tmp_path)
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(same(**call, use_cache=False).logits, model(**call, use_cache=False).logits)
    for other in (copy.deepcopy(model), model):
        report = ka.replace_attention(other, {0: "linear"})
        assert (report[0].old, report[0].dropped) == ("SupportVectorAttention", ("beta",))


@pytest.mark.parametrize("family", ["Llama", "GPT2", "ModernBert"])
def test_an_implementation_of_our_names_is_that_mechanism_with_the_files_weights(
    transformers, tmp_path, family
):
    import kernel_attention.hosts.hugging_face  # noqa: F401

    model, call = build(transformers, family), tokens()
    model.save_pretrained(tmp_path / "plain")
    loaded = type(model).from_pretrained(tmp_path / "plain", attn_implementation="linear").eval()
    ka.replace_attention(model, {"all": "linear"})
    assert torch.equal(loaded(**call)[0], model(**call)[0])
    loaded.save_pretrained(tmp_path / "ours")
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(**call)[0], model(**call)[0])


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("Bert", "softmax", r"BertSelfAttention would get weights of other names .*replace_attention\(model"),
        (
            "Llama",
            "primal",
            "layers: 'primal' cannot take the queries, keys and values that LlamaAttention makes",
        ),
    ],
)
def test_an_implementation_that_cannot_be_served_is_refused_in_one_line(transformers, family, name, reason):
    import kernel_attention.hosts.hugging_face  # noqa: F401

    config = getattr(transformers, f"{family}Config")(**(SIZES if family == "Llama" else PLAIN))
    with pytest.raises(ka.InputError, match=f"attn_implementation='{name}': {reason}") as error:
        transformers.AutoModel.from_config(config, attn_implementation=name)
    assert "\n" not in str(error.value)


def test_heads_that_the_host_does_not_state_are_refused(transformers):
    """JetMoE makes queries for every expert; a configuration may state another number of heads."""
    sizes = {"hidden_size": 16, "num_key_value_heads": 2, "kv_channels": 6, "intermediate_size": 17}
    sizes |= {"num_hidden_layers": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "vocab_size": 50}
    model = scatter(transformers.JetMoeModel(transformers.JetMoeConfig(**sizes))).eval()
    text = torch.randint(3, 50, (2, 7))
    expected = model(text)[0]
    other = copy.deepcopy(model)
    other.layers[0].self_attention.num_heads = 2
    ka.replace_attention(model, {"all": "softmax"})
    assert largest_difference(model(text)[0], expected) < 1e-5
    ka.replace_attention(other, {"all": "softmax"})
    with pytest.raises(ka.InputError, match="4 heads of queries and 4 of keys, expected the 2 that the host"):
        other(text)
