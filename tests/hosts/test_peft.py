"""LoRA by peft on our layers: what it adds is computed with, trained and merged."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.models import SequenceClassifier

peft = pytest.importorskip("peft", reason="peft is not installed")


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
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    (adapted.train()(x).square().sum() + ka.auxiliary_loss(adapted)).backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * len(targets)
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in trained.values())
    y = adapted.eval()(x)
    assert not torch.allclose(y, before)
    torch.testing.assert_close(adapted.merge_and_unload().eval()(x), y)
