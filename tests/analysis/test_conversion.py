"""A converted model: exact where the new attention can be the old one, and bit-equal outside of it."""

from __future__ import annotations

import copy

import pytest
import torch

import kernel_attention as ka

BATCHES, B, N, D, HEADS = 9, 17, 7, 12, 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def torch_encoder(layers: int = 2) -> torch.nn.TransformerEncoder:
    layer = torch.nn.TransformerEncoderLayer(D, HEADS, 2 * D, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def tensors() -> list[torch.Tensor]:
    return [torch.randn(B, N, D) for _ in range(BATCHES)]


def bert(transformers, **options):
    config = transformers.BertConfig(
        hidden_size=D, num_hidden_layers=3, num_attention_heads=HEADS, intermediate_size=2 * D,
        vocab_size=29, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **options,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False)
    with torch.no_grad():  # attention that is far from the mean of the values
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.mul_(30)
            layer.attention.self.key.weight.mul_(30)
            layer.attention.self.value.weight.mul_(20)
            layer.attention.output.dense.weight.mul_(20)
    return model


def tokens(count: int = BATCHES) -> list[dict[str, torch.Tensor]]:
    batches = []
    for index in range(count):
        ids = torch.randint(29, (B, N))
        mask = torch.ones_like(ids)
        mask[0, N - 1 - index % 3 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def test_softmax_to_softmax_changes_nothing():
    model, data = torch_encoder(), tensors()
    model.eval()
    before = model(data[0])
    report = ka.convert_attention(model, {"all": "softmax"}, data, steps=0)
    torch.testing.assert_close(model(data[0]), before)
    assert [layer.carried_error < 1e-10 for layer in report.layers] == [True, True]
    assert report.error < 1e-10
    assert report.cosine == pytest.approx(1)


def test_a_random_start_is_brought_back_by_the_transfer():
    model = torch_encoder(1)
    report = ka.convert_attention(
        model, {0: "softmax"}, [torch.randn(31, N, D) for _ in range(9)], start="random", steps=400,
        learning_rate=0.02,
    )  # fmt: skip
    (layer,) = report.layers
    assert layer.start_error > 0.5
    assert layer.error < 0.1 * layer.start_error


@pytest.mark.parametrize(
    "spec",
    [
        "linear",
        "primal",
        pytest.param("sparse", marks=pytest.mark.slow),
        pytest.param({"linear": {"feature_map": "hedgehog"}}, marks=pytest.mark.slow),
    ],
)
def test_a_bert_keeps_more_of_itself_than_by_replacement(transformers, spec):
    model = bert(transformers).train()
    report = ka.convert_attention(model, {"last-2": spec}, tokens(), steps=80, learning_rate=5e-3)
    assert [layer.path for layer in report.layers] == [f"encoder.layer.{i}.attention.self" for i in (1, 2)]
    assert all(layer.error <= layer.carried_error for layer in report.layers)
    if spec != "sparse":  # which differs from softmax by little
        assert report.error < report.carried_error
    assert report.finished
    assert "encoder.layer.2.attention.self" in str(report)
    assert all(module.training for module in model.modules())


def test_everything_outside_the_layers_is_bit_equal(transformers):
    model = bert(transformers)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ka.convert_attention(model, {1: "linear"}, tokens(), steps=5, end_to_end=3)
    after = model.state_dict()
    layer = "encoder.layer.1.attention."
    outside = [name for name in before if not name.startswith((f"{layer}self", f"{layer}output.dense"))]
    assert set(outside) == {name for name in after if not name.startswith(f"{layer}self")}
    assert all(torch.equal(before[name], after[name]) for name in outside)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_a_seed_decides_the_weights_and_nothing_else_is_drawn():
    found = []
    data = tensors()
    original = torch_encoder().state_dict()
    for _ in range(2):
        model = torch_encoder()
        model.load_state_dict(original)
        torch.manual_seed(len(found))
        state = torch.get_rng_state()
        ka.convert_attention(model, {"all": {"primal_values": {"rank": 2}}}, data, steps=3, seed=7)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_function_behind_the_interface_is_converted(transformers):
    config = transformers.Qwen2Config(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=1, intermediate_size=D,
        num_hidden_layers=2, vocab_size=29,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    data = [{"input_ids": torch.randint(29, (B, N))} for _ in range(4)]
    with torch.no_grad():
        for projection in "qkv":
            getattr(model.model.layers[1].self_attn, f"{projection}_proj").weight.mul_(30)
    before = [weight.clone() for weight in model.model.layers[0].parameters()]
    report = ka.convert_attention(model, {1: "linear"}, data, steps=30)
    assert report.layers[0].error < report.layers[0].carried_error
    assert all(map(torch.equal, before, model.model.layers[0].parameters()))


def test_progress_time_and_memory_are_bounded():
    stages = []
    model, data = torch_encoder(), tensors()
    report = ka.convert_attention(
        model, {"all": "linear"}, data, max_bytes=1, time_limit=1e-9, on_progress=stages.append
    )
    assert report.num_batches == 1  # the batch that exceeds the limit ends the reading
    assert [layer.steps for layer in report.layers] == [0, 0]
    assert not report.finished
    assert [stage.stage for stage in stages] == ["record", "layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "data holds no batch"),
        (torch.randn(B, N, D), {}, "data is a Tensor, expected an iterable of batches"),
        ([torch.randn(B, N, D + 1)], {}, "data: TransformerEncoder cannot read a batch"),
        ([3], {}, "data: a batch is a int"),
        (tensors(), {"start": "best"}, "unknown start 'best'"),
        (tensors(), {"steps": -1}, "steps=-1 must be"),
        (tensors(), {"time_limit": 0}, "time_limit=0 must be"),
        (tensors(), {"rnak": 3}, "rnak"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(data, options, message):
    model = torch_encoder()
    with pytest.raises(ka.InputError, match=message) as error:
        ka.convert_attention(model, {"all": "primal_values"}, data, **options)
    assert "\n" not in str(error.value)
    assert isinstance(model.layers[0].self_attn, torch.nn.MultiheadAttention)
    assert all(module.training for module in model.modules())


def test_a_converted_layer_is_refused():
    model = torch_encoder()
    ka.convert_attention(model, {0: "linear"}, tensors(), steps=1)
    with pytest.raises(ka.InputError, match=r"layers\.0\.self_attn holds 'linear' already"):
        ka.convert_attention(model, {0: "primal"}, tensors())


def test_auto_converts_the_layers_that_cost_least_and_leaves_the_others(transformers):
    model, data = bert(transformers), tokens()
    original = copy.deepcopy(model)
    loose = ka.convert_attention(copy.deepcopy(model), {"all": "linear"}, data, steps=5)
    report = ka.convert_attention(model, {"auto": "linear"}, data, steps=5, tolerance=loose.error * 0.99)
    chosen = [layer.is_converted for layer in report.layers]
    assert any(chosen)
    assert not all(chosen)
    assert report.error <= loose.error * 0.99
    costs = [layer.cost for layer in report.layers]
    assert chosen[costs.index(min(costs))]
    for layer, old, is_converted in zip(model.encoder.layer, original.encoder.layer, chosen, strict=True):
        assert isinstance(layer.attention.self, type(old.attention.self)) != is_converted
    assert "left as it was" in str(report)
    # What the hooks measured is what the converted model does.
    assert report.error == pytest.approx(converted_error(original, model, data[-1]), rel=1e-3)


def converted_error(old, new, batch):
    with torch.no_grad():
        y, wanted = (m.eval()(**batch).last_hidden_state[batch["attention_mask"] > 0] for m in (new, old))
    return float((y - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_report_says_what_a_layer_costs_and_where_it_pays(batch_first):
    layer = torch.nn.TransformerEncoderLayer(D, HEADS, 2 * D, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    data = tensors() if batch_first else [x.transpose(0, 1) for x in tensors()]
    report = ka.convert_attention(model, "auto", data, steps=2, tolerance=0, lengths=(16, 64))
    assert not report.replaced
    assert report.finished
    assert report.error == 0
    assert report.neighbours == 1
    (prices,) = report.prices
    assert list(prices.before) == list(prices.after) == [16, 64]
    assert prices.after[64].peak_bytes > 64 * D * 4
    assert prices.pays_from in (None, 16, 64)
    assert "64 tokens: " in str(report)


def test_an_interrupted_conversion_goes_on(tmp_path):
    torch.manual_seed(0)
    model, data, file = torch_encoder(3), tensors(), tmp_path / "kept.pt"
    settings = {"steps": 4, "checkpoint": file, "lengths": ()}

    def interrupt(progress):
        if progress.stage == "layers.1.self_attn":
            raise KeyboardInterrupt

    straight, broken = copy.deepcopy(model), copy.deepcopy(model)
    ka.convert_attention(straight, {"all": "linear"}, data, steps=4, lengths=())
    with pytest.raises(KeyboardInterrupt):
        ka.convert_attention(broken, {"all": "linear"}, data, on_progress=interrupt, **settings)
    held = torch.load(file, weights_only=True)["layers"]
    assert list(held) == ["layers.0.self_attn", "layers.1.self_attn"]
    report = ka.convert_attention(model, {"all": "linear"}, data, **settings)
    assert [layer.steps for layer in report.layers] == [4, 4, 4]
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    for other in ({"steps": 5}, {"seed": 1}):
        with pytest.raises(ka.InputError, match=f"conversion with other {next(iter(other))}"):
            ka.convert_attention(torch_encoder(3), {"all": "linear"}, data, **{**settings, **other})
    file.write_bytes(b"something else")
    with pytest.raises(ka.InputError, match="not a file of a conversion"):
        ka.convert_attention(torch_encoder(3), {"all": "linear"}, data, **settings)


def test_tokens_of_another_vocabulary_are_named(transformers):
    batch = {"input_ids": torch.tensor([[1, 29]])}
    with pytest.raises(ka.InputError, match="data: token 29 is none of the 29 in the vocabulary of BertM"):
        ka.convert_attention(bert(transformers), {"all": "linear"}, [batch])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({7: "linear"}, "7"),
        ({"layers.9": "linear"}, "layers.9"),
        ({"auto": "linear", 0: "primal"}, "'auto' chooses among all layers"),
        ({"all": "conv1d_"}, "conv1d_"),
        ("all", "layers='all' must be a mapping"),
    ],
)
def test_layers_that_are_not_there_are_named(layers, message):
    with pytest.raises(ka.InputError, match=message) as error:
        ka.convert_attention(torch_encoder(), layers, tensors())
    assert "\n" not in str(error.value)


def test_a_mechanism_that_cannot_is_refused(transformers):
    config = transformers.Qwen2Config(
        hidden_size=D, num_attention_heads=HEADS, num_key_value_heads=1, intermediate_size=D,
        num_hidden_layers=1, vocab_size=29,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    with pytest.raises(ka.InputError, match="'conv1d' cannot take the queries, keys and values"):
        ka.convert_attention(model, {0: "conv1d"}, [{"input_ids": torch.ones(1, 5).long()}])


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
def test_a_converted_model_takes_lora_and_full_fine_tuning(transformers):
    peft = pytest.importorskip("peft")
    model, data = bert(transformers), tokens(3)
    ka.convert_attention(model, {"last": "linear"}, data, steps=2, lengths=())
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    target = torch.randn(B, N, D)
    for tuned in (peft.get_peft_model(copy.deepcopy(model), config), model):
        weights = {name: weight for name, weight in tuned.named_parameters() if weight.requires_grad}
        before = {name: weight.clone() for name, weight in weights.items() if "self.attention" in name}
        (tuned(**data[0]).last_hidden_state - target).square().sum().backward()
        torch.optim.SGD(weights.values(), lr=0.1).step()
        assert len(before) >= 4
        # No softmax, so a bias of the keys counts too.
        assert not [name for name, weight in before.items() if torch.equal(weight, weights[name])]


def test_a_causal_decoder_is_converted_saved_and_generates(transformers, tmp_path):
    config = transformers.OPTConfig(
        hidden_size=D, num_attention_heads=HEADS, ffn_dim=D, num_hidden_layers=2, vocab_size=29,
        word_embed_proj_dim=D, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, data = transformers.OPTForCausalLM(config), tokens(3)
    report = ka.convert_attention(model.model, {"all": "linear"}, data, steps=2, lengths=(8,))
    assert len(report.layers) == 2
    model.save_pretrained(tmp_path)
    again = transformers.OPTForCausalLM.from_pretrained(tmp_path)
    prompt = data[0]["input_ids"][:2, :3]
    model.generation_config.use_cache = again.generation_config.use_cache = False
    torch.testing.assert_close(model.eval()(prompt).logits, again.eval()(prompt).logits)
    longer = prompt.clone()
    longer[:, -1] = 5
    torch.testing.assert_close(again(prompt).logits[:, :2], again(longer).logits[:, :2])
    assert again.generate(prompt, max_new_tokens=2, do_sample=False).shape == (2, 5)


def test_the_forecast_is_the_tail_of_the_singular_values():
    layer = ka.SoftmaxAttention(D, HEADS)
    with torch.no_grad():
        layer.q_proj.weight.mul_(9)
    x = torch.randn(4, N, D)
    found = ka.forecast_conversion(layer, [x], ranks=(2, N))
    (forecast,) = found.layers
    values = torch.linalg.svdvals(layer.kernel_matrix(x).double()).square()
    expected = (values[..., 2:].sum(-1) / values.sum(-1)).mean(0).sqrt()
    torch.testing.assert_close(forecast.matrix_errors[0], expected, rtol=1e-4, atol=1e-6)
    assert forecast.matrix_errors[1].max() < 1e-6  # no attention of N tokens has a higher rank
    assert forecast.losses[0] > 0
    assert forecast.losses[1] < 1e-10
    assert found.picture().shape == (1, 2, HEADS)
    assert (found.num_sequences, found.num_tokens) == (4, 4 * N)
    assert forecast.constant_loss == pytest.approx(1)  # the model is this layer


def test_a_head_that_looks_at_one_token_is_named():
    layer = ka.SoftmaxAttention(D, 1)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            torch.nn.init.eye_(projection.weight).mul_(20)
    found = ka.forecast_conversion(layer, [torch.randn(3, N, D)])
    assert found.layers[0].looks_at == ("itself",)
    assert "head 0 itself" in str(found)


def test_a_forecast_reads_padded_batches_of_any_host(transformers):
    model = bert(transformers).train()
    found = ka.forecast_conversion(model, tokens(2), ranks=(1, 3), max_sequences=20)
    assert len(found.layers) == 3
    assert found.num_sequences == 20
    assert all((layer.losses[0] >= layer.losses[1]) for layer in found.layers)
    assert all(0 < layer.constant_loss < 10 for layer in found.layers)
    assert model.training
    with pytest.raises(ka.InputError, match="data holds no batch"):
        ka.forecast_conversion(model, [])
