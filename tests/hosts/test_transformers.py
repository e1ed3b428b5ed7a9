"""Hugging Face models, built from a configuration with random weights."""

import pytest
import torch
from hosts.models_of_hosts import BATCH, EMBED_DIM, HEADS, LENGTH, largest_difference, real_tokens, scatter

import kernel_attention as ka

TEXT = {
    "hidden_size": EMBED_DIM,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": 17,
    "vocab_size": 50,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DISTIL = {"dim": EMBED_DIM, "n_heads": HEADS, "n_layers": 2, "hidden_dim": 17, "vocab_size": 50}
BART = {
    **{"d_model": EMBED_DIM, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 17 for side in ("encoder", "decoder")},
}
MODELS = {
    "bert": ("Bert", "Model", TEXT),
    "roberta": ("Roberta", "Model", TEXT),
    "electra": ("Electra", "Model", TEXT),
    "distilbert": ("DistilBert", "Model", DISTIL),
    "bert_decoder": ("Bert", "LMHeadModel", {**TEXT, "is_decoder": True}),
    "bart": ("Bart", "Model", BART),
}
IMAGE = {**{key: TEXT[key] for key in list(TEXT)[:4]}, "image_size": 16, "patch_size": 8}


def build(transformers, name="bert", implementation="sdpa", **options):
    family, head, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    torch.manual_seed(0)
    return scatter(
        getattr(transformers, family + head)._from_config(config, attn_implementation=implementation)
    )


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 50, (BATCH, LENGTH)), "attention_mask": real_tokens().long()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_softmax_with_carried_weights_is_the_same_function(transformers, name, implementation):
    """Padding, and in the decoders causality: the two implementations hand masks over in opposite forms."""
    host = build(transformers, name, implementation).eval()
    call = tokens()
    expected, unmasked = host(**call)[0], host(input_ids=call["input_ids"])[0]
    parameters = sum(parameter.numel() for parameter in host.parameters())
    report = ka.replace_attention(host, {"all": "softmax"})
    assert len(report) == (4 if name == "bart" else 2)
    assert not any(record.new or record.dropped for record in report)
    assert sum(parameter.numel() for parameter in host.parameters()) == parameters
    assert largest_difference(host(**call)[0], expected, real_tokens()) < 1e-5
    assert largest_difference(host(input_ids=call["input_ids"])[0], unmasked) < 1e-5


@pytest.mark.parametrize("family", ["ViT", "DeiT", "Dinov2"])
def test_vision_models(transformers, family):
    config = getattr(transformers, f"{family}Config")(**IMAGE)
    host = scatter(getattr(transformers, f"{family}Model")(config)).eval()
    x = torch.randn(3, 3, 16, 16)
    expected = host(x)[0]
    ka.replace_attention(host, {"all": "softmax"})
    assert largest_difference(host(x)[0], expected) < 1e-5


def test_the_two_dimensional_mask_of_flash_attention(transformers):
    model = build(transformers).eval()
    ka.replace_attention(model, {0: "softmax"})
    attention = model.encoder.layer[0].attention.self
    x, real = torch.randn(BATCH, LENGTH, EMBED_DIM), real_tokens()
    expected, weights = attention(x, real[:, None, None, :].expand(-1, 1, LENGTH, -1))
    assert weights is None
    for mask in (real, real.long(), real.float()):
        assert torch.equal(attention(x, mask)[0], expected)
    with pytest.raises(ka.InputError, match="1 for a real token"):
        attention(x, torch.zeros(BATCH, LENGTH).masked_fill(~real, -torch.inf))


def test_the_models_longest_sequence_reaches_the_layer(transformers):
    model = build(transformers)
    (record,) = ka.replace_attention(model, {-1: "primal"}, rank=3)
    assert record.options == {"bias": True, "max_len": 40, "rank": 3}
    vit = transformers.ViTModel(transformers.ViTConfig(**IMAGE))
    ka.replace_attention(vit, {0: {"primal": {"rank": 3}}, 1: "conv2d"})
    assert vit.layers[0].attention.attention.max_len == 5, "patches and the class token"
    assert vit(torch.randn(3, 3, 16, 16))[0].isfinite().all()


def test_replacing_again_starts_from_the_layer_that_is_there(transformers):
    model = build(transformers, attention_probs_dropout_prob=0.3).eval()
    call = tokens()
    expected = model(**call)[0]
    ka.replace_attention(model, {0: "softmax"})
    (record,) = ka.replace_attention(model, {0: "symmetric"})
    assert (record.old, record.path) == ("SoftmaxAttention", "encoder.layer.0.attention.self")
    assert record.dropped == ("k_proj.weight", "k_proj.bias")
    assert record.options["dropout"] == 0.3
    ka.replace_attention(model, {0: "primal"}, rank=3)
    assert ka.replace_attention(model, {0: "softmax"})[0].options["dropout"] == 0.3
    assert model(**call)[0].shape == expected.shape


def test_other_masks_and_caches_are_refused(transformers):
    model = build(transformers, "bert_decoder").eval()
    ka.replace_attention(model, {0: "softmax"})
    call = tokens()
    with pytest.raises(ka.InputError, match="use_cache=False"):
        model(**call, use_cache=True)
    band = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(-1).tril()
    with pytest.raises(ka.InputError, match="neither padding nor causal"):
        model(input_ids=call["input_ids"], attention_mask=band)


OPT = {
    **{"hidden_size": EMBED_DIM, "word_embed_proj_dim": EMBED_DIM, "ffn_dim": 17, "vocab_size": 50},
    **{"num_attention_heads": HEADS, "num_hidden_layers": 2, "max_position_embeddings": 40},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("OPTForCausalLM", OPT), ("BartForConditionalGeneration", {**BART, "max_position_embeddings": 40})],
)
def test_a_decoder_generates_what_its_host_generates(transformers, family, sizes):
    """The key-value cache goes from both configurations, so that a plain ``generate`` works."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family.partition('For')[0]}Config")(**sizes)
    model = scatter(getattr(transformers, family)(config)).eval()
    tokens = torch.randint(3, 50, (BATCH, 5))
    call = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens, **call)
    ka.replace_attention(model, {"all": "softmax"})
    assert (model.generate(tokens, **call) == expected).all()
    ka.replace_attention(model, {"all": "primal"}, rank=3)
    assert model.generate(tokens, **call).shape == expected.shape


@pytest.mark.parametrize("name", ["bart", "bert_decoder"])
def test_a_causal_host_gives_the_layer_its_longest_sequence(transformers, name):
    """Causal data-dependent attention needs ``max_len``; BART says it in its configuration alone."""
    model = build(transformers, name).eval()
    report = ka.replace_attention(model, {"all": "primal"}, rank=3)
    assert {record.options["max_len"] for record in report} == {model.config.max_position_embeddings}
    text = tokens()["input_ids"]
    changed = text.clone()
    changed[:, 7:] = 3

    def decoded(target):
        return model(input_ids=text, decoder_input_ids=target) if name == "bart" else model(input_ids=target)

    assert largest_difference(decoded(changed)[0][:, :7], decoded(text)[0][:, :7]) < 1e-5


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("tensor", "'tensor' cannot be a layer of a causal model"),
        ({"primal": {"max_len": None}}, "'primal' cannot be a layer of a causal model: max_len=None"),
    ],
)
def test_a_layer_without_a_causal_form_is_refused_before_anything_changes(transformers, attention, message):
    model = build(transformers, "bart")
    before = str(model)
    with pytest.raises(ka.InputError, match=message):
        ka.replace_attention(model, {"all": attention})
    assert str(model) == before


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        (
            "ImageGPT",
            {"n_embd": 16, "n_head": 2, "n_layer": 1},
            "ImageGPTAttention keeps its projections in Conv1D",
        ),
        ("T5", {"d_model": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}, "T5Attention uses relative pos"),
        ("Deberta", {"relative_attention": True}, "DisentangledSelfAttention uses relative positions"),
        ("DebertaV2", {"relative_attention": True}, "DisentangledSelfAttention uses relative positions"),
        ("Bloom", {"hidden_size": 16, "n_head": 2, "n_layer": 1}, "BloomAttention uses linear position bias"),
    ],
)
def test_a_host_that_is_not_served_yet_is_refused_with_the_reason(transformers, family, options, reason):
    sizes = {**TEXT, "hidden_size": 16, "pad_token_id": 0, "sep_token_id": 2}
    config = getattr(transformers, f"{family}Config")(
        **(options if family in ("ImageGPT", "Bloom") else {**sizes, **options})
    )
    config.vocab_size = 50
    model = getattr(transformers, f"{family}Model")(config)
    with pytest.raises(ka.InputError, match=f"{family}Model holds no attention .*: {reason}") as error:
        ka.replace_attention(model, {0: "softmax"})
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_compiled_model_has_one_graph_for_every_length(transformers):
    """Two at most, because the first length is compiled as a number. A text with sizes in it broke graphs."""
    model = build(transformers).eval()
    ka.replace_attention(model, {"last": {"primal": {"rank": 3}}})
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    for length in (11, 13, 17):
        real = torch.arange(length) < torch.tensor([11, 7, 2, 1, 10])[:, None]
        compiled(input_ids=torch.randint(3, 50, (BATCH, length)), attention_mask=real.long())
    assert counters["stats"]["unique_graphs"] <= 2
    assert not counters["graph_break"]


@pytest.mark.slow
def test_an_exported_model_takes_every_length(transformers):
    """Sequences longer and shorter than the sampled rows, whose number was tied to the exported length."""
    model = build(transformers).eval()
    ka.replace_attention(model, {"last": {"primal": {"rank": 3, "rank_multiplier": 2}}})
    length = torch.export.Dim("length", min=3, max=40)
    shapes = {"input_ids": {1: length}, "attention_mask": {1: length}}
    exported = torch.export.export(model, (), tokens(), dynamic_shapes=shapes).module()
    for count in (4, 17):
        real = torch.arange(count) < torch.tensor([4, 2, 1, 3, 4])[:, None] * count // 4
        call = {"input_ids": torch.randint(3, 50, (BATCH, count)), "attention_mask": real.long()}
        assert largest_difference(exported(**call)[0], model(**call)[0], real) < 1e-5


XGLM = {"d_model": EMBED_DIM, "ffn_dim": 17, "num_layers": 2, "attention_heads": HEADS}
SPEECH = {"d_model": EMBED_DIM, "decoder_layers": 2, "decoder_attention_heads": HEADS, "decoder_ffn_dim": 17}
LED = {
    "attention_window": 4,
    **BART,
    "max_encoder_position_embeddings": 64,
    "max_decoder_position_embeddings": 64,
}
GIT = {
    **TEXT,
    "vision_config": {**{key: TEXT[key] for key in list(TEXT)[:4]}, "image_size": 16, "patch_size": 8},
}
TOKENS = {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
# Each has other words for a decoder: on the attention, in the configuration, in both, or nowhere (GIT).
DECODERS = {
    "XGLMForCausalLM": {**XGLM, **TOKENS},
    "TrOCRForCausalLM": {**SPEECH, **TOKENS},
    "RemBertForCausalLM": {**TEXT, "is_decoder": True, "input_embedding_size": 8, "output_embedding_size": 8},
    "MegatronBertForCausalLM": {**TEXT, "is_decoder": True},
    "BigBirdForCausalLM": {**TEXT, "is_decoder": True, "attention_type": "original_full"},
    "BertLMHeadModel": {**TEXT, "is_decoder": True},
    "GitForCausalLM": GIT,
    "LEDForConditionalGeneration": {**LED, "attention_window": 4},
}


def decoder(transformers, name):
    family = name.partition("For")[0].removesuffix("LMHeadModel")
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**DECODERS[name]))
    return scatter(model).eval()


@pytest.mark.parametrize("name", DECODERS)
def test_any_of_its_words_makes_a_decoder(transformers, name):
    """The plain call and ``generate`` work, a mechanism that cannot be causal is refused, nothing leaks."""
    model, prompt = decoder(transformers, name), torch.randint(3, 50, (3, 5))
    call = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected, scores = model.generate(prompt, **call), model(input_ids=prompt)[0]
    places = {"all" if name.startswith(("XGLM", "TrOCR")) else "last": "softmax"}
    with pytest.raises(ka.InputError, match="'tensor' cannot be a layer of a causal model"):
        ka.replace_attention(model, {key: {"tensor": {"max_len": 64}} for key in places})
    (record, *_) = ka.replace_attention(model, places)
    assert record.differs is None
    assert model.config.use_cache is False
    assert model.generation_config.use_cache in (False, None)
    assert largest_difference(model(input_ids=prompt)[0], scores) < 1e-5
    assert torch.equal(model.generate(prompt, **call), expected)


def test_an_encoder_beside_a_decoder_keeps_the_decoders_cache(transformers):
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**BART, max_position_embeddings=40)
    )
    ka.replace_attention(model, {0: "tensor"}, bias=True)
    assert model.config.use_cache is True


def test_a_host_is_called_by_position_as_its_signature_says(transformers):
    """YOSO hands ``output_attentions`` on by position, Swin v2 two masks and a flag."""
    config = transformers.YosoConfig(**{**TEXT, "max_position_embeddings": 40}, use_expectation=True)
    model, text = transformers.YosoModel(config).eval(), torch.randint(3, 50, (3, LENGTH))
    (record, *_) = ka.replace_attention(model, {"all": "softmax"})
    assert record.differs is not None
    assert model(input_ids=text)[0].isfinite().all()
    sizes = {"image_size": 16, "patch_size": 2, "window_size": 4, "depths": [2], "num_heads": [2]}
    swin = transformers.Swinv2Model(transformers.Swinv2Config(**sizes, embed_dim=12)).eval()
    ka.replace_attention(swin, {0: "softmax"})
    assert swin(torch.randn(2, 3, 16, 16))[0].isfinite().all()
    ka.replace_attention(swin, {1: "softmax"})
    with pytest.raises(ka.InputError, match=r"attention_mask has shape \(4, 16, 16\), expected"):
        swin(torch.randn(2, 3, 16, 16))


def test_a_host_without_one_hidden_size(transformers):
    """SegFormer has a width for every stage, and in the first ones fewer keys than queries."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    )  # fmt: skip
    model, images = scatter(transformers.SegformerModel(config)).eval(), torch.randn(2, 3, 16, 16)
    expected = model(images)[0]
    ka.replace_attention(model, {"all": "softmax"})
    assert largest_difference(model(images)[0], expected) < 1e-5
    ka.replace_attention(model, {1: "batch_norm"})
    assert model(images)[0].isfinite().all()
    ka.replace_attention(model, {0: "batch_norm"})
    with pytest.raises(ka.InputError, match="64 queries and 16 keys: 'batch_norm' needs as many"):
        model(images)


POOLED = {"SiglipVisionModel": "SiglipVisionConfig", "Siglip2VisionModel": "Siglip2VisionConfig"}


@pytest.mark.parametrize("name", POOLED)
def test_a_pooling_head_is_no_self_attention(transformers, name):
    sizes = {key: TEXT[key] for key in list(TEXT)[:4]} | {"patch_size": 8}
    sizes |= {"num_patches": 4} if "2" in name else {"image_size": 16}
    model = getattr(transformers, name)(getattr(transformers, POOLED[name])(**sizes)).eval()
    assert [record.layer for record in ka.replace_attention(model, {"all": "softmax"})] == [0, 1]
    (record,) = ka.replace_attention(model, {"last": "primal"}, rank=3)
    assert (record.layer, record.path) == (1, "encoder.layers.1.self_attn")
    if name == "SiglipVisionModel":
        images = torch.randn(3, 3, 16, 16)
        expected = model(images).pooler_output
        (record,) = ka.replace_attention(model, {"head.attention": "softmax"})
        assert record.layer is None
        assert largest_difference(model(images).pooler_output, expected) < 1e-5


MASKS = {
    "a row": torch.zeros(1, 1, 1, LENGTH),
    "padding": torch.zeros(BATCH, 1, 1, LENGTH).masked_fill(~real_tokens()[:, None, None], -torch.inf),
    "all pairs": torch.zeros(1, 1, LENGTH, LENGTH),
    "bool": torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool),
    "causal": torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril(),
    "none": None,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_the_mask_of_a_causal_host_decides_alone(transformers, family, implementation, mask):
    """``is_causal`` of a host counts where it receives no mask and its implementation reads it."""
    if implementation == "eager" and mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    x = torch.randn(BATCH, LENGTH, EMBED_DIM)
    if family == "Bert":
        model = build(transformers, "bert_decoder", implementation).eval()
        call = (model.encoder if hasattr(model, "encoder") else model.bert.encoder).layer[0].attention
        options = {}
    else:
        config = transformers.LlamaConfig(**{**TEXT, "num_attention_heads": 1})
        model = transformers.LlamaModel._from_config(config, attn_implementation=implementation)
        model = scatter(model).eval()
        call = model.layers[0].self_attn
        options = {"position_embeddings": model.rotary_emb(x, torch.arange(LENGTH)[None])}
    expected = call(x, attention_mask=mask, **options)[0]
    ka.replace_attention(model, {0: "softmax"})
    call = call if family == "Bert" else model.layers[0].self_attn
    real = real_tokens() if mask is MASKS["padding"] else None
    assert largest_difference(call(x, attention_mask=mask, **options)[0], expected, real) < 1e-5
