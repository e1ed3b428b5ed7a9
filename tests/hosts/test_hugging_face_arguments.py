"""Arguments of transformers' calls: our models do what they say, or refuse them by name."""

from __future__ import annotations

import pytest
import torch
from hosts.test_hugging_face import BATCH, KINDS, LENGTH, VOCABULARY, build, inputs_of
from hosts.test_hugging_face import hugging_face as hugging_face
from models.test_causal import CAUSAL

import kernel_attention as ka

TEXTS = ("CausalLM", "SequenceClassification")


def logits_of(model, values, **more):
    with torch.no_grad():
        return model(**values, **more).logits


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_that_a_model_does_not_read_is_refused_by_name(hugging_face, kind):
    """None asks for nothing, nor does a switch that is off."""
    model, inputs = build(hugging_face, kind), inputs_of(kind)
    expected = logits_of(model, inputs)
    switches = ["output_attentions", "output_router_logits", "return_loss", "use_mems"]
    for name in ["head_mask", "encoder_hidden_states", "bool_masked_pos", *switches]:
        for value in (True, 2, torch.ones(BATCH, LENGTH)):
            with pytest.raises(ka.InputError, match=rf"KernelAttentionFor{kind}: {name} is "):
                model(**inputs, **{name: value})
        for nothing in [None, False] if name in switches else [None]:
            assert torch.equal(logits_of(model, inputs, **{name: nothing}), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_misspelt_argument_is_refused_whatever_its_value(hugging_face, kind):
    model, inputs = build(hugging_face, kind), inputs_of(kind)
    for value in (False, 0, torch.zeros(2)):
        with pytest.raises(ka.InputError, match=r"atention_mask is .* no such argument"):
            model(**inputs, atention_mask=value)
    model.config.output_attentions = True  # None means the configuration's value
    with pytest.raises(ka.InputError, match="output_attentions is True"):
        model(**inputs)


def test_what_the_model_does_anyway_may_be_said(hugging_face):
    for kind, is_causal in (("CausalLM", True), ("SequenceClassification", False)):
        model, inputs = build(hugging_face, kind), inputs_of(kind)
        same = {"is_causal": is_causal, "token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)}
        assert torch.equal(logits_of(model, inputs, **same), logits_of(model, inputs))
        with pytest.raises(ka.InputError, match="is_causal is "):
            model(**inputs, is_causal=not is_causal)


@pytest.mark.parametrize("kind", TEXTS)
def test_embedded_tokens_are_read_as_their_numbers_are(hugging_face, kind):
    model, inputs = build(hugging_face, kind), inputs_of(kind)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    output = model(inputs_embeds=embedded, attention_mask=mask)
    read = mask.bool() if kind == "CausalLM" else slice(None)
    assert torch.equal(output.logits[read], model(**inputs).logits[read])
    output.logits[read].square().sum().backward()
    assert torch.equal(embedded.grad.abs().sum(-1) > 0, mask.bool())
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ka.InputError, match=r"expected input_ids or inputs_embeds, got (none|both)"):
            model(**wrong)
    with pytest.raises(ka.InputError, match="input_ids has dtype"):
        model(input_ids=embedded)
    with pytest.raises(ka.InputError, match="inputs_embeds has shape"):
        model(inputs_embeds=ids)


def test_generation_starts_from_embedded_tokens(hugging_face):
    model = build(hugging_face, "CausalLM")
    ids, call = inputs_of("CausalLM")["input_ids"], {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **call)
    assert torch.equal(found, model.generate(ids, **call)[:, LENGTH:])


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_inputs_of_the_layers_and_the_last_output(hugging_face, kind):
    model, inputs = build(hugging_face, kind), inputs_of(kind)
    layers = model.model.layers if hasattr(model.model, "layers") else model.model.encoder.layers
    seen = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    output = model(**inputs, output_hidden_states=True)
    assert len(output.hidden_states) == len(layers) + 1
    assert all(torch.equal(one, other) for one, other in zip(output.hidden_states, seen, strict=False))
    last = output.hidden_states[-1]
    if kind == "CausalLM":
        logits = torch.nn.functional.linear(last, model.model.embedding.weight, model.model.output_bias)
    elif kind == "ImageClassification":
        logits = model.model.head(last[:, 0])
    elif kind == "TimeSeriesClassification":
        logits = model.model.head(model.model.pooling(last, inputs["attention_mask"].bool()))
    else:
        real = inputs["attention_mask"].sum(1, keepdim=True)
        logits = model.model.head(last.sum(1) / real)
    torch.testing.assert_close(logits, output.logits)
    assert model(**inputs).hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(**inputs, return_dict=False)[-1]) == len(layers) + 1


def test_hidden_states_with_and_after_a_cache_are_those_without(hugging_face):
    model = build(hugging_face, "CausalLM", attention=["softmax", "rpc"])
    ids = inputs_of("CausalLM")["input_ids"]
    with torch.no_grad():
        whole = model(ids, use_cache=False, output_hidden_states=True).hidden_states
        first = model(ids[:, :6], output_hidden_states=True)
        rest = model(ids[:, 6:], past_key_values=first.past_key_values, output_hidden_states=True)
    for expected, *found in zip(whole, first.hidden_states, rest.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=1), expected)


def test_logits_to_keep_counts_from_the_end_or_names_places(hugging_face):
    model, inputs = build(hugging_face, "CausalLM"), inputs_of("CausalLM")
    whole, places = logits_of(model, inputs), torch.tensor([5, 2, 2])
    assert torch.equal(logits_of(model, inputs, logits_to_keep=places), whole[:, places])
    assert torch.equal(logits_of(model, inputs, logits_to_keep=3), whole[:, -3:])
    assert torch.equal(logits_of(model, inputs, logits_to_keep=None), whole)
    labels = inputs["input_ids"]
    some = model(**inputs, labels=labels, logits_to_keep=2)
    assert torch.equal(some.loss, model(**inputs, labels=labels).loss)
    assert some.logits.shape == (BATCH, 2, VOCABULARY)
    for wrong in (-1, torch.tensor(2), torch.tensor([0.5]), torch.ones(BATCH, LENGTH, dtype=torch.int64)):
        with pytest.raises(ka.InputError, match="logits_to_keep"):
            model(**inputs, logits_to_keep=wrong)


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_positions_may_be_given_where_they_are_the_places_of_the_tokens(hugging_face, side):
    model, inputs = build(hugging_face, "CausalLM"), inputs_of("CausalLM")
    if side == "none":
        del inputs["attention_mask"]
        places = torch.arange(LENGTH)[None]
    else:
        if side == "left":
            inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        mask = inputs["attention_mask"]
        places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    expected = logits_of(model, inputs)
    assert torch.equal(logits_of(model, inputs, position_ids=places), expected)
    with pytest.raises(ka.InputError, match="position_ids does not count"):
        model(**inputs, position_ids=places + 1)
    with pytest.raises(ka.InputError, match="position_ids has shape"):
        model(**inputs, position_ids=places[..., None])
    if side != "right":  # the next token follows the last one
        past = model(**inputs).past_key_values
        call = {"input_ids": torch.zeros(BATCH, 1, dtype=torch.int64), "past_key_values": past}
        following = places[:, -1:] + 1
        assert torch.equal(logits_of(model, call, position_ids=following), logits_of(model, call))
        with pytest.raises(ka.InputError, match="position_ids does not count"):
            model(**call, position_ids=following * 0)
        now = torch.tensor([LENGTH])
        assert torch.equal(logits_of(model, call, cache_position=now), logits_of(model, call))
        with pytest.raises(ka.InputError, match="cache_position does not count"):
            model(**call, cache_position=now - 1)


ENDS = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
PLACES = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None]
NUMBER = (torch.arange(LENGTH) >= 5).int()[None]
PAIRS = (NUMBER[:, None, :] == NUMBER[:, :, None])[:, None]


def test_a_classifier_refuses_packed_texts_in_every_spelling(hugging_face):
    """Positions that begin again, ends or numbers of texts, masks over pairs, other numbers in the mask."""
    kind = "SequenceClassification"
    model, ids = build(hugging_face, kind), inputs_of(kind)["input_ids"][:1]
    for spelling in (
        {"position_ids": PLACES},
        {"cu_seq_lens_q": ENDS},
        {"cu_seq_lens_k": ENDS},
        {"max_length_q": LENGTH - 5},
        {"max_length_k": LENGTH - 5},
        {"seq_idx": NUMBER},
        {"attention_mask": NUMBER + 1},
        {"attention_mask": PAIRS},
        {"attention_mask": torch.where(PAIRS, 0.0, -torch.inf)},
        {"attention_mask": torch.where(NUMBER == 0, 0.0, -torch.inf)},
    ):
        (name,) = spelling
        with pytest.raises(ka.InputError, match=name):
            model(ids, **spelling)


@pytest.mark.parametrize("attention", ["softmax", "primal", "delta"])
def test_a_language_model_reads_packed_texts_as_it_reads_each_alone(hugging_face, attention):
    model = build(hugging_face, "CausalLM", attention=attention).double()
    ids = inputs_of("CausalLM")["input_ids"][:1]
    texts = ids.split([5, LENGTH - 5], dim=1)
    expected = torch.cat([logits_of(model, {"input_ids": text}) for text in texts], dim=1)
    most = {"max_length_q": LENGTH, "max_length_k": LENGTH}
    for spelling in (
        {"position_ids": PLACES},
        {"cu_seq_lens_q": ENDS},
        {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS.clone(), **most, "position_ids": PLACES[0]},
        {"position_ids": PLACES, "seq_idx": NUMBER},
    ):
        torch.testing.assert_close(logits_of(model, {"input_ids": ids}, **spelling), expected)
    rows = {"input_ids": ids.expand(2, -1), "position_ids": PLACES}  # several rows of several texts
    torch.testing.assert_close(logits_of(model, rows), expected.expand(2, -1, -1))
    output = model(ids, position_ids=PLACES, labels=ids, output_hidden_states=True)
    losses = torch.stack([model(text, labels=text).loss for text in texts])
    lengths = torch.tensor([4, LENGTH - 6])
    torch.testing.assert_close(output.loss, (losses * lengths).sum() / lengths.sum())
    assert output.past_key_values is None
    assert all(state.shape[:2] == ids.shape for state in output.hidden_states)


def test_packed_texts_that_contradict_themselves_are_refused(hugging_face):
    model, ids = build(hugging_face, "CausalLM"), inputs_of("CausalLM")["input_ids"][:1]
    for message, spelling in (
        ("cu_seq_lens_k is not cu_seq_lens_q", {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS[[0, 2]]}),
        ("cu_seq_lens_k needs cu_seq_lens_q", {"cu_seq_lens_k": ENDS}),
        ("max_length_q needs cu_seq_lens_q", {"max_length_q": LENGTH}),
        ("max_length_k needs cu_seq_lens_q", {"max_length_k": LENGTH}),
        ("cu_seqlens has a sequence of", {"cu_seq_lens_q": ENDS, "max_length_q": 4}),
        ("seq_idx has other sequences", {"seq_idx": NUMBER}),
        ("seq_idx has other sequences", {"seq_idx": 1 - NUMBER[:, [0] * LENGTH], "position_ids": PLACES}),
        ("position_ids does not count", {"position_ids": PLACES + 1}),
        ("position_ids does not count", {"position_ids": PLACES, "cu_seq_lens_q": ENDS[[0, 2]]}),
        ("position_ids does not count", {"position_ids": PLACES, "attention_mask": torch.ones_like(ids)}),
        ("attention_mask", {"cu_seq_lens_q": ENDS, "attention_mask": torch.ones_like(ids)}),
        ("use_cache=True", {"position_ids": PLACES, "use_cache": True}),
        ("attention_mask", {"attention_mask": NUMBER + 1}),
        ("attention_mask", {"attention_mask": PAIRS}),
        ("attention_mask", {"attention_mask": torch.where(PAIRS, 0.0, -torch.inf)}),
    ):
        with pytest.raises(ka.InputError, match=message):
            model(ids, **spelling)
    past = model(ids, use_cache=True).past_key_values
    with pytest.raises(ka.InputError, match="cu_seq_lens_q is a tensor"):
        model(ids, past_key_values=past, cu_seq_lens_q=ENDS)


def test_the_trainer_takes_a_collator_of_packed_texts(hugging_face, transformers, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    texts = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
    )
    model = build(hugging_face, "CausalLM", attention="softmax", dropout=0.0).train()
    alone = [
        model(torch.tensor([text["input_ids"]]), labels=torch.tensor([text["labels"]])) for text in texts
    ]
    trainer = transformers.Trainer(
        *(model, arguments), train_dataset=texts,
        data_collator=transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True),
    )  # fmt: skip
    found = trainer.train().training_loss
    assert found == pytest.approx((2 * alone[0].loss + alone[1].loss).item() / 3, rel=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "linear", "rpc"])
def test_a_loop_that_passes_the_cache_on_writes_what_generate_writes(hugging_face, attention):
    """It never says use_cache: None means the configuration's value."""
    model = build(hugging_face, "CausalLM", attention=attention)
    prompt, past, tokens, text = inputs_of("CausalLM")["input_ids"], None, None, []
    for _ in range(6):
        output = model(prompt if tokens is None else tokens, past_key_values=past)
        past, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
        text.append(tokens)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(torch.cat(text, dim=1), expected[:, LENGTH:])
    assert model(prompt, use_cache=False).past_key_values is None
    assert model(prompt[:, :1], past_key_values=past, use_cache=False).past_key_values is None
    model.config.use_cache = False
    assert model(prompt).past_key_values is None
    assert model(prompt, use_cache=True).past_key_values is not None
    model.config.use_cache = True
    assert model.train()(prompt).past_key_values is None


def test_a_cache_of_another_model_or_of_other_texts_is_refused(hugging_face, transformers):
    model, ids = build(hugging_face, "CausalLM"), inputs_of("CausalLM")["input_ids"]
    for other in (transformers.DynamicCache(), ((torch.zeros(3, 2, 4, 7),) * 2,) * 2, torch.ones(3, 4)):
        with pytest.raises(ka.InputError, match=f"past_key_values is a {type(other).__name__}"):
            model(ids, past_key_values=other)
    with pytest.raises(ka.InputError, match="past_key_values holds 3 texts, expected 1"):
        model(ids[:1], past_key_values=model(ids).past_key_values)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("attention", [*CAUSAL, {"primal": {"rank": 3, "eta": 0.1}}], ids=str)
def test_a_step_with_a_cache_has_whole_gradients(hugging_face, attention, training):
    """Also where the cache has been continued before the backward pass."""
    model = build(hugging_face, "CausalLM", attention=attention, dropout=0.0).train(training)
    for module in model.modules():
        if hasattr(module, "sample"):
            module.sample = False  # samples of two calls differ by design
    inputs = inputs_of("CausalLM")
    call = {**inputs, "labels": inputs["input_ids"]}
    without = model(**call, use_cache=False)
    expected = gradients_of(model, without.loss)
    output = model(**call, use_cache=True)
    assert torch.equal(output.loss, without.loss)
    cache = output.past_key_values
    with torch.no_grad():
        for _ in range(2):
            cache = model(inputs["input_ids"][:, :1], past_key_values=cache).past_key_values
    found = gradients_of(model, output.loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_tokens_after_a_cache_are_no_hole_in_a_graph(hugging_face):
    model, ids = build(hugging_face, "CausalLM"), inputs_of("CausalLM")["input_ids"]
    past = model(ids).past_key_values
    for count in (1, 3):
        output = model(ids[:, :count], past_key_values=past, output_hidden_states=True)
        for found in (output.logits, *output.hidden_states):
            with pytest.raises(ka.InputError, match="read after a state have no gradients"):
                found.sum().backward(retain_graph=True)
    model.train()
    with pytest.raises(ka.InputError, match=r"past_key_values: .* have no gradients"):
        model(ids[:, :1], past_key_values=past)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=past)


def test_two_names_of_one_size_agree(hugging_face):
    make = hugging_face.KernelAttentionConfig
    config = make(embed_dim=14, hidden_size=14, num_attention_heads=7)
    held = config.to_dict()
    assert (held["hidden_size"], held["num_attention_heads"], held["num_heads"]) == (14, 7, 7)
    assert make.from_dict(held).to_dict() == held
    assert "hidden_size" not in config.to_json_string()
    with pytest.raises(ka.InputError, match="hidden_size=16 and embed_dim=14"):
        make(embed_dim=14, hidden_size=16)
    sized = build(hugging_face, "ImageClassification", num_heads=None, embed_dim=6)
    assert sized.config.num_heads == 3, "the model's own default"
