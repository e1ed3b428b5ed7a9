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
