"""What a fitted estimator is, which input it takes and which it refuses, and what it leaves alone."""

import copy
import logging
import os
import pickle
import random
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor


def target(estimator, labels, values):
    return labels if isinstance(estimator, AttentionClassifier) else values


def weights(estimator):
    return torch.cat([value.flatten() for value in estimator.model_.state_dict().values()])


def test_fitted_state_of_a_classifier(arrays, small):
    X, labels, _ = arrays
    classifier = AttentionClassifier(**small)
    assert classifier.fit(X, labels) is classifier
    assert classifier.classes_.tolist() == ["down", "up"]
    assert (classifier.n_features_in_, classifier.max_len_, classifier.best_epoch_) == (3, 7, 2)
    assert [row["epoch"] for row in classifier.history_] == [1, 2]
    assert {"train_loss", "train_accuracy", "objective_layer_0"} <= classifier.history_[0].keys()
    assert not classifier.model_.training
    assert all(parameter.grad is None for parameter in classifier.model_.parameters())
    probabilities = classifier.predict_proba(X)
    assert probabilities.shape == (23, 2)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-12)
    assert (classifier.classes_[probabilities.argmax(axis=1)] == classifier.predict(X)).all()
    assert classifier.score(X, labels) == np.mean(classifier.predict(X) == labels)


def test_fitted_state_of_a_regressor(arrays, small):
    X, _, values = arrays
    regressor = AttentionRegressor(**small).fit(X, values)
    assert (regressor.target_mean_, regressor.target_scale_) == (values.mean(), values.std())
    assert {"train_loss", "train_rmse"} <= regressor.history_[0].keys()
    assert regressor.predict(X).shape == (23,)
    assert not hasattr(regressor, "classes_")


def test_two_dimensional_input_is_one_channel(estimator, arrays):
    X, labels, values = arrays
    y = target(estimator, labels, values)
    flat = estimator.fit(X[:, 0], y).predict(X[:, 0])
    assert estimator.n_features_in_ == 1
    assert (estimator.fit(X[:, :1], y).predict(X[:, :1]) == flat).all()


def test_unequal_lengths(estimator, ragged):
    """A case is predicted the same in whichever company it is padded."""
    X, labels, values = ragged
    estimator.fit(X, target(estimator, labels, values))
    assert estimator.max_len_ == 7
    alone = [estimator._outputs([case])[0] for case in X]
    torch.testing.assert_close(estimator._outputs(X), torch.stack(alone), atol=1e-5, rtol=0)


def test_attention_options_are_merged_over_the_specification(arrays, small):
    X, labels, _ = arrays
    attention = {"primal": {"rank": 5, "init": "per_head"}}
    small["attention_options"] = {"rank": 4}
    classifier = AttentionClassifier(attention, **small).fit(X, labels)
    assert classifier.model_.encoder.layers[0].attention.rank == 4
    assert attention == {"primal": {"rank": 5, "init": "per_head"}}
    assert classifier.attention is attention
    per_layer = ["softmax", {"primal": {"rank": 4}}]
    classifier = AttentionClassifier(per_layer, **small | {"attention_options": None, "num_layers": 2})
    kinds = [type(layer.attention).__name__ for layer in classifier.fit(X, labels).model_.encoder.layers]
    assert kinds == ["SoftmaxAttention", "PrimalAttention"]


def test_without_a_validation_fraction_all_cases_train_and_the_last_epoch_stays(estimator, arrays):
    estimator.set_params(epochs=3).fit(arrays[0], target(estimator, *arrays[1:]))
    mean = estimator.model_.encoder.input_mean
    torch.testing.assert_close(mean, torch.from_numpy(arrays[0].mean(axis=(0, 2))).float())
    assert estimator.best_epoch_ == 3
    assert not any(key.startswith("val_") for row in estimator.history_ for key in row)


def test_with_a_validation_fraction_the_best_epoch_stays(estimator, arrays):
    """Targets without a pattern are soon learnt by heart: later epochs are worse, and change nothing."""
    X, y = arrays[0], np.random.default_rng(1).permutation(target(estimator, *arrays[1:]))
    estimator.set_params(schedule="constant", warmup=0.0)  # the rate of an epoch is that of a longer training
    estimator.set_params(epochs=20, validation_fraction=0.3, learning_rate=0.05).fit(X, y)
    quality = [(row.get("val_accuracy", -row["val_loss"]), -row["val_loss"]) for row in estimator.history_]
    assert estimator.best_epoch_ == quality.index(max(quality)) + 1
    assert estimator.best_epoch_ < 20  # or the test would show nothing
    predicted = estimator.predict(X)
    estimator.set_params(epochs=estimator.best_epoch_).fit(X, y)
    assert (estimator.predict(X) == predicted).all()


def test_random_state(arrays, small):
    """A whole number repeats bit for bit, whatever the global generators say; None differs every time."""
    X, labels, _ = arrays
    first = weights(AttentionClassifier(**small).fit(X, labels))
    torch.manual_seed(99)
    np.random.seed(99)
    assert torch.equal(first, weights(AttentionClassifier(**small).fit(X, labels)))
    for other in (1, None, np.random.RandomState(0)):
        assert not torch.equal(
            first, weights(AttentionClassifier(**small | {"random_state": other}).fit(X, labels))
        )
    small["random_state"] = None
    np.random.seed(0)
    first = weights(AttentionClassifier(**small).fit(X, labels))
    np.random.seed(0)
    assert not torch.equal(first, weights(AttentionClassifier(**small).fit(X, labels)))


def surroundings():
    """Everything global that training might touch."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()],
        "python": random.getstate(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "log level": logging.getLogger("lightning_fabric").level,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
        "files": os.listdir(),
    }


def test_fits_in_threads_do_not_disturb_one_another(arrays, small):
    """They share the process's generators, so they take turns."""
    X, labels, _ = arrays

    def fit(seed):
        return weights(AttentionClassifier(**small | {"random_state": seed}).fit(X, labels))

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(fit, [0, 1, 2]))
    assert all(torch.equal(fit(seed), together[seed]) for seed in range(3))


@pytest.mark.parametrize("random_state", [0, None])
@pytest.mark.parametrize("gradients", [True, False])
def test_fit_and_predict_leave_the_world_as_it_was(
    arrays, small, random_state, gradients, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    small["random_state"] = random_state
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.set_grad_enabled(gradients):
            before = surroundings()
            classifier = AttentionClassifier(**small, validation_fraction=0.3).fit(arrays[0], arrays[1])
            classifier.predict(arrays[0])
            assert surroundings() == before
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_is_a_keyboard_interrupt_and_works_again_afterwards(arrays, small):
    """Not an Exception, which a grid search would count as one failed fit."""
    classifier = AttentionClassifier(**small)
    handler, calls = signal.getsignal(signal.SIGINT), []

    def interrupt(module, *_):
        calls.append(module)
        if len(calls) == 30:
            raise KeyboardInterrupt

    hook = register_module_forward_hook(interrupt)
    try:
        before = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            classifier.fit(arrays[0], arrays[1])
    finally:
        hook.remove()
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.equal(torch.get_rng_state(), before)
    assert not hasattr(classifier, "model_")


def test_a_failed_fit_leaves_the_fitted_model(estimator, arrays):
    X, y = arrays[0], target(estimator, *arrays[1:])
    before = estimator.fit(X, y).predict(X)
    with pytest.raises(ka.InputError):
        estimator.set_params(num_heads=3).fit(X, y)
    assert (estimator.predict(X) == before).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_and_pickles_predict_the_same(estimator, ragged, duplicate):
    X, labels, values = ragged
    estimator.fit(X, target(estimator, labels, values))
    assert (duplicate(estimator).predict(X) == estimator.predict(X)).all()


def test_a_short_convolution_is_learnt_and_saved(estimator, ragged, tmp_path):
    X, labels, values = ragged
    plain = copy.deepcopy(estimator).fit(X, target(estimator, labels, values))
    estimator.set_params(short_convolution=3).fit(X, target(estimator, labels, values))
    kernel = estimator.model_.encoder.layers[0].short_convolution.weight
    assert kernel.shape == (8, 3)
    assert kernel.abs().max() > 0
    assert (estimator.transform(X) != plain.transform(X)).any()
    estimator.save(tmp_path / "fitted")
    loaded = type(estimator).load(tmp_path / "fitted")
    assert loaded.short_convolution == 3
    assert (loaded.predict(X) == estimator.predict(X)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_convolution": -1}, "short_convolution=-1"),
        ({"attention": "primle"}, "did you mean 'primal'"),
        ({"attention_options": {"rnak": 3}}, "did you mean 'rank'"),
        ({"attention_options": {"rank": 0}}, "rank=0 must be"),
        ({"attention_options": 3}, "attention_options=3 must be a dict"),
        ({"attention": ["primal"]}, "in a list, give each layer its options"),
        ({"num_heads": 3}, "embed_dim=8 must be divisible by num_heads=3"),
        ({"embed_dim": 0}, "embed_dim=0"),
        ({"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"positions": "fxed"}, "positions='fxed'.*learnt, learnt_normal, fixed"),
        ({"pooling": "max"}, "pooling='max'.*flatten, mean"),
        ({"optimizer": "adamm"}, "optimizer='adamm'.*radam, adam, adamw"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 must be a finite number above 0"),
        ({"gradient_clip": -1.0}, "gradient_clip=-1.0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0"),
        ({"missing": "drop"}, "unknown value of missing 'drop'"),
        ({"max_len": 6}, "max_len=6 must be at least 7"),
        ({"max_len": 7.5}, "max_len=7.5 must be a whole number"),
    ],
)
def test_bad_parameters_are_refused_by_fit(arrays, small, changes, message):
    classifier = AttentionClassifier(**small | changes)
    with pytest.raises(ka.InputError, match=message):
        classifier.fit(arrays[0], arrays[1])
    assert not hasattr(classifier, "model_")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(estimator, arrays, bad):
    X, labels, values = arrays
    y = target(estimator, labels, values)
    estimator.fit(X, y)
    X[5, 1, 2] = bad
    for call in (lambda: estimator.fit(X, y), lambda: estimator.predict(X)):
        with pytest.raises(ka.InputError, match="case 5, channel 1, step 2"):
            call()


def test_targets_that_do_not_fit_are_refused(arrays, small):
    X, labels, values = arrays
    for cls, y in ((AttentionClassifier, labels), (AttentionRegressor, values)):
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            cls(**small).fit(X, y[:-1])
    with pytest.raises(ValueError, match="1d array"):
        AttentionClassifier(**small).fit(X, np.stack([labels, labels], axis=1))
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        AttentionClassifier(**small).fit(X, values)
    with pytest.raises(ValueError, match="could not convert string"):
        AttentionRegressor(**small).fit(X, labels)


@pytest.mark.parametrize(("positions", "pooling"), [("learnt", "flatten"), ("fixed", "mean")])
def test_a_longer_sequence_gets_the_mean_of_its_windows(estimator, arrays, positions, pooling):
    """Of 13 steps a model of 5 sees 0..4, 4..8 and 8..12; shorter cases of the batch are as they were."""
    X, labels, values = arrays
    estimator.set_params(positions=positions, pooling=pooling, max_len=None)
    ragged = [case[:, : 4 + index % 2] for index, case in enumerate(X)]
    estimator.fit(ragged, target(estimator, labels, values))
    long = np.concatenate([X[0], X[1][:, :6]], axis=1)
    mixed = estimator._outputs([X[2][:, :4], long, X[3][:, :5]])
    windows = torch.stack([estimator._outputs([long[:, start : start + 5]])[0] for start in (0, 4, 8)])
    alone = torch.stack([estimator._outputs([case])[0] for case in (X[2][:, :4], X[3][:, :5])])
    torch.testing.assert_close(mixed[1], windows.mean(dim=0), atol=1e-5, rtol=0)
    torch.testing.assert_close(mixed[[0, 2]], alone, atol=1e-5, rtol=0)
    assert estimator.predict([long]).shape == (1,)


def test_a_model_of_one_length_takes_longer_sequences_where_max_len_leaves_room(arrays, small):
    X, labels, _ = arrays
    classifier = AttentionClassifier(**small).fit(X[..., :5], labels)
    assert classifier.predict(X[..., :4]).shape == (23,)
    with pytest.raises(
        ka.InputError, match=r"case 0 of X has 7 steps, and every sequence in fit had 5.*max_len=7"
    ):
        classifier.predict(X)
    classifier.set_params(max_len=7).fit(X[..., :5], labels)
    assert classifier.max_len_ == 7
    assert not torch.equal(classifier._outputs(X[..., :5]), classifier._outputs(X))


@pytest.mark.parametrize(("attention", "size"), [("primal", 1e20), ("softmax", -3e38)])
def test_a_value_beyond_float32_is_named(arrays, small, attention, size):
    """It is finite, but the model's numbers are not: there is no class to be confident of."""
    X, labels, values = arrays
    small = small | {"attention": attention, "attention_options": None}
    for fitted in (AttentionClassifier(**small).fit(X, labels), AttentionRegressor(**small).fit(X, values)):
        extreme = X.copy()
        extreme[5, 1, 2] = size
        for call in (fitted.predict, getattr(fitted, "predict_proba", fitted.predict)):
            with pytest.raises(
                ka.InputError, match=r"case 5 of X: value .* in channel 1, step 2 is .* standard deviations"
            ):
                call(extreme)
        assert isinstance(fitted.predict(np.delete(extreme, 5, axis=0)), np.ndarray)


def test_another_number_of_channels_is_refused(estimator, arrays):
    estimator.fit(arrays[0], target(estimator, *arrays[1:]))
    with pytest.raises(ka.InputError, match="X has 2 channels, expected 3"):
        estimator.predict(arrays[0][:, :2])
