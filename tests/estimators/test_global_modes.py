"""States of PyTorch that a caller has set do not reach into an estimator: it answers as without them."""

import contextlib

import numpy as np
import pytest
import torch

from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.training.modes import default_dtype


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: default_device("meta"),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


def answers(estimator, X):
    """What every method of a fitted estimator gives."""
    yield estimator.predict(X)
    yield estimator.transform(X)
    yield estimator.feature_importance(X[:1], nodes=4)
    if isinstance(estimator, AttentionClassifier):
        yield estimator.predict_proba(X)
        yield estimator.predict_log_proba(X)
        yield estimator.decision_function(X)
    else:
        yield estimator.predict_interval(X, 0.5)


def same(found, expected):
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


# The next test fits under the others.
LONG = {"float64", "bfloat16", "inference"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in MODES]
)
def test_an_estimator_is_the_same_in_every_mode(name, small, arrays, tmp_path):
    X, mode = arrays[0], MODES[name]
    is_rocket = name in ("float64", "meta", "inference")
    kind, stem = (AttentionClassifier, "rocket") if is_rocket else (AttentionRegressor, "linear")
    y = arrays[1] if kind is AttentionClassifier else arrays[2]
    options = small | {
        "stem": stem,
        "calibrate": True,
        "readout": stem == "rocket",
        "augmentation": ["jitter"],
    }
    outside = kind(**options).fit(X, y)
    expected = list(answers(outside, X))
    with mode():
        assert same(answers(outside, X), expected)
        inside = kind(**options).fit(X, y)
        assert same(answers(inside, X), expected)
        inside.save(tmp_path / "inside")
        loaded = kind.load(tmp_path / "inside")
        assert same(answers(loaded, X), expected)
    assert same(answers(inside, X), expected)
    assert all(value.dtype == torch.float32 for value in inside.model_.parameters())
    assert not any(value.is_inference() for value in inside.model_.state_dict().values())
    inside.set_params(warm_start=True, callbacks=lambda rows: True).fit(X, y)
    loaded.set_params(warm_start=True).fit(X, y)


@pytest.mark.parametrize("attention", ["primal", "primal_values", "multilinear", "rpc"])
def test_a_mechanism_is_fitted_and_answers_under_another_default(attention, small, arrays):
    X, y = arrays[0][:8], np.arange(8) % 2
    options = small | {"attention_options": None, "epochs": 1, "stem": "linear"}
    outside = AttentionClassifier(attention, **options).fit(X, y)
    expected = outside.predict_proba(X)
    for name in LONG:
        with MODES[name]():
            assert (outside.predict_proba(X) == expected).all(), name
            inside = AttentionClassifier(attention, **options).fit(X, y)
            assert (inside.predict_proba(X) == expected).all(), name


def test_the_modes_of_the_caller_are_left_as_they_were(mode, small, arrays):
    def states():
        device = torch.get_default_device()
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        return torch.get_default_dtype(), device, grad

    with mode():
        before = states()
        AttentionClassifier(**small).fit(arrays[0], arrays[1]).feature_importance(arrays[0][:1], nodes=2)
        assert states() == before
        with pytest.raises(ValueError, match="one class"):
            AttentionClassifier(**small).fit(arrays[0], np.zeros(23))
        assert states() == before
