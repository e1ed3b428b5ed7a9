"""Small data with something to learn, and estimators small enough to fit in a fraction of a second."""

from __future__ import annotations

import numpy as np
import pytest

import kernel_attention as ka

SMALL = {
    "attention_options": {"rank": 3, "rank_multiplier": 2, "eta": 0.1},
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "feedforward_dim": 16,
    "epochs": 2,
    "learning_rate": 0.01,
    "random_state": 0,
    "closed_form": False,  # the members alone; test_closed_form.py has both
    "n_estimators": 1,
    "calibrate": False,
    "accelerator": "cpu",
}


@pytest.fixture
def small():
    """The arguments of a small estimator, to be changed by the test."""
    return dict(SMALL)


@pytest.fixture(params=["AttentionClassifier", "AttentionRegressor"])
def estimator(request):
    # Imported only here: collecting tests needs none of the extras.
    return getattr(ka, request.param)(**SMALL)


@pytest.fixture
def arrays():
    """X (23, 3, 7), labels and values that its first channel decides."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(23, 3, 7))
    values = X[:, 0].mean(axis=1) * 5 + 100
    return X, np.where(values > np.median(values), "up", "down"), values


@pytest.fixture
def ragged(arrays):
    """The same cases as a list of (3, n_i), n_i from 4 to 7; only the third has full length."""
    X, labels, values = arrays
    return [case[:, : 7 if index == 2 else 4 + index % 3] for index, case in enumerate(X)], labels, values
