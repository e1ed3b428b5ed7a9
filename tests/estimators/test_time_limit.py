"""A time limit, on a clock that counts work: a second for ten million values of convolutions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernel_attention as ka
from kernel_attention import limits
from kernel_attention.estimators import ensemble
from kernel_attention.series import members, rocket_features, task

VALUES_A_SECOND = 1e7


@pytest.fixture
def clock(monkeypatch):
    """Seconds of work so far, in a list of one."""
    seconds = [0.0]
    convolve = torch.nn.functional.conv1d

    def counted(*arguments, **options):
        values = convolve(*arguments, **options)
        seconds[0] += values.numel() / VALUES_A_SECOND
        return values

    monkeypatch.setattr(torch.nn.functional, "conv1d", counted)
    for module in (limits, members, rocket_features, task):
        monkeypatch.setattr(module, "now", lambda: seconds[0])
    return seconds


def noise(cases, steps):
    generator = np.random.default_rng(0)
    return generator.normal(size=(cases, 1, steps)), np.arange(cases) % 2


@pytest.mark.parametrize(("cases", "steps"), [(40, 200), (400, 50), (60, 700)])
@pytest.mark.parametrize("limit", [1.0, 3.0, 10.0])
def test_all_that_a_fit_reads_ends_in_time(clock, cases, steps, limit):
    X, y = noise(cases, steps)
    ka.AttentionClassifier(epochs=2, embed_dim=8, random_state=0, time_limit=limit).fit(X, y)
    assert clock[0] <= 1.15 * limit


@pytest.mark.parametrize("limit", [1.0, 3.0, 10.0])
def test_series_of_any_length_are_read_in_time(clock, limit):
    X, y = noise(60, 700)
    lengths = np.random.default_rng(1).integers(20, 701, 60)
    series = [case[:, :length] for case, length in zip(X, lengths, strict=True)]
    ka.AttentionClassifier(epochs=2, embed_dim=8, random_state=0, time_limit=limit).fit(series, y)
    assert clock[0] <= 1.15 * limit


def test_what_does_not_fit_is_smaller_or_left_out_and_the_members_have_no_share(clock):
    X, y = noise(60, 700)
    found = ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, time_limit=2.0).fit(X, y)
    assert "hydra" not in found.closed_form_weights_
    assert found.member_weight_ == 0
    assert np.isfinite(found.predict_proba(X)).all()
    views, sizes = found.closed_form_.options["views"], found.closed_form_.options["sizes"]
    assert set(sizes) <= set(views)


def test_a_view_of_fewer_kernels_is_in_the_file(clock, tmp_path):
    X, y = noise(40, 200)
    for limit in (1.5, 2.0, 2.5, 3.0):
        found = ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, time_limit=limit).fit(X, y)
        if found.closed_form_.sizes:
            break
    assert min(found.closed_form_.sizes.values()) < 1
    found.save(tmp_path / "classifier.safetensors")
    loaded = ka.AttentionClassifier.load(tmp_path / "classifier.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(X), found.predict_proba(X))


def test_a_regressor_without_time_has_intervals_of_left_out_cases(clock):
    X, _ = noise(60, 700)
    regressor = ka.AttentionRegressor(epochs=1, embed_dim=8, random_state=0, time_limit=1.0)
    regressor.fit(X, X[:, 0].std(axis=1))
    assert len(regressor.residuals_) == 60
    low, high = regressor.predict_interval(X, 0.8).T
    assert (low < high).all()


def test_few_held_out_cases_judge_no_member(clock):
    X, y = noise(60, 700)
    found = ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, time_limit=1.0).fit(X, y)
    assert ensemble.FEWEST_JUDGED == 20
    assert found.temperature_ == 1


def test_of_many_cases_a_member_beside_the_closed_form_reads_a_part(monkeypatch):
    monkeypatch.setattr(ensemble, "_MOST_READ", 20)
    read = []
    train = ensemble.train_member

    def counted(settings, split, *arguments, **options):
        read.append(len(split))
        return train(settings, split, *arguments, **options)

    monkeypatch.setattr(ensemble, "train_member", counted)
    X, y = noise(60, 20)
    for closed_form in (True, False):
        parameters = {"closed_form": closed_form, "calibrate": False}
        ka.AttentionClassifier(epochs=1, embed_dim=8, random_state=0, **parameters).fit(X, y)
    assert read == [20, 60]
