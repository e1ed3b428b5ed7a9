"""Rocket stems in training: features computed once, their copies, and thresholds in what is saved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention import InputError
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import SequenceSplit, make_loader, rocket_features
from kernel_attention.series.closed_form import fit_temperature
from kernel_attention.series.members import train_member
from kernel_attention.series.settings import MemberSettings
from kernel_attention.solvers import least_squares_svm

MODEL = {
    "stem": "rocket", "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feedforward_dim": 16, "patch_len": 0,
    "views": ["raw", "normalized"], "pooling": "mean_max", "dropout": 0.0,
}  # fmt: skip


def waves(cases: int = 24) -> SequenceSplit:
    """Series of two frequencies and of different lengths."""
    generator = np.random.default_rng(0)
    targets = np.arange(cases) % 2
    sequences = []
    for target in targets:
        time = np.arange(generator.integers(20, 41))[:, None] + 10 * generator.random()
        series = np.sin((0.4 + 0.3 * target) * time) + 0.1 * generator.standard_normal((len(time), 2))
        sequences.append(series.astype(np.float32))
    return SequenceSplit(sequences, targets.astype(np.int64))


def member(**keys):
    settings = MemberSettings(
        epochs=4, batch_size=8, optimizer="radam", learning_rate=1e-3, weight_decay=0.0,
        positions="learnt", **MODEL, **keys,
    )  # fmt: skip
    return train_member(settings, waves(), waves(8), 2, 40)


def test_training_on_kept_features_is_training_on_series(monkeypatch):
    kept = member()
    monkeypatch.setattr(rocket_features, "_MOST_BYTES", 0)
    fresh = member()
    for first, second in zip(kept.rows, fresh.rows, strict=True):
        assert first["train_loss"] == pytest.approx(second["train_loss"], rel=1e-3)
        assert first["val_loss"] == pytest.approx(second["val_loss"], rel=1e-3)
    assert kept.model.state_dict().keys() == fresh.model.state_dict().keys()


def test_features_are_kept_in_half_precision_and_batches_are_float32():
    model, split = member().model, waves()
    features = rocket_features.split_features(model, split)
    whole = next(iter(make_loader(split, len(split))))
    exact = model.encoder.features(*whole.arguments)[:5].detach()
    assert {sequence.dtype for sequence in features.sequences} == {np.dtype(np.float16)}
    loader = make_loader(features, 5)
    batch = next(iter(loader))
    assert loader.dataset.versions[0][0].dtype == torch.float16
    assert batch.x.dtype == torch.float32
    real = batch.attention_mask
    torch.testing.assert_close(batch.x[real], exact[:, : real.size(1)][real], rtol=2**-11, atol=1e-7)


def test_augmented_copies_are_fewer_where_features_are_large(monkeypatch):
    model, split = member().model, waves()
    plain, copies = rocket_features.training_features(model, split, ["jitter"])
    assert len(copies) == 7
    assert [part.shape for part in copies[0]] == [part.shape for part in plain.sequences]
    assert any((one != other).any() for one, other in zip(copies[0], copies[1], strict=True))
    size = sum(part.nbytes for part in plain.sequences)
    for room, count in ((4, 3), (1, 0), (0.5, 0)):
        monkeypatch.setattr(rocket_features, "_KEPT_BYTES", int(room * size))
        assert len(rocket_features.training_features(model, split, ["jitter"]).copies) == count
    assert rocket_features.training_features(model, split, []).copies == []


def test_augmentation_changes_training_and_repeats_bit_for_bit():
    first, second, plain = member(augmentation=["jitter"]), member(augmentation=["jitter"]), member()
    losses = [[row["train_loss"] for row in each.rows] for each in (first, second, plain)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_a_readout_is_the_least_squares_machine_at_its_temperature():
    trained, split = member(readout=True), waves()
    model = trained.model
    with torch.no_grad():
        features = [model.encoder.features(torch.from_numpy(series)[None]) for series in split.sequences]
    read = torch.cat([part.mean(dim=1) for part in features])
    mean, deviation = read.mean(dim=0), read.std(dim=0, correction=0).clamp_min(1e-3)
    wanted = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])[torch.from_numpy(split.targets)]
    machine = least_squares_svm((read - mean) / deviation, wanted)
    temperature = fit_temperature(machine.left_out, torch.from_numpy(split.targets))
    expected = ((read - mean) / deviation @ machine.weight + machine.intercept) / temperature
    found = read @ model.readout_weight.mT + model.readout_bias
    # The kept features are half precision.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert (expected.argmax(dim=1) == torch.from_numpy(split.targets)).all()


def test_outputs_are_the_mean_of_head_and_readout_and_the_head_learns_alone():
    with_readout, without = member(readout=True), member()
    first, second = with_readout.model, without.model
    for name, parameter in second.named_parameters():
        assert torch.equal(parameter, dict(first.named_parameters())[name]), name
    assert [row["train_loss"] for row in with_readout.rows] == [row["train_loss"] for row in without.rows]
    x, mask, *_ = next(iter(make_loader(waves(5), 5)))
    with torch.no_grad():
        features, tokens = first.encoder.features(x, mask), first.encoder.token_mask(mask)
        read = torch.stack([part[real].mean(dim=0) for part, real in zip(features, tokens, strict=True)])
        expected = (second(x, mask) + read @ first.readout_weight.mT + first.readout_bias) / 2
        torch.testing.assert_close(first(x, mask), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(first.train()(x, mask), second.train()(x, mask))


def test_a_readout_needs_random_convolutions():
    with pytest.raises(InputError, match="readout=true needs stem=rocket"):
        MemberSettings(epochs=1, stem="linear", readout=True)
    with pytest.raises(InputError, match="readout=True needs stem='rocket'"):
        SequenceClassifier(2, 2, 9, embed_dim=8, num_heads=2, feedforward_dim=8, readout=True)


@pytest.mark.parametrize(
    "kind", [AttentionClassifier, pytest.param(AttentionRegressor, marks=pytest.mark.slow)]
)
def test_estimators_with_readouts_are_saved_and_repeat(kind, tmp_path):
    split = waves()
    X, y = [series.T for series in split.sequences], split.targets
    options = {"n_estimators": 2, "epochs": 2, "random_state": 0, "embed_dim": 8, "num_heads": 2}
    options["closed_form"] = False
    first = kind(**options, readout=True).fit(X, y)
    second = kind(**options, readout=True).fit(X, y)
    assert (first.predict(X) == second.predict(X)).all()
    # Series of at most 256 steps: the second member learns its convolutions and has none to read.
    assert [model.has_readout for model in first.models_] == [True, False]
    first.save(tmp_path / "estimator.safetensors")
    assert (kind.load(tmp_path / "estimator.safetensors").predict(X) == first.predict(X)).all()
    answers = "predict_proba" if kind is AttentionClassifier else "predict"
    without = kind(**options).fit(X, y)
    assert (getattr(first, answers)(X) != getattr(without, answers)(X)).any()


def test_a_readout_of_one_case_gives_its_value():
    regressor = AttentionRegressor(n_estimators=1, epochs=1, embed_dim=8, num_heads=2, readout=True)
    (model,) = regressor.fit(np.ones((1, 2, 20)), [3.0]).models_
    assert model.has_readout
    assert not model.readout_weight.any()
    assert not model.readout_bias.any()  # 3, in units of the targets' scale around their mean
