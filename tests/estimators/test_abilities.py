"""What an estimator can do beside fit and predict: ensembles, weights, calibration, files, explanations."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pandas as pd
import pytest
import torch
from aeon.datasets import load_basic_motions
from sklearn.base import clone

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor


def target(estimator, labels, values):
    return labels if isinstance(estimator, AttentionClassifier) else values


# Ensembles


def test_outputs_are_the_mean_over_members_of_different_seeds(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(n_estimators=3).fit(X, y)
    alone = []
    for model in estimator.models_:
        single = clone(estimator).set_params(n_estimators=1).fit(X, y)
        single.models_ = [model]
        alone.append(single._outputs(X))
    assert not torch.equal(alone[0], alone[1])
    torch.testing.assert_close(estimator._outputs(X), torch.stack(alone).mean(dim=0))
    assert [row["member"] for row in estimator.history_] == [0, 0, 1, 1, 2, 2]
    assert estimator.best_epochs_ == [2, 2, 2]


def test_the_first_member_is_the_estimator_of_one(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    first = estimator.set_params(n_estimators=3).fit(X, y).models_[0].state_dict()
    alone = estimator.set_params(n_estimators=1).fit(X, y).model_.state_dict()
    assert all(torch.equal(value, first[name]) for name, value in alone.items())


def test_members_may_differ_in_more_than_seeds(arrays, small):
    small["attention_options"] = None
    members = [{}, {"attention": "softmax", "stem": "linear", "views": ("raw",)}]
    classifier = AttentionClassifier(**small | {"n_estimators": 3}, members=members)
    classifier.fit(arrays[0], arrays[1])
    kinds = [type(model.encoder.layers[0].attention).__name__ for model in classifier.models_]
    assert kinds == ["PrimalAttention", "SoftmaxAttention", "PrimalAttention"]
    with pytest.raises(ka.InputError, match="unknown parameter of members 'atention'; did you mean"):
        classifier.set_params(members=[{"atention": "softmax"}]).fit(arrays[0], arrays[1])


def test_a_limit_of_time_is_kept_by_all_members_together(arrays, small):
    estimator = AttentionClassifier(**small | {"n_estimators": 3, "epochs": 100_000}, time_limit=0.5)
    started = time.monotonic()
    estimator.fit(arrays[0], arrays[1])
    assert time.monotonic() - started < 60  # without the limit: an hour
    assert len(estimator.models_) == 3


# Weights, held-out cases


def test_a_case_of_weight_zero_takes_no_part(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    weight = np.where(np.arange(23) < 19, 0.5, 0.0)
    weighted = clone(estimator).fit(X, y, sample_weight=weight)._outputs(X)
    assert torch.equal(weighted, clone(estimator).fit(X[:19], y[:19])._outputs(X))
    with pytest.raises(ValueError, match="at least one"):
        estimator.fit(X, y, sample_weight=np.zeros(23))
    with pytest.raises(ValueError, match="Negative"):
        estimator.fit(X, y, sample_weight=-np.ones(23))


def rare_cases(seed, often, rare):
    """Cases of noise, whose level tells a rare class, though not surely."""
    y = np.repeat(["often", "rare"], [often, rare])
    noise = np.random.default_rng(seed).normal(size=(often + rare, 2, 8))
    return noise + 0.7 * (y == "rare")[:, None, None], y


@pytest.mark.slow
@pytest.mark.parametrize("readout", [False, True])
def test_balanced_classes_find_a_rare_one(small, readout):
    """Among new cases; of two sets of 60 cases, each of which has 6 of the rare class."""
    small |= {"epochs": 15, "augmentation": (), "attention_options": None, "readout": readout}
    X, y = rare_cases(2, 900, 100)
    found = {None: 0, "balanced": 0}
    for class_weight in found:
        for seed in (0, 1):
            estimator = AttentionClassifier(**small, class_weight=class_weight).fit(*rare_cases(seed, 54, 6))
            found[class_weight] += (estimator.predict(X)[y == "rare"] == "rare").sum()
    assert found["balanced"] > 1.5 * found[None]


def test_class_weights_are_those_of_the_labels(arrays, small):
    X, labels, _ = arrays
    by_class = AttentionClassifier(**small, class_weight={"up": 3.0, "down": 1.0}).fit(X, labels)
    by_case = AttentionClassifier(**small).fit(X, labels, sample_weight=np.where(labels == "up", 3.0, 1.0))
    torch.testing.assert_close(by_class._outputs(X), by_case._outputs(X))
    rare = np.where(np.arange(23) < 5, "up", "down")
    balanced = AttentionClassifier(**small, class_weight="balanced").fit(X, rare)
    weight = np.where(rare == "up", 23 / (2 * 5), 23 / (2 * 18))
    by_case = AttentionClassifier(**small).fit(X, rare, sample_weight=weight)
    torch.testing.assert_close(balanced._outputs(X), by_case._outputs(X))
    for given, message in (("even", "unknown class_weight 'even'"), ({"left": 2.0}, "that y does not have")):
        with pytest.raises(ka.InputError, match=message):
            AttentionClassifier(**small, class_weight=given).fit(X, labels)


def test_validation_data_choose_the_epoch(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(epochs=30, learning_rate=0.05, patience=2)
    estimator.fit(X[:15], y[:15], validation_data=(X[15:], y[15:]))
    assert {"val_loss"} <= estimator.history_[0].keys()
    assert len(estimator.history_) in (estimator.best_epoch_ + 2, 30)
    with pytest.raises(ka.InputError, match="patience=2 needs held-out cases"):
        estimator.fit(X, y)


def test_unseen_labels_of_validation_data_are_refused(arrays, small):
    X, labels, _ = arrays
    with pytest.raises(ka.InputError, match="validation_data has labels that y does not have: left"):
        AttentionClassifier(**small).fit(X, labels, validation_data=(X[:2], ["up", "left"]))


def test_a_refit_trains_on_all_cases_for_as_long_as_was_best(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    estimator.set_params(epochs=6, validation_fraction=0.3, refit=True, warmup=0.0).fit(X, y)
    best, refitted = estimator.best_epoch_, estimator._outputs(X)
    estimator.set_params(epochs=best, validation_fraction=None, refit=False).fit(X, y)
    assert torch.equal(refitted, estimator._outputs(X))


# Probabilities and intervals


def noisy_labels(cases=200):
    """A class that the level of a series tells in seven of ten cases."""
    generator = np.random.default_rng(1)
    y = generator.integers(0, 2, size=cases)
    shown = np.where(generator.random(cases) < 0.7, y, 1 - y)
    return generator.normal(size=(cases, 3, 10)) + shown[:, None, None], y


@pytest.mark.slow
def test_a_temperature_makes_probabilities_honest(small):
    """Learnt by heart, noisy labels make a model too certain; held-out cases say by how much."""
    X, y = noisy_labels()
    small |= {"epochs": 25, "batch_size": 16, "label_smoothing": 0.0, "augmentation": ()}
    small |= {"weight_decay": 0.0, "dropout": 0.0, "attention_options": None}
    certain = AttentionClassifier(**small).fit(X[:80], y[:80])
    honest = AttentionClassifier(**small | {"calibrate": True}).fit(X[:80], y[:80])
    assert certain.temperature_ == 1.0
    assert honest.temperature_ > 1.0
    assert len(honest.models_) == 1
    assert (honest.predict(X) == certain.predict(X)).all()

    def loss(model):
        return -model.predict_log_proba(X[80:])[np.arange(120), y[80:]].mean()

    assert loss(honest) < loss(certain)


def test_decisions_are_log_odds_or_log_probabilities(arrays, small):
    X, labels, _ = arrays
    classifier = AttentionClassifier(**small).fit(X, labels)
    probabilities = classifier.predict_proba(X)
    odds = np.log(probabilities[:, 1] / probabilities[:, 0])
    np.testing.assert_allclose(classifier.decision_function(X), odds, atol=1e-10)
    several = AttentionClassifier(**small).fit(X, np.arange(23) % 3)
    np.testing.assert_allclose(several.decision_function(X), np.log(several.predict_proba(X)), atol=1e-10)


def test_intervals_hold_what_they_promise(small):
    """Of 400 fresh cases 90 % +- 5 % lie inside, as 100 held-out cases and chance allow (2.5 deviations)."""
    generator = np.random.default_rng(0)
    X = generator.normal(size=(900, 1, 5))
    y = 50 + 10 * (X[:, 0].mean(axis=1) + 0.3 * generator.normal(size=900))
    small |= {"epochs": 4, "batch_size": 32, "attention_options": None}
    regressor = AttentionRegressor(**small).fit(X[:400], y[:400], validation_data=(X[400:500], y[400:500]))
    low, high = regressor.predict_interval(X[500:], 0.9).T
    inside = ((low <= y[500:]) & (y[500:] <= high)).mean()
    # The share that a conformal interval of m = 100 residuals covers is Beta(91, 10): deviation 0.03.
    assert 0.9 - 2.5 * 0.034 < inside < 0.9 + 2.5 * 0.034
    with pytest.raises(
        ka.InputError, match=r"coverage=0\.995 needs at least 199 held-out cases, there were 100"
    ):
        regressor.predict_interval(X, 0.995)


# Embeddings and explanations


def test_embeddings_are_what_the_heads_read(estimator, arrays):
    X = arrays[0]
    estimator.set_params(n_estimators=2, readout=False).fit(X, target(estimator, *arrays[1:]))
    embedded = estimator.transform(X)
    width = embedded.shape[1] // 2
    parts = torch.from_numpy(embedded).split(width, dim=1)
    outputs = [model.head(part) for model, part in zip(estimator.models_, parts, strict=True)]
    torch.testing.assert_close(torch.stack(outputs).mean(dim=0), estimator._outputs(X), atol=1e-5, rtol=1e-5)


def test_importances_sum_to_the_change_of_the_answer(estimator, ragged):
    """Completeness of integrated gradients, within the error of the quadrature."""
    X, labels, values = ragged
    estimator.set_params(views=("raw", "normalized", "difference")).fit(X, target(estimator, labels, values))
    importance = estimator.feature_importance(X[:2], nodes=128)
    for case, found in zip(X[:2], importance, strict=True):
        assert found.shape == case.shape
        level = estimator.model_.encoder.input_mean.numpy()[:, None]
        series = np.stack([np.broadcast_to(level, case.shape), case])
        if isinstance(estimator, AttentionClassifier):
            scores = np.log(estimator.predict_proba(series))
            change = scores[1].max() - scores[0, scores[1].argmax()]
        else:
            change = np.diff(estimator.predict(series))[0]
        assert found.sum() == pytest.approx(change, rel=0.02, abs=0.02 * np.abs(found).sum())
    with pytest.raises(ka.InputError, match="X has a sequence of 14 steps, the model takes at most 7"):
        estimator.feature_importance([np.concatenate([X[2], X[2]], axis=1)])


@pytest.mark.slow
def test_importance_finds_the_channel_and_the_steps_that_matter(small):
    generator = np.random.default_rng(0)
    X, y = generator.normal(size=(80, 4, 12)), np.arange(80) % 2
    X[y == 1, 2, 4:7] += 3.0
    small |= {"epochs": 15, "attention_options": None, "augmentation": (), "stem_layers": 1}
    classifier = AttentionClassifier(**small).fit(X, y)
    assert classifier.score(X, y) > 0.95
    importance = np.abs(classifier.feature_importance(X[:20])).mean(axis=0)
    assert importance.shape == (4, 12)
    assert importance.sum(axis=1).argmax() == 2
    assert set(np.argsort(importance[2])[-3:]) == {4, 5, 6}


# Files


@pytest.mark.parametrize("labels", [["b", "a"], [True, False]])
def test_a_saved_classifier_predicts_the_same(arrays, small, labels, tmp_path):
    y = np.array([labels[case % 2] for case in range(23)])
    classifier = AttentionClassifier(**small | {"n_estimators": 2, "calibrate": True}).fit(arrays[0], y)
    classifier.save(tmp_path / "model.safetensors")
    loaded = AttentionClassifier.load(tmp_path / "model.safetensors")
    assert (loaded.predict_proba(arrays[0]) == classifier.predict_proba(arrays[0])).all()
    assert (loaded.predict(arrays[0]) == classifier.predict(arrays[0])).all()
    assert loaded.predict(arrays[0]).dtype == y.dtype
    assert loaded.history_ == classifier.history_
    assert json.dumps(loaded.get_params(), default=list) == json.dumps(classifier.get_params(), default=list)
    assert loaded.fit(arrays[0], y).score(arrays[0], y) >= 0.0


def test_a_saved_regressor_predicts_the_same(arrays, small, tmp_path):
    regressor = AttentionRegressor(**small | {"calibrate": True}).fit(arrays[0], arrays[2])
    regressor.save(tmp_path / "model.safetensors")
    loaded = AttentionRegressor.load(tmp_path / "model.safetensors")
    assert (loaded.predict(arrays[0]) == regressor.predict(arrays[0])).all()
    assert loaded.residuals_ == regressor.residuals_
    message = re.escape("holds an estimator of AttentionRegressor, expected AttentionClassifier")
    with pytest.raises(ka.InputError, match=message):
        AttentionClassifier.load(tmp_path / "model.safetensors")


def test_damaged_files_and_parameters_without_json_are_refused(arrays, small, tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(ka.InputError, match="cannot be read"):
        AttentionClassifier.load(path)
    classifier = AttentionClassifier(**small).fit(arrays[0], arrays[1])
    classifier.save(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ka.InputError, match=r"model\.safetensors"):
        AttentionClassifier.load(path)
    classifier.attention_options = {"rank": object()}
    with pytest.raises(ka.InputError, match="cannot be saved as JSON"):
        classifier.save(path)


# Searches and frames


def test_the_frames_of_sktime_and_of_aeon_are_arrays(estimator, ragged):
    """Unequal lengths, times out of order, and lists of frames in the orientation of either library."""
    X, y = [case.astype(np.float32) for case in ragged[0]], target(estimator, *ragged[1:])
    expected = estimator.fit(X, y).predict(X)
    frames = [pd.DataFrame(case.T, columns=["a", "b", "c"]) for case in X]
    long = pd.concat(dict(zip([f"case {index}" for index in range(23)], frames, strict=True)))
    shuffled = pd.concat({index: frame.iloc[::-1] for index, frame in enumerate(frames)})
    nested = pd.DataFrame({f"var_{c}": [pd.Series(case[c]) for case in X] for c in range(3)})
    of_aeon = [pd.DataFrame(case) for case in X]
    for frame in (long, shuffled, nested, frames, of_aeon):
        assert (estimator.predict(frame) == expected).all()


def test_frames_that_mean_nothing_are_refused(estimator, arrays):
    frame = pd.DataFrame(arrays[0][0].T)
    twice = pd.concat({0: pd.concat([frame, frame.iloc[2:3]])})
    cells = pd.DataFrame({"a": [pd.Series(np.zeros(7))], "b": [pd.Series(np.zeros(2))]})
    hierarchy = pd.concat({"group": pd.concat({0: frame})})
    for given, message in (
        (twice, "case 0 of X has the time 2 twice"),
        (hierarchy, "X is a frame with 3 levels of rows"),
        (cells, r"case 0 of X has cells of shapes \(7,\), \(2,\)"),
        (pd.DataFrame([["a", "b"]]), "X is not an array of numbers"),
    ):
        with pytest.raises(ka.InputError, match=message):
            estimator.fit(given, [0.0])


@pytest.mark.slow
def test_the_defaults_learn_a_real_set_in_little_time():
    X, y = load_basic_motions(split="train")
    X_test, y_test = load_basic_motions(split="test")
    classifier = AttentionClassifier(n_estimators=2, epochs=12, random_state=0, accelerator="cpu")
    assert classifier.fit(X, y).score(X_test, y_test) > 0.9
    assert 0.1 < classifier.temperature_ < 10


@pytest.mark.parametrize(("length", "second"), [(256, "convolution"), (257, "rocket")])
def test_members_learn_convolutions_of_series_that_keep_their_steps(length, second):
    X = np.random.default_rng(0).standard_normal((8, 1, length))
    classifier = AttentionClassifier(
        n_estimators=4, epochs=1, calibrate=False, embed_dim=8, num_heads=2, feedforward_dim=8, random_state=0
    ).fit(X, np.arange(8) % 2)
    stems = [options["stem"] for options in classifier.model_options_]
    assert stems == ["rocket", second, "rocket", "rocket"]
