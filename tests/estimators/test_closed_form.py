"""The closed form beside the members of an estimator."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import kernel_attention as ka
from kernel_attention.estimators.ensemble import member_outputs


@pytest.fixture
def waves():
    """X (60, 2, 40), labels and values that the frequency decides."""
    generator = np.random.default_rng(0)
    values = generator.uniform(0.2, 1.0, 60)
    X = np.sin(values[:, None, None] * np.arange(40) + generator.uniform(0, 6, (60, 2, 1)))
    X += 0.5 * generator.normal(size=X.shape)
    return X, np.where(values > 0.6, "fast", "slow"), values


def fitted(estimator, waves, **parameters):
    X, labels, values = waves
    estimator.set_params(closed_form=True, **parameters)
    return estimator.fit(X[:40], (labels if hasattr(estimator, "predict_proba") else values)[:40])


def test_new_cases_are_told_apart_after_two_epochs_of_the_members(estimator, waves):
    X, labels, values = waves
    found = fitted(estimator, waves)
    score = found.score(X[40:], (labels if hasattr(estimator, "predict_proba") else values)[40:])
    assert score > (0.9 if hasattr(estimator, "predict_proba") else 0.7)


def test_the_outputs_are_those_of_both_parts_at_their_shares(estimator, waves):
    X, _, _ = waves
    found = fitted(estimator, waves, calibrate=False)
    assert found.member_weight_ == 0.5  # nothing is held out to choose another
    sequences = [case.T for case in X[40:]]
    members = member_outputs(found, found.models_[0], sequences, found.max_len_)
    expected = (found.closed_form_.predict(sequences) + members) / 2
    torch.testing.assert_close(found._outputs(X[40:]), expected)


def test_members_that_tell_nothing_have_no_share(waves):
    classifier = ka.AttentionClassifier(epochs=1, learning_rate=1e-9, embed_dim=8, random_state=0)
    found = fitted(classifier, waves)
    assert found.member_weight_ == 0
    assert len(found.models_) == 1
    assert found.temperature_ == 1


def test_the_file_holds_the_closed_form(estimator, waves, tmp_path):
    X, _, _ = waves
    found = fitted(estimator, waves, calibrate=True)
    found.save(tmp_path / "estimator.safetensors")
    loaded = type(found).load(tmp_path / "estimator.safetensors")
    np.testing.assert_array_equal(loaded.predict(X), found.predict(X))
    assert loaded.closed_form_weights_ == found.closed_form_weights_
    json.dumps(loaded.closed_form_weights_)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_importance_of_all_values_adds_up_to_the_change_of_the_answer(waves, share):
    X, _, _ = waves
    classifier = ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, stem="linear")
    found = fitted(classifier, waves)
    found.member_weight_ = share
    importance = found.feature_importance(X[40:42], nodes=32, output=0)
    mean = np.tile(found.closed_form_.input_mean.numpy()[:, None], 40)
    change = found.predict_log_proba(X[40:42])[:, 0] - found.predict_log_proba(mean[None])[0, 0]
    np.testing.assert_allclose(importance.sum(axis=(1, 2)), change, atol=0.1 * np.abs(change).max())


def test_a_warm_start_solves_the_closed_form_anew(waves):
    X, labels, _ = waves
    classifier = ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, warm_start=True)
    classifier.fit(X[:20], labels[:20])
    first = classifier.closed_form_
    classifier.fit(X[:40], labels[:40])
    assert classifier.closed_form_ is not first


def test_intervals_hold_about_as_many_targets_as_asked(waves):
    X, _, values = waves
    regressor = ka.AttentionRegressor(epochs=1, embed_dim=8, random_state=0)
    low, high = regressor.fit(X[:50], values[:50]).predict_interval(X[50:], 0.8).T
    assert ((low <= values[50:]) & (values[50:] <= high)).mean() >= 0.5


def test_progress_names_the_views(waves, capfd):
    fitted(ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, verbose=True), waves)
    assert "closed form: rocket, view 3 of 8" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"n_jobs": 0}, "n_jobs=0 must be"), ({"n_jobs": True}, "n_jobs=True must be")],
)
def test_parameters_are_checked(waves, parameters, message):
    with pytest.raises(ka.InputError, match=message):
        fitted(ka.AttentionClassifier(epochs=1, random_state=0), waves, **parameters)


def test_closed_form_is_true_or_false(waves):
    X, labels, _ = waves
    with pytest.raises(ka.InputError, match="closed_form='yes' must be True or False"):
        ka.AttentionClassifier(closed_form="yes").fit(X, labels)


def test_n_jobs_gives_the_threads_back(waves):
    before = torch.get_num_threads()
    fitted(ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0), waves, n_jobs=2)
    assert torch.get_num_threads() == before
