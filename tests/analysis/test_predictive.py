"""The predictive distribution: its identities, and the models that it serves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import kernel_attention as ka
from kernel_attention.analysis.predictive import _distribution


def sequence_model(attention):
    return ka.models.SequenceClassifier(
        in_features=3, num_outputs=4, max_len=7, embed_dim=8, num_heads=2, num_layers=2, feedforward_dim=8,
        dropout=0.1, attention=attention,
    )  # fmt: skip


def test_samples_that_agree_have_no_mutual_information_and_certain_ones_that_differ_nothing_else():
    same = _distribution(torch.randn(1, 5, 3).expand(4, -1, -1))
    assert same.mutual_information.abs().max() < 1e-12
    sure = _distribution(torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]]))
    torch.testing.assert_close(sure.entropy, torch.full((1,), math.log(2), dtype=torch.float64))
    torch.testing.assert_close(sure.mutual_information, sure.entropy)


@pytest.mark.parametrize("attention", ["kernel_gp", "sgpa"])
def test_our_models_sample_and_keep_their_modes(attention):
    model, x = sequence_model(["softmax", attention]).train(), torch.randn(5, 7, 3)
    modes = [module.training for module in model.modules()]
    found = ka.predict_distribution(model, x, samples=6)
    assert [module.training for module in model.modules()] == modes
    assert found.probabilities.shape == (5, 4)
    assert found.entropy.shape == found.mutual_information.shape == (5,)
    assert found.samples.shape == (6, 5, 4)
    assert found.mutual_information.min() > 0
    torch.testing.assert_close(found.samples.mean(0), found.probabilities)
    model.eval()
    torch.testing.assert_close(model(x), model(x))  # evaluation is the mean again


def test_a_model_without_samples_is_refused_unless_its_dropout_samples():
    model, x = sequence_model("softmax"), torch.randn(5, 7, 3)
    with pytest.raises(ka.InputError, match="nothing in the model samples"):
        ka.predict_distribution(model, x)
    assert ka.predict_distribution(model, x, dropout=True).mutual_information.max() > 0
    with pytest.raises(ka.InputError, match="nothing in the model samples"):
        ka.predict_distribution(nn.Linear(3, 2), x, dropout=True)
    with pytest.raises(ka.InputError, match="fitted AttentionClassifier"):
        ka.predict_distribution(object(), x)


def test_replaced_models_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=8,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    ka.replace_attention(model, {-1: "kernel_gp"})
    x = {"input_ids": torch.randint(20, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    found = ka.predict_distribution(model, x, samples=3)
    assert found.probabilities.shape == (2, 3)
    assert found.mutual_information.min() > 0


def test_members_of_a_classifier_are_samples_and_sampling_members_give_several():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(24, 2, 9)), np.arange(24) % 2
    sizes = {
        "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feedforward_dim": 8, "epochs": 1, "stem": "linear",
        "n_estimators": 2, "random_state": 0,
    }  # fmt: skip
    plain = ka.AttentionClassifier("softmax", **sizes).fit(x, y)
    found = ka.predict_distribution(plain, x, samples=3)
    assert found.samples.shape == (2, 24, 2)
    logits = plain.sampled_logits(x).mean(0)
    np.testing.assert_allclose(logits.double().softmax(-1).numpy(), plain.predict_proba(x), rtol=1e-5)
    sampled = ka.AttentionClassifier({"kernel_gp": {"rank": 2, "eta": 0.1}}, **sizes).fit(x, y)
    assert ka.predict_distribution(sampled, x, samples=3).samples.shape == (6, 24, 2)
