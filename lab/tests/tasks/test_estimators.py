"""Estimators and runs are one way of training."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention import AttentionClassifier


def test_a_model_is_the_one_of_a_run_with_the_same_seed(tmp_path):
    """The estimator adds conventions, not another way of training: same seed, same weights as ``train``."""
    from aeon.datasets import load_japanese_vowels

    from kernel_attention_lab.runs import train
    from kernel_attention_lab.runs.saved import load_run
    from kernel_attention_lab.tasks import Recipe

    shared = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "feedforward_dim": 16, "epochs": 2}
    shared |= {"validation_fraction": 0.25, "batch_size": 32, "accelerator": "cpu"}
    X, y = load_japanese_vowels(split="train")
    shared |= {"label_smoothing": 0.1, "schedule": "cosine", "augmentation": ["jitter", "window"]}
    shared |= {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.01, "patch_len": 2}
    shared |= {"short_convolution": 3}
    shared |= {"stem": "convolution", "positions": "fixed", "pooling": "mean_max", "views": ["raw"]}
    train(Recipe("JapaneseVowels", seeds=[3], **shared), tmp_path / "run", progress=False)
    single = {"n_estimators": 1, "calibrate": False, "warmup": 0.0}
    classifier = AttentionClassifier(max_len=29, random_state=3, **single, **shared).fit(X, y)
    expected = load_run(tmp_path / "run").model().state_dict()
    for name, value in classifier.model_.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_recipes_take_names_only():
    from kernel_attention_lab.tasks import Recipe

    with pytest.raises(ka.InputError, match=r"must be a name or \{name: options\}"):
        Recipe("JapaneseVowels", attention=ka.SoftmaxAttention)
