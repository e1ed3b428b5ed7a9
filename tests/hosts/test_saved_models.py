"""Hugging Face models with replaced layers: saved, loaded by ``from_pretrained``, trained by ``Trainer``."""

import contextlib
import copy
import json
import subprocess
import sys

import pytest
import torch
from hosts.models_of_hosts import BATCH, EMBED_DIM, LENGTH, SEQUENCE_MECHANISMS, real_tokens, small_options
from hosts.test_transformers import BART, IMAGE, OPT, TEXT, build, tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernel_attention as ka
from kernel_attention.core.calls import this_book

PRIMAL = {"last": {"primal": {"rank": 3, "eta": 0.1}}}
# The features of Taylor's series are tables that no file of weights holds.
TAYLOR = {"all": {"linear": {"feature_map": {"taylor": {"order": 2}}}}}
TEXTS = {"input_ids": torch.randint(3, 50, (BATCH, LENGTH)), "attention_mask": real_tokens().long()}
IMAGES = {"pixel_values": torch.randn(3, 3, 16, 16)}


@pytest.fixture(autouse=True)
def _quiet(transformers, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(
    ("family", "head", "sizes", "layers", "inputs"),
    [
        ("Bert", "ForSequenceClassification", TEXT, PRIMAL, TEXTS),
        ("Bert", "Model", TEXT, TAYLOR, TEXTS),
        ("Bart", "Model", {**BART, "max_position_embeddings": 40}, {0: "softmax", -1: "linear"}, TEXTS),
        ("OPT", "ForCausalLM", OPT, {"all": {"primal": {"rank": 3}}}, TEXTS),
        ("ViT", "ForImageClassification", IMAGE, {0: {"rpc": {"iterations": 2}}, -1: "conv2d"}, IMAGES),
    ],
)
def test_a_replaced_model_is_loaded_as_it_was_saved(
    transformers, tmp_path, family, head, sizes, layers, inputs
):
    kind = getattr(transformers, family + head)
    model = kind(getattr(transformers, f"{family}Config")(**sizes)).eval()
    ka.replace_attention(model, layers)
    expected = model(**inputs)[0]
    model.save_pretrained(tmp_path / "first")
    loaded, report = kind.from_pretrained(tmp_path / "first", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded(**inputs)[0], expected)
    assert loaded.config._attn_implementation == "sdpa", "the layers that stayed have their own attention"
    loaded.save_pretrained(tmp_path / "second")
    assert torch.equal(kind.from_pretrained(tmp_path / "second")(**inputs)[0], expected)


def test_the_body_of_a_replaced_model_is_loaded_into_another_head(transformers, tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)).eval()
    ka.replace_attention(model.bert, PRIMAL)
    model.save_pretrained(tmp_path)
    for kind in (transformers.AutoModel, transformers.BertForTokenClassification):
        loaded = kind.from_pretrained(tmp_path)
        body = getattr(loaded, "bert", loaded)
        assert torch.equal(body(**TEXTS)[0], model.bert(**TEXTS)[0])


FRESH = """
import sys, torch, transformers
folder = sys.argv[1]
try:
    transformers.AutoModel.from_pretrained(folder)
except ValueError as error:
    assert 'attn_implementation="kernel_attention.hosts.hugging_face"' in str(error), error
else:
    sys.exit("loaded without the module that knows the layers")
import kernel_attention.hosts.hugging_face
call, expected = torch.load(folder + "/expected.pt", weights_only=True)
loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
assert torch.equal(loaded(**call).logits, expected)
"""


def test_a_fresh_process_loads_it_or_says_what_to_import(transformers, tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)).eval()
    ka.replace_attention(model, PRIMAL)
    model.save_pretrained(tmp_path)
    torch.save((TEXTS, model(**TEXTS).logits.detach()), tmp_path / "expected.pt")
    done = subprocess.run([sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_made_again_is_refused_with_the_reason(transformers, tmp_path):
    part = build(transformers)
    ka.replace_attention(part.encoder, PRIMAL)
    part.save_pretrained(tmp_path / "part")
    with pytest.raises(ka.InputError, match="called on a part of the model, BertEncoder"):
        transformers.BertModel.from_pretrained(tmp_path / "part")
    whole = build(transformers)
    ka.replace_attention(whole, PRIMAL)
    whole.save_pretrained(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    config["kernel_attention"] = {"RobertaModel": config["kernel_attention"]["BertModel"]}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ka.InputError, match="the attention of RobertaModel was replaced"):
        transformers.BertModel.from_pretrained(tmp_path / "whole")


def _classifier(transformers, eta=0.1):
    torch.manual_seed(0)
    config = transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    ka.replace_attention(model, {"last": {"primal": {"rank": 3, "eta": eta}}})
    return model


def test_loss_includes_the_auxiliary_loss_once(transformers):
    model, labels = _classifier(transformers).train(), torch.arange(BATCH) % 2
    torch.manual_seed(1)
    loss = model(**TEXTS, labels=labels).loss
    assert torch.equal(loss + ka.auxiliary_loss(model), loss)
    torch.manual_seed(1)
    logits = model(**TEXTS).logits
    apart = torch.nn.functional.cross_entropy(logits, labels) + ka.auxiliary_loss(model)
    assert ka.auxiliary_loss(model) > 0, "without labels there is no loss that could hold it"
    assert torch.equal(loss, apart)
    torch.manual_seed(1)
    assert torch.equal(model(**TEXTS, labels=labels, return_dict=False)[0], loss)
    model.eval()
    held_out = torch.nn.functional.cross_entropy(model(**TEXTS).logits, labels)
    assert torch.equal(model(**TEXTS, labels=labels).loss, held_out)


def test_loss_includes_every_call_of_a_shared_layer(transformers):
    """ALBERT calls one layer four times."""
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        **TEXT | {"num_hidden_layers": 4}, embedding_size=8, num_hidden_groups=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.AlbertForSequenceClassification(config).train()
    ka.replace_attention(model, {"all": {"primal_values": {"rank": 3, "eta": 0.3}}})
    labels = torch.arange(BATCH) % 2
    with ka.collect_objectives() as around:
        loss = model(**TEXTS, labels=labels).loss
    assert around.total() == 0, "the loss has them"
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with ka.collect_objectives() as objectives:
        logits = model(**TEXTS).logits
    assert len(objectives.calls) == 4
    apart = torch.nn.functional.cross_entropy(logits, labels) + objectives.total()
    torch.testing.assert_close(loss, apart)
    apart.backward()
    torch.testing.assert_close([p.grad for p in model.parameters() if p.grad is not None], found)


def test_a_forward_that_ends_with_an_error_leaves_no_collector(transformers):
    model = _classifier(transformers).train()
    with pytest.raises(RuntimeError):
        model(input_ids=torch.randint(3, 50, (2, 4000)))  # more positions than there are
    labels = torch.arange(BATCH) % 2
    loss = model(**TEXTS, labels=labels).loss
    assert loss > torch.nn.functional.cross_entropy(model(**TEXTS).logits, labels)
    with ka.collect_objectives() as objectives:
        model(**TEXTS)
    assert len(objectives.calls) == 1
    assert not this_book().lists


class Cases(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, 50, (count, LENGTH), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": int(self.tokens[index, 0]) % 2}


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_plain_trainer_trains_the_objective(transformers, tmp_path, accumulated):
    """One step of gradient descent: Trainer's weights are those of the loss plus the mean of eta J^2."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = _classifier(transformers, eta=3.0)
    twin = copy.deepcopy(model)
    cases, size = Cases(6), 6 // accumulated
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulated, max_steps=1,
        learning_rate=0.5, lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=cases)
    order = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    torch.manual_seed(0)
    trainer.train()
    twin.train()
    objective = 0.0
    for part in order:
        labels = part[:, 0] % 2
        loss = torch.nn.functional.cross_entropy(twin(input_ids=part).logits, labels)
        penalty = ka.auxiliary_loss(twin)
        objective += penalty.item() / accumulated
        # BERT's classifier leaves the division of its own loss to nobody, whatever the trainer counts.
        (loss + penalty / accumulated).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
    assert objective > 1e-3
    for (name, trained), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_fine_tuned_model_is_saved_and_loaded(transformers, tmp_path):
    """Primal in BERT's last layer, trained by Trainer on a rule, saved by it, loaded: the same logits."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = _classifier(transformers)
    arguments = transformers.TrainingArguments(
        tmp_path / "run", per_device_train_batch_size=4, max_steps=6, learning_rate=1e-3, use_cpu=True,
        report_to=[], save_steps=6, disable_tqdm=True, logging_steps=1, seed=0,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Cases(16))
    trainer.train()
    model.eval()
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert torch.equal(loaded(**tokens()).logits.isfinite(), torch.ones(BATCH, 2, dtype=torch.bool))
    assert torch.equal(loaded(**TEXTS).logits, model(**TEXTS).logits)
    assert loaded.bert.encoder.layer[-1].attention.self.embed_dim == EMBED_DIM


def _own(state):
    return [name for name in state if ".attention.self.attention." in name]


@pytest.mark.parametrize("mechanism", SEQUENCE_MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_weights_that_a_file_lacks_are_drawn_as_in_a_new_layer(
    transformers, tmp_path, monkeypatch, mechanism
):
    """Memory that nobody writes is NaN here. What the file holds stays as it is."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = build(transformers)
    ka.replace_attention(model, {"last": {mechanism.name: small_options(mechanism)}})
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    held = _own(state)[0]
    kept = {name: value for name, value in state.items() if name == held or name not in _own(state)}
    safetensors.save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *inputs, **options: _poisoned(empty(*inputs, **options)))
    loaded, report = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == state.keys() - kept.keys()
    monkeypatch.undo()
    new = loaded.state_dict()
    assert torch.equal(new[held], state[held])
    for name in _own(state)[1:]:
        assert new[name].isfinite().all(), name
        assert new[name].abs().max() < 50, name
        assert new[name].any() or "bias" in name or not state[name].any(), name
    assert loaded(**TEXTS)[0].isfinite().all()


def _poisoned(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() and not tensor.is_meta else tensor


@pytest.mark.parametrize("name", ["batch_norm", "primal_values", "scaled", "linear"])
def test_weights_between_a_hosts_projections_are_drawn_too(transformers, tmp_path, monkeypatch, name):
    from hosts.test_interface import build as build_decoder

    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    options = {"batch_norm": {"learn_beta": True}}.get(name, {})
    model = build_decoder(transformers)
    ka.replace_attention(model, {"last": {name: options}})
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    kept = {key: value for key, value in state.items() if "kernel_attention" not in key}
    safetensors.save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *inputs, **options: _poisoned(empty(*inputs, **options)))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    monkeypatch.undo()
    assert all(value.isfinite().all() for value in loaded.state_dict().values())


def test_the_hosts_own_weights_in_a_recorded_architecture(transformers, tmp_path):
    """Weights of other shapes are drawn too, where the caller lets them."""
    model = build(transformers)
    model.save_pretrained(tmp_path / "plain")
    ka.replace_attention(model, PRIMAL)
    loaded = transformers.BertModel.from_pretrained(tmp_path / "plain", config=model.config).eval()
    assert loaded(**TEXTS)[0].abs().max() < 100
    model.save_pretrained(tmp_path / "replaced")
    config = json.loads((tmp_path / "replaced" / "config.json").read_text())
    config["kernel_attention"]["BertModel"]["encoder.layer.1.attention.self"]["primal"]["rank"] = 4
    (tmp_path / "replaced" / "config.json").write_text(json.dumps(config))
    other = transformers.BertModel.from_pretrained(tmp_path / "replaced", ignore_mismatched_sizes=True).eval()
    assert other.encoder.layer[1].attention.self.attention.w_e.abs().max() < 5
    assert other(**TEXTS)[0].abs().max() < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("aB.", max_size=3) | st.floats(0, 1),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["BertModel", "primal"]), inner)
    ),
    max_leaves=4,
)


@given(trace=JSON, depth=st.integers(0, 3))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_trace_is_refused_in_one_line(transformers, trace, depth):
    """Any JSON in the place of the trace, of its classes, of its layers or of a mechanism."""
    for key in ("BertModel", "encoder.layer.1.attention.self", "primal")[:depth][::-1]:
        trace = {key: trace}
    config = transformers.BertConfig(**TEXT, kernel_attention=trace)
    with contextlib.suppress(ka.InputError):
        transformers.BertModel(config)


@pytest.mark.parametrize(
    "trace", [None, "text", 3, [], {"BertModel": None}, {"BertModel": {"encoder": "primal"}}]
)
def test_a_trace_of_another_kind_is_refused_by_name(transformers, tmp_path, trace):
    model = build(transformers)
    ka.replace_attention(model, PRIMAL)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "kernel_attention": trace}))
    with pytest.raises(ka.InputError, match=r"kernel_attention=.* is not \{class: \{path"):
        transformers.AutoModel.from_pretrained(tmp_path)
