"""Layers that a class or a function makes, warm starts, callbacks, and several targets."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.estimators.ensemble import member_outputs

STILL = {"epochs": 1, "learning_rate": 1e-30, "weight_decay": 0.0, "warmup": 0.0}
"""Training that changes no weight: every step is below the resolution of float32."""


class Averages(ka.AttentionLayer):
    """A mechanism outside the table: the mean over the real tokens, times ``strength``."""

    def __init__(self, embed_dim, num_heads, *, strength=1.0):
        super().__init__(embed_dim, num_heads)
        self.strength = strength

    def attend(self, x, context, attention_mask, is_causal):
        mask = torch.ones(x.shape[:2], dtype=bool) if attention_mask is None else attention_mask
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.strength * mean.expand_as(x)


def target(estimator, labels, values):
    return labels if isinstance(estimator, AttentionClassifier) else values


# Classes and functions as mechanisms


def test_a_class_is_the_mechanism_of_its_name(arrays, small):
    X, labels, _ = arrays
    by_name = AttentionClassifier("primal", **small).fit(X, labels)
    by_class = AttentionClassifier(ka.PrimalAttention, **small).fit(X, labels)
    assert torch.equal(by_name._outputs(X), by_class._outputs(X))
    partial = functools.partial(ka.PrimalAttention, **small.pop("attention_options"))
    by_function = AttentionClassifier(partial, **small).fit(X, labels)
    assert torch.equal(by_name._outputs(X), by_function._outputs(X))


def test_a_mechanism_outside_the_table_trains_and_is_searched(arrays, small):
    X, labels, _ = arrays
    small["attention_options"] = None
    classifier = AttentionClassifier([Averages, "softmax"], **small | {"num_layers": 2}).fit(X, labels)
    kinds = [type(layer.attention).__name__ for layer in classifier.model_.encoder.layers]
    assert kinds == ["Averages", "SoftmaxAttention"]
    assert (pickle.loads(pickle.dumps(classifier)).predict(X) == classifier.predict(X)).all()
    grid = {"attention__strength": [0.5, 2.0]}
    search = GridSearchCV(AttentionClassifier(Averages, **small), grid, cv=2, error_score="raise")
    best = search.fit(X, labels).best_estimator_
    assert best.model_.encoder.layers[0].attention.strength == search.best_params_["attention__strength"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": dict}, "is not a subclass of AttentionLayer"),
        (
            {"attention": lambda embed_dim: None},
            r"cannot be called as attention\(embed_dim, num_heads\): too",
        ),
        ({"attention": lambda d, h, width: None}, "missing a required argument: 'width'"),
        ({"attention": lambda d, h: torch.nn.Identity()}, "made Identity, expected an AttentionLayer"),
        ({"attention": lambda d, h: ka.SoftmaxAttention(d * 2, h)}, "of embed_dim=8"),
        ({"attention": Averages, "attention_options": {"strenth": 2}}, "did you mean 'strength'"),
        ({"attention": [Averages]}, "lists 1 entries for num_layers=2"),
    ],
)
def test_what_makes_no_layer_is_refused(arrays, small, changes, message):
    small |= {"attention_options": None, "num_layers": 2}
    with pytest.raises(ka.InputError, match=message):
        AttentionClassifier(**small | changes).fit(arrays[0], arrays[1])


def test_code_is_not_saved(arrays, small, tmp_path):
    small["attention_options"] = None
    classifier = AttentionClassifier(Averages, **small).fit(arrays[0], arrays[1])
    with pytest.raises(ka.InputError, match=r"cannot be saved as JSON .*: pickle it"):
        classifier.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


# Warm starts


def test_a_warm_start_begins_where_the_last_fit_ended(estimator, arrays, tmp_path):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(n_estimators=2, stem="linear", warm_start=True).fit(X, y)
    ended, scale = estimator._outputs(X), estimator.model_.encoder.input_mean.clone()
    estimator.save(tmp_path / "model.safetensors")
    for fitted in (estimator, type(estimator).load(tmp_path / "model.safetensors")):
        fitted.set_params(**STILL).fit(X[:, :, :5] + 1, y)
        assert torch.equal(fitted._outputs(X), ended)
        assert torch.equal(fitted.model_.encoder.input_mean, scale)
        assert [(row["member"], row["epoch"]) for row in fitted.history_] == [
            (member, epoch) for member in (0, 1) for epoch in (1, 2, 3)
        ]
        assert fitted.best_epochs_ == [3, 3]
    assert not torch.equal(estimator.set_params(warm_start=False).fit(X, y)._outputs(X), ended)


def test_a_warm_start_trains_on(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(epochs=15, augmentation=(), dropout=0.0, warm_start=True, random_state=None)
    seeds = [estimator.fit(X, y).seeds_ for _ in range(2)]
    assert seeds[0] == seeds[1]
    losses = [row["train_loss"] for row in estimator.history_]
    assert len(losses) == 30
    assert losses[15] < losses[0]  # a fresh model would begin where the first one did


def test_a_warm_start_adds_members(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(n_estimators=1, stem="linear", warm_start=True).fit(X, y)
    first = estimator._outputs(X)
    estimator.set_params(n_estimators=2, **STILL).fit(X, y)
    assert torch.equal(member_outputs(estimator, estimator.model_, [case.T for case in X], 7), first)
    fresh = clone(estimator).fit(X, y)
    new, expected = (each.models_[1].state_dict() for each in (estimator, fresh))
    assert all(torch.equal(value, expected[name]) for name, value in new.items())
    with pytest.raises(ka.InputError, match="n_estimators=1 with warm_start=True must be at least 2"):
        estimator.set_params(n_estimators=1).fit(X, y)


def test_a_warm_start_of_another_model_is_refused(arrays, small):
    X, labels, values = arrays
    classifier = AttentionClassifier(**small, warm_start=True).fit(X, labels)
    before = classifier.predict_proba(X)
    for data, changes, message in (
        ((X, np.where(labels == "up", "a", "b")), {}, "of the classes .*'down', 'up'.*, y has .*'a', 'b'"),
        ((X[:, :2], labels), {}, "a model of 3 channels in X, there are 2 now"),
        ((np.concatenate([X, X], axis=2), labels), {}, "max_len=7 must be at least 14"),
        ((X, labels), {"embed_dim": 16}, "weights do not fit a model of these parameters"),
    ):
        changed = pickle.loads(pickle.dumps(classifier)).set_params(**changes)
        with pytest.raises(ka.InputError, match=message):
            changed.fit(*data)
        assert (changed.predict_proba(X) == before).all()
    regressor = AttentionRegressor(**small, warm_start=True).fit(X, values)
    with pytest.raises(ka.InputError, match="of 1 classes or targets in y, there are 2 now"):
        regressor.fit(X, np.stack([values, values], axis=1))


def test_a_warm_start_keeps_the_units_of_the_targets(arrays, small):
    X, _, values = arrays
    regressor = AttentionRegressor(**small, stem="linear", warm_start=True).fit(X, values)
    predicted = regressor.predict(X)
    assert (regressor.set_params(**STILL).fit(X, values * 2 + 7).predict(X) == predicted).all()


# Callbacks


def test_callbacks_see_every_epoch_and_end_training(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    seen = []

    def third_epoch(history):
        seen.append([(row["member"], row["epoch"], row["train_loss"]) for row in history])
        return len(history) == 3

    estimator.set_params(epochs=30, n_estimators=2, callbacks=[lambda history: None, third_epoch]).fit(X, y)
    assert [len(rows) for rows in seen] == [1, 2, 3, 1, 2, 3]
    assert seen[2] + seen[5] == [
        (row["member"], row["epoch"], row["train_loss"]) for row in estimator.history_
    ]
    assert estimator.best_epochs_ == [3, 3]


def test_a_callback_sees_the_held_out_figures_and_the_epochs_of_a_warm_start(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    seen = []
    estimator.set_params(warm_start=True, callbacks=lambda history: seen.append(history[-1]))
    for _ in range(2):
        estimator.fit(X, y, validation_data=(X, y))
    assert [row["epoch"] for row in seen] == [1, 2, 3, 4]
    assert all("val_loss" in row for row in seen)


def test_an_error_of_a_callback_ends_the_fit(estimator, arrays):
    def fails(history):
        raise LookupError("of the user")

    with pytest.raises(LookupError, match="of the user"):
        estimator.set_params(callbacks=fails).fit(arrays[0], target(estimator, *arrays[1:]))
    assert not hasattr(estimator, "models_")
    with pytest.raises(ka.InputError, match=r"callbacks=\[3\] must be a callable, a list of them, or None"):
        estimator.set_params(callbacks=[3]).fit(arrays[0], target(estimator, *arrays[1:]))


def test_callbacks_are_left_out_of_files(arrays, small, tmp_path):
    classifier = AttentionClassifier(**small, callbacks=lambda history: False).fit(arrays[0], arrays[1])
    classifier.save(tmp_path / "model.safetensors")
    assert AttentionClassifier.load(tmp_path / "model.safetensors").callbacks is None


# Several targets


def levels(cases=160):
    """Series and three numbers of each, in different units: the levels of two channels, and a constant."""
    X = np.random.default_rng(0).normal(size=(cases, 2, 6))
    means = X.mean(axis=2)
    return X, np.stack([means[:, 0] * 1e3 + 5e3, means[:, 1] * 1e-3, np.full(cases, 7.0)], axis=1)


def test_several_targets_are_learnt_together(small, tmp_path):
    X, y = levels()
    small |= {"epochs": 12, "attention_options": None, "augmentation": (), "dropout": 0.0}
    regressor = AttentionRegressor(**small).fit(X, y)
    predicted = regressor.predict(X)
    assert predicted.shape == y.shape
    for column in (0, 1):
        fitted = LinearRegression().fit(predicted[:, [column]], y[:, column])
        assert fitted.score(predicted[:, [column]], y[:, column]) > 0.8
    assert np.abs(predicted[:, 2] - 7).max() < 1.0
    regressor.save(tmp_path / "model.safetensors")
    assert (AttentionRegressor.load(tmp_path / "model.safetensors").predict(X) == predicted).all()
    # The mean of the training data, where importances begin.
    level = np.broadcast_to(regressor.model_.encoder.input_mean.numpy()[:, None], X[0].shape)
    change = predicted[:1] - regressor.predict(level[None])
    for column in (0, 1, 2):
        importance = regressor.feature_importance(X[:1], nodes=128, output=column)
        error = 0.02 * np.abs(importance).sum(axis=(1, 2))
        assert (np.abs(importance.sum(axis=(1, 2)) - change[:, column]) <= error).all()
    with pytest.raises(ka.InputError, match="output=3 must be a whole number from 0 to 2"):
        regressor.feature_importance(X, output=3)


def test_predictions_have_the_shape_and_the_units_of_the_targets(small):
    X, y = levels(40)
    weight = 1.0 + np.arange(40) % 2
    plain = AttentionRegressor(**small).fit(X, y, sample_weight=weight).predict(X)
    moved = AttentionRegressor(**small).fit(X, y * [1.0, 1e6, 1.0] + [1e4, 0, 0], sample_weight=weight)
    expected = plain * [1.0, 1e6, 1.0] + [1e4, 0, 0]
    np.testing.assert_allclose(moved.predict(X), expected, rtol=1e-4, atol=1e-2)
    column = AttentionRegressor(**small).fit(X, y[:, :1]).predict(X)
    assert column.shape == (40, 1)
    assert (column[:, 0] == AttentionRegressor(**small).fit(X, y[:, 0]).predict(X)).all()


def test_predictions_keep_the_digits_of_the_units(arrays, small):
    """A mean of ten digits is no float32: it would be off by the size of the targets."""
    regressor = AttentionRegressor(**small).fit(arrays[0], 1e10 + arrays[2])
    scale, mean = regressor.target_scale_, regressor.target_mean_
    expected = regressor._outputs(arrays[0])[:, 0].double().numpy() * scale + mean
    assert (regressor.predict(arrays[0]) == expected).all()


def test_held_out_cases_have_as_many_targets(small):
    X, y = levels(40)
    with pytest.raises(ka.InputError, match=r"validation_data has targets of shape \(40,\), y has shape"):
        AttentionRegressor(**small).fit(X, y, validation_data=(X, y[:, 0]))
    regressor = AttentionRegressor(**small | {"validation_fraction": 0.25}).fit(X, y)
    assert {"val_loss", "val_rmse", "val_r2"} <= regressor.history_[0].keys()
