"""scikit-learn's own estimator checks, and its tools at work on the estimators."""

import numpy as np
import pytest
from aeon.datasets import load_japanese_vowels
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.model_selection import KFold, RandomizedSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention.estimators import AttentionClassifier, AttentionRegressor

# The checks feed X of shape (cases, features), which for us is one channel of `features` time steps.
# scikit-learn itself skips check_array_api_input unless SCIPY_ARRAY_API=1 is set before SciPy is imported.
EXPECTED_FAILURES = {
    "check_n_features_in": "n_features_in_ counts channels, here 1; the second axis of a 2-D X is time",
    "check_n_features_in_after_fitting": "a shorter series is no error, it is padded; channels are checked",
    "check_transformer_general": "a shorter series is no error; channels are checked",
    "check_dtype_object": "a dict in X is an InputError, which is a ValueError; the check wants a TypeError",
    "check_estimators_empty_data_messages": "refused in other words: 0 time steps, no shape=(1, 0)",
    "check_sample_weight_equivalence_on_dense_data": "a repeated case changes the batches, a weight does not",
}
# Learns the checks' blobs and lines within a few epochs.
QUICK = {
    "attention_options": {"rank": 4, "rank_multiplier": 2},
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "feedforward_dim": 16,
    "dropout": 0.0,
    "epochs": 8,
    "batch_size": 64,
    "learning_rate": 0.02,
    "n_estimators": 1,
    "calibrate": False,
    "accelerator": "cpu",
}


# A check given again with other arrays, and one that repeats a fit of another with arrays of another type:
# test_frames.py and test_input_kinds.py have arrays, targets and weights of all kinds.
REPEATED = {
    "check_classifier_data_not_an_array",
    "check_estimators_dtypes",
    "check_f_contiguous_array_estimator",
    "check_fit_score_takes_y",
    "check_fit_idempotent",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_regressor_data_not_an_array",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_pandas_series",
    "check_supervised_y_2d",
    "check_transformer_data_not_an_array",
}


def _checks():
    """All checks; quick ones for the classifier, and of the regressor those of regressors alone."""
    both = parametrize_with_checks(
        [AttentionClassifier(**QUICK), AttentionRegressor(**QUICK)],
        expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
    )
    for each in both.args[1]:
        estimator, check = values = getattr(each, "values", each)
        name = check.func.__name__
        slow = check.keywords or name in REPEATED | EXPECTED_FAILURES.keys()
        slow = slow or (is_regressor(estimator) and "regress" not in name)
        marks = [*getattr(each, "marks", ()), *([pytest.mark.slow] if slow else [])]
        yield pytest.param(
            *values, marks=marks, id=f"{type(estimator).__name__}-{name}{check.keywords or ''}"
        )


@pytest.mark.parametrize(("estimator", "check"), list(_checks()))
def test_sklearn_check(estimator, check):
    if check.func.__name__ == "check_methods_subset_invariance":
        pytest.skip("it allows 1e-7; the next test has a tolerance for float32")
    check(estimator)


@pytest.mark.parametrize("estimator_class", [AttentionClassifier, AttentionRegressor])
def test_a_case_is_predicted_alone_as_among_others(estimator_class):
    """Products of other shapes are rounded otherwise: some ten layers of relative error 1e-6 each."""
    X = np.random.default_rng(0).normal(size=(20, 9))
    fitted = estimator_class(**QUICK, random_state=0).fit(X, np.arange(20) % 3)
    predict = fitted.predict_proba if estimator_class is AttentionClassifier else fitted.predict
    alone = np.concatenate([predict(case[None]) for case in X])
    np.testing.assert_allclose(alone, predict(X), rtol=1e-5, atol=1e-5)


def test_tags():
    classifier, regressor = AttentionClassifier(), AttentionRegressor()
    assert is_classifier(classifier)
    assert is_regressor(regressor)
    for estimator in (classifier, regressor):
        tags = get_tags(estimator)
        assert tags.input_tags.two_d_array
        assert tags.input_tags.three_d_array
        assert tags.target_tags.required
        assert not tags.input_tags.allow_nan
    assert get_tags(AttentionClassifier(missing="interpolate")).input_tags.allow_nan


def test_parameters_are_stored_verbatim_and_cloned():
    attention, options = [{"primal": {"rank": 3}}, {"softmax": {}}], {}
    classifier = AttentionClassifier(attention, options, epochs=3)
    assert classifier.attention is attention
    assert classifier.attention_options is options
    copied = clone(classifier)
    assert copied.get_params() == classifier.get_params()
    assert copied.attention is not attention
    assert copied.set_params(epochs=7, attention="softmax").get_params()["epochs"] == 7


def test_search_that_draws_numpy_numbers(arrays, small):
    X, labels, _ = arrays
    space = {
        "embed_dim": np.array([4, 8]),
        "max_len": np.arange(7, 9),
        "learning_rate": np.logspace(-3, -2),
        "attention_options": [{"rank": np.int64(2)}],
    }
    search = RandomizedSearchCV(
        AttentionClassifier(**small), space, n_iter=2, cv=2, random_state=0, error_score="raise"
    )
    assert search.fit(X, labels).predict(X).shape == (23,)


def test_cross_validation_of_unequal_lengths(small):
    """JapaneseVowels: the longest utterance is held out of one fold's training, and still predicted."""
    X, labels = load_japanese_vowels(split="train")
    lengths = np.array([case.shape[1] for case in X])
    longest = int(lengths.argmax())
    assert (lengths == lengths[longest]).sum() == 1
    X, labels = [X[longest], *X[0::9]], [labels[longest], *labels[0::9]]
    classifier = AttentionClassifier(**small)
    scores = cross_val_score(classifier, X, labels, cv=KFold(3), error_score="raise")
    assert scores.shape == (3,)
    assert np.isfinite(scores).all()
    values = [case.mean() for case in X]
    predicted = cross_val_predict(AttentionRegressor(**small), X, values, cv=KFold(3))
    assert np.isfinite(predicted).all()


def test_in_a_pipeline(arrays, small):
    X, labels, _ = arrays
    pipeline = make_pipeline(StandardScaler(), AttentionClassifier(**small)).fit(X[:, 0], labels)
    assert pipeline.predict_proba(X[:, 0]).shape == (23, 2)
    pipeline.set_params(attentionclassifier__attention="softmax", attentionclassifier__attention_options=None)
    assert pipeline.fit(X[:, 0], labels).predict(X[:, 0]).shape == (23,)


@pytest.mark.parametrize("cls", [AttentionClassifier, AttentionRegressor])
def test_the_representation_names_what_differs_from_the_defaults(cls):
    assert repr(cls(epochs=3, attention="softmax")) == f"{cls.__name__}(attention='softmax', epochs=3)"
