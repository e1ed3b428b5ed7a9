"""Our models as models of transformers: saved, loaded elsewhere, made to write, trained by Trainer."""

import copy
import subprocess
import sys

import pytest
import torch

import kernel_attention as ka
from kernel_attention.core.decoding import state_bytes
from kernel_attention.models import ShortConvolution, generate

# Different primes, so that a swapped axis cannot pass.
BATCH, LENGTH, VOCABULARY, CHANNELS, CLASSES = 3, 11, 31, 5, 2
SIZES = {
    "embed_dim": 14,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 17,
    "attention": ["softmax", {"primal": {"rank": 3, "eta": 0.1}}],
}
KINDS = {
    "CausalLM": {"vocabulary_size": VOCABULARY, "max_len": 40, "positions": "fixed"},
    "SequenceClassification": {"vocabulary_size": VOCABULARY, "max_len": 13, "num_labels": CLASSES},
    "ImageClassification": {"image_size": [8, 12], "patch_size": 4, "num_labels": CLASSES},
    "TimeSeriesClassification": {"in_features": CHANNELS, "max_len": 13, "num_labels": CLASSES},
}


@pytest.fixture
def hugging_face(transformers, monkeypatch):
    import kernel_attention.hosts.hugging_face as module

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    return module


def build(hugging_face, kind, **changes):
    torch.manual_seed(0)
    config = hugging_face.KernelAttentionConfig(**{**SIZES, **KINDS[kind], **changes})
    model = getattr(hugging_face, f"KernelAttentionFor{kind}")(config).eval()
    for module in model.modules():
        if isinstance(module, ShortConvolution):  # the identity at first
            torch.nn.init.normal_(module.weight)
    return model


def inputs_of(kind):
    generator = torch.Generator().manual_seed(1)
    if kind == "ImageClassification":
        return {"pixel_values": torch.rand(BATCH, 3, 8, 12, generator=generator)}
    real = torch.arange(LENGTH) < torch.tensor([LENGTH, 7, 1])[:, None]
    if kind == "TimeSeriesClassification":
        values = torch.randn(BATCH, LENGTH, CHANNELS, generator=generator)
        return {"past_values": values, "attention_mask": real.long()}
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "attention_mask": real.long()}


FRESH = """
import sys, torch, transformers
import kernel_attention.hosts.hugging_face as own
for kind in sys.argv[2:]:
    loader = getattr(transformers, f"AutoModelFor{kind}", None) or getattr(own, f"KernelAttentionFor{kind}")
    model = loader.from_pretrained(f"{sys.argv[1]}/{kind}")
    inputs, expected = torch.load(f"{sys.argv[1]}/{kind}.pt", weights_only=True)
    assert torch.equal(model(**inputs).logits, expected), kind
"""


@pytest.mark.slow
def test_a_fresh_process_loads_every_kind_with_the_same_logits(hugging_face, tmp_path):
    for kind in KINDS:
        model, inputs = build(hugging_face, kind), inputs_of(kind)
        model.save_pretrained(tmp_path / kind)
        with torch.no_grad():
            torch.save((inputs, model(**inputs).logits), tmp_path / f"{kind}.pt")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path), *KINDS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_our_model(hugging_face, kind):
    model, inputs = build(hugging_face, kind), inputs_of(kind)
    first, *rest = inputs.values()
    found, expected = model(**inputs).logits, model.model(first, *(mask.bool() for mask in rest))
    read = rest[0].bool() if kind == "CausalLM" else slice(None)
    assert torch.equal(found[read], expected[read])
    assert torch.equal(model(**inputs, return_dict=False)[0], model(**inputs).logits)


@pytest.mark.parametrize("attention", ["linear", "softmax", ["rpc", {"primal": {"rank": 3}}]])
def test_it_writes_what_our_own_generation_writes(hugging_face, attention):
    model = build(hugging_face, "CausalLM", attention=attention)
    prompt = inputs_of("CausalLM")["input_ids"]
    expected = torch.stack(list(generate(model.model, prompt, 9)), dim=1)
    call = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(model.generate(prompt, **call)[:, LENGTH:], expected)
    assert torch.equal(model.generate(prompt, use_cache=False, **call)[:, LENGTH:], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_convolution_is_saved_and_loaded(hugging_face, kind, tmp_path):
    model, inputs = build(hugging_face, kind, short_convolution=3), inputs_of(kind)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.short_convolution == 3
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    plain = build(hugging_face, kind)
    plain.load_state_dict(model.state_dict(), strict=False)
    assert not torch.allclose(plain(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("name", [mechanism.name for mechanism in ka.list_attention() if mechanism.causal])
def test_text_is_continued_behind_a_short_convolution_as_without_states(hugging_face, name):
    model = build(hugging_face, "CausalLM", attention=[name, "linear"], short_convolution=4)
    prompt, call = inputs_of("CausalLM")["input_ids"][:, :2], {"max_new_tokens": 6, "do_sample": False}
    found = model.generate(prompt, **call)
    assert torch.equal(found, model.generate(prompt, use_cache=False, **call))


@pytest.mark.parametrize("taps", [0, 4])
def test_prompts_of_different_length_are_continued_as_alone(hugging_face, taps):
    model = build(hugging_face, "CausalLM", short_convolution=taps)
    tokens, call = inputs_of("CausalLM")["input_ids"], {"max_new_tokens": 5, "do_sample": False}
    lengths = (LENGTH, 7, 2)
    padded = torch.full_like(tokens, VOCABULARY + 6)  # a number that no embedding has
    for row, length in enumerate(lengths):
        padded[row, LENGTH - length :] = tokens[row, :length]
    real = (torch.arange(LENGTH).flip(0) < torch.tensor(lengths)[:, None]).long()
    together = model.generate(padded, attention_mask=real, **call)[:, LENGTH:]
    for row, length in enumerate(lengths):
        alone = model.generate(tokens[row : row + 1, :length], **call)[0, length:]
        assert torch.equal(together[row], alone)


@pytest.mark.parametrize("taps", [0, 4])
def test_beams_with_the_states_are_those_without(hugging_face, taps):
    model = build(hugging_face, "CausalLM", attention=["linear", "softmax"], short_convolution=taps)
    prompt = inputs_of("CausalLM")["input_ids"][:2]
    call = {"max_new_tokens": 7, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    assert torch.equal(model.generate(prompt, **call), model.generate(prompt, use_cache=False, **call))


@pytest.mark.parametrize("taps", [0, 4])
def test_the_cache_of_a_recurrent_model_does_not_grow_and_continues_a_text(hugging_face, taps):
    attention = ["linear", {"primal": {"data_dependent": False}}]
    model = build(hugging_face, "CausalLM", attention=attention, short_convolution=taps)
    prompt = inputs_of("CausalLM")["input_ids"]
    call = {"do_sample": False, "return_dict_in_generate": True}
    short, long = (model.generate(prompt, max_new_tokens=count, **call) for count in (4, 9))
    sizes = {state_bytes(output.past_key_values.state) for output in (short, long)}
    assert len(sizes) == 1
    further = model.generate(short.sequences, past_key_values=short.past_key_values, max_new_tokens=5, **call)
    assert torch.equal(further.sequences, long.sequences)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with pytest.raises(ka.InputError, match="tokens after past_key_values cannot be padding"):
        model(prompt[:, :1], attention_mask=mask, past_key_values=long.past_key_values)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_includes_the_auxiliary_loss(hugging_face, kind):
    model, inputs = build(hugging_face, kind, dropout=0.0).train(), inputs_of(kind)
    labels = inputs["input_ids"].clone() if kind == "CausalLM" else torch.tensor([0, 1, 1])
    if kind == "CausalLM":
        labels[inputs["attention_mask"] == 0] = -100
    loss = model(**inputs, labels=labels).loss
    assert ka.auxiliary_loss(model) == 0, "it is in the loss"
    logits = model(**inputs).logits
    penalty = ka.auxiliary_loss(model)
    task = (logits[:, :-1], labels[:, 1:]) if kind == "CausalLM" else (logits, labels)
    expected = torch.nn.functional.cross_entropy(task[0].flatten(0, -2), task[1].flatten()) + penalty
    assert penalty > 0
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_a_new_head_is_drawn_and_the_rest_is_loaded(hugging_face, tmp_path):
    model = build(hugging_face, "SequenceClassification")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, num_labels=7, ignore_mismatched_sizes=True)
    assert loaded.model.head.weight.shape == (7, 14)
    assert 0 < loaded.model.head.weight.abs().max() <= 14**-0.5, "nn.Linear's own start"
    new, old = (
        {name: value for name, value in one.state_dict().items() if "head" not in name}
        for one in (loaded, model)
    )
    assert all(torch.equal(new[name], old[name]) for name in old)


def test_what_a_configuration_lacks_or_says_wrongly_is_named(hugging_face):
    with pytest.raises(ka.InputError, match="KernelAttentionForCausalLM: the configuration has no max_len"):
        build(hugging_face, "CausalLM", max_len=None)
    with pytest.raises(ka.InputError, match="'softmac'"):
        build(hugging_face, "CausalLM", attention="softmac")
    model = build(hugging_face, "CausalLM")
    sizes = {**SIZES, **KINDS["CausalLM"], "num_layers": 1, "attention": "rpc"}
    other = hugging_face.KernelAttentionConfig(**sizes)
    with pytest.raises(ka.InputError, match="the configuration describes another model"):
        type(model).from_model(model.model, other)
    with pytest.raises(ka.InputError, match="the vocabulary of this model cannot change"):
        model.resize_token_embeddings(40)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def test_a_trainer_trains_it_and_its_checkpoint_is_a_model(hugging_face, transformers, tmp_path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = build(hugging_face, "CausalLM", dropout=0.0)
    before = copy.deepcopy(model.state_dict())
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=6,
        learning_rate=0.01, use_cpu=True, report_to=[], save_steps=6, disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts())
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first
    assert not torch.equal(model.model.layers[1].attention.w_e, before["model.layers.1.attention.w_e"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    inputs = inputs_of("CausalLM")
    assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)
