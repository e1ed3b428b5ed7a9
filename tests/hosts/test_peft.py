"""LoRA by peft: what it adds to our layers is computed with, trained and merged, and never lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kernel_attention as ka
from kernel_attention.models import SequenceClassifier

peft = pytest.importorskip("peft", reason="peft is not installed")


def adapt(model: nn.Module, *targets: str) -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    ("attention", "targets"),
    [
        ("softmax", ["q_proj", "v_proj"]),
        ({"primal": {"rank": 5, "eta": 0.1}}, ["q_proj", "k_proj", "concat"]),
        ({"multilinear": {"rank": 3}}, ["q_proj", "f_proj", "concat"]),
        ({"scaled_heads": {"factors": [1, 2]}}, ["q_proj", "v_proj"]),
    ],
    ids=str,
)
def test_lora_is_trained_and_merged(attention, targets):
    model = SequenceClassifier(
        in_features=3, num_outputs=5, max_len=300, attention=attention, embed_dim=14, num_heads=2,
        num_layers=1, feedforward_dim=11,
    )  # fmt: skip
    x = torch.randn(2, 300, 3)  # at this length primal and multilinear layers have forms that read weights
    before = model.eval()(x)
    adapted = adapt(model, *targets)
    (adapted.train()(x).square().sum() + ka.auxiliary_loss(adapted)).backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in trained.values())
    y = adapted.eval()(x)
    assert not torch.allclose(y, before)
    torch.testing.assert_close(adapted.merge_and_unload().eval()(x), y)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["self_attn.out_proj"], r"MultiheadAttention: out_proj is a peft.*Linear, .* merge the adapters"),
        (["self_attn"], "peft.*MultiheadAttention adapts a MultiheadAttention: .* merge the adapters"),
    ],
    ids=str,
)
def test_adapted_projections_are_not_carried(targets, message):
    layer = nn.TransformerEncoderLayer(14, 2, 11, batch_first=True)
    model = adapt(nn.TransformerEncoder(layer, 2), *targets)
    with pytest.raises(ka.InputError, match=message):
        ka.replace_attention(model, {"last": "linear"})
    merged = model.merge_and_unload()
    x = torch.randn(2, 5, 14)
    y = merged.train(False)(x)
    ka.replace_attention(merged, {"all": "softmax"})
    torch.testing.assert_close(merged(x), y)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # in peft
@pytest.mark.parametrize("targets", [["query", "value"], ["attention.output.dense"]], ids=str)
def test_adapters_work_behind_the_interface_of_transformers(targets):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        hidden_size=14, num_hidden_layers=2, num_attention_heads=2, intermediate_size=11, vocab_size=13
    )
    model = adapt(transformers.BertModel(config), *targets).eval()
    ids = torch.randint(13, (2, 5))
    y = model(input_ids=ids)[0]
    ka.replace_attention(model, {"all": "softmax"})
    torch.testing.assert_close(model(input_ids=ids)[0], y)
    with pytest.raises(
        ka.InputError, match=r"Nor can the whole layer be replaced: (query|output\.dense) is a peft"
    ):
        ka.replace_attention(model, {"all": "primal"})


def own_language_model(kind: str = "CausalLM") -> nn.Module:
    hosts = pytest.importorskip("kernel_attention.hosts.hugging_face", exc_type=ImportError)
    torch.manual_seed(0)
    sizes = {"embed_dim": 14, "num_heads": 2, "num_layers": 2, "feedforward_dim": 11, "dropout": 0.0}
    # As many places as tokens: peft finds the table of embeddings, not that of the positions.
    config = hosts.KernelAttentionConfig("linear", vocabulary_size=31, max_len=31, num_labels=5, **sizes)
    return getattr(hosts, f"KernelAttentionFor{kind}")(config)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # in peft
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # peft leaves those of generate out
@pytest.mark.parametrize("method", ["PromptTuningConfig", "PromptEncoderConfig"])
@pytest.mark.parametrize("kind", ["CausalLM", "SequenceClassification"])
def test_a_prompt_is_learnt_in_front_of_a_frozen_model(kind, method):
    """Its loss falls, the model stays as it was, and generation reads the prompt."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = own_language_model(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task = "CAUSAL_LM" if kind == "CausalLM" else "SEQ_CLS"
    adapted = peft.get_peft_model(model, getattr(peft, method)(task_type=task, num_virtual_tokens=3))
    ids, mask = torch.randint(31, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    call = {"input_ids": ids, "attention_mask": mask}
    labels = ids if kind == "CausalLM" else torch.tensor([0, 3])
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = adapted(**call, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in adapted.base_model.state_dict().items())
    if kind == "CausalLM":
        found = adapted.eval().generate(**call, max_new_tokens=3, do_sample=False)
        for _ in range(3):
            with torch.no_grad():
                following = adapted(**call, use_cache=False).logits[:, -1:].argmax(-1)
            call = {
                "input_ids": torch.cat([call["input_ids"], following], dim=1),
                "attention_mask": torch.cat([call["attention_mask"], torch.ones_like(following)], dim=1),
            }
        assert torch.equal(found, call["input_ids"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # in peft
def test_prefix_tuning_is_refused():
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(own_language_model(), config)
    with pytest.raises(ka.InputError, match="past_key_values is a DynamicCache"):
        adapted(input_ids=torch.randint(31, (2, 7)))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # in peft
def test_the_head_is_trained_beside_lora_where_it_is_named():
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], modules_to_save=["head"])
    adapted = peft.get_peft_model(own_language_model("SequenceClassification"), config)
    adapted(input_ids=torch.randint(31, (2, 7)), labels=torch.tensor([0, 3])).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert any(".head." in name and name.endswith("weight") for name in trained)
