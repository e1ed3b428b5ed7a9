"""Training of series: schedule, smoothing, weights, mixup, averages, patience and the limit of time."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.limits import Deadline
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import SequenceSplit, make_loader
from kernel_attention.series.augmentation import mix_series
from kernel_attention.series.closed_form import fit_temperature
from kernel_attention.series.members import (
    automatic_batch_size,
    automatic_epochs,
    automatic_steps,
    train_member,
)
from kernel_attention.series.settings import MemberSettings
from kernel_attention.series.task import SequenceTask, TimeSeriesTask

SMALL = {
    "attention": "softmax", "stem": "linear", "patch_len": 1, "views": ["raw"], "pooling": "flatten",
    "positions": "learnt", "optimizer": "radam", "learning_rate": 1e-3, "weight_decay": 0.0,
    "embed_dim": 8, "num_heads": 2, "num_layers": 1,
    "feedforward_dim": 16, "dropout": 0.0, "batch_size": 8, "epochs": 3, "accelerator": "cpu",
}  # fmt: skip


def settings(**changes) -> MemberSettings:
    return MemberSettings(**SMALL | changes)


def split(weights=None) -> SequenceSplit:
    """30 cases of three unequal classes, which the level of a channel tells apart."""
    generator = np.random.default_rng(0)
    targets = np.repeat([0, 1, 2], [18, 9, 3])
    sequences = [
        (generator.normal(size=(int(length), 2)) + target).astype(np.float32)
        for target, length in zip(targets, generator.integers(4, 9, size=30), strict=True)
    ]
    return SequenceSplit(sequences, targets.astype(np.int64), weights)


def model(settings: MemberSettings) -> SequenceClassifier:
    torch.manual_seed(0)
    return SequenceClassifier(2, 3, 8, **settings.encoder_options())


def made_task(made: MemberSettings, **options) -> TimeSeriesTask:
    return TimeSeriesTask(model(made), made.train_settings(), made, **options)


def loss_of(made: MemberSettings, batch, task=None) -> torch.Tensor:
    """The loss of a training step, without a trainer to log to."""
    task = task or made_task(made)
    task.log_dict = lambda *_, **__: None
    return task.training_step(batch)


def test_the_cosine_falls_from_the_warm_up_to_zero():
    made = settings(epochs=10, warmup_epochs=2, schedule="cosine")
    factors = [made.learning_rate_factor(step, 5) for step in range(51)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[30] == pytest.approx(0.5)
    assert factors[50] == pytest.approx(0.0, abs=1e-15)
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[10:]))
    constant = settings(epochs=10, warmup_epochs=2)
    assert {constant.learning_rate_factor(step, 5) for step in range(10, 50)} == {1.0}


def test_the_defaults_train_as_before():
    """Bit for bit: the papers' models have none of the options."""
    batch = next(iter(make_loader(split(), 8, shuffle=True)))
    assert torch.equal(
        loss_of(settings(), batch),
        loss_of(settings(), batch, SequenceTask(model(settings()), settings().train_settings())),
    )


def test_label_smoothing_is_that_of_torch_and_of_training_alone():
    made, batch = settings(label_smoothing=0.2), next(iter(make_loader(split(), 8, shuffle=True)))
    logits = model(made)(*batch.arguments)
    expected = F.cross_entropy(logits, batch.target, label_smoothing=0.2)
    torch.testing.assert_close(loss_of(made, batch), expected)
    task = made_task(made).eval()
    torch.testing.assert_close(task._measure(logits, batch)[0], F.cross_entropy(logits, batch.target))


def test_weights_multiply_the_losses():
    weights = np.linspace(0.1, 1.9, 30).astype(np.float32)
    batch = next(iter(make_loader(split(weights), 8, shuffle=True)))
    logits = model(settings())(*batch.arguments)
    losses = F.cross_entropy(logits, batch.target, reduction="none")
    torch.testing.assert_close(loss_of(settings(), batch), (losses * batch.weight).mean())
    same = next(iter(make_loader(split(np.ones(30, np.float32)), 8, shuffle=True)))
    torch.testing.assert_close(loss_of(settings(), same), losses.mean())


def test_several_targets_of_a_case_count_the_same():
    """The loss of a case is the mean over its targets, times its weight, with or without weights."""
    made = settings()
    values = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
    weights = np.linspace(0.1, 1.9, 30).astype(np.float32)
    for given in (None, weights):
        batch = next(iter(make_loader(SequenceSplit(split().sequences, values, given), 8, shuffle=True)))
        task = made_task(made, is_regression=True)
        outputs = task.model(*batch.arguments)
        losses = ((outputs - batch.target) ** 2).mean(dim=1)
        weight = torch.ones(8) if given is None else batch.weight
        loss, _, figure = task._measure(outputs, batch)
        torch.testing.assert_close(loss, (losses * weight).mean())
        torch.testing.assert_close(figure, ((losses * weight).sum() / weight.sum()).detach())
        share = torch.linspace(0.1, 0.9, 8)
        torch.testing.assert_close(task._measure(outputs, batch, share)[0], (losses * weight * share).mean())


def test_balanced_weights_give_every_class_the_same_sum():
    balanced = split().balanced()
    sums = [balanced.weights[balanced.targets == label].sum() for label in range(3)]
    assert sums == pytest.approx([10.0, 10.0, 10.0])
    assert balanced.subset(np.array([29, 0])).weights.tolist() == pytest.approx([10 / 3, 10 / 18])
    assert balanced.joined(split()).weights[30:].tolist() == [1.0] * 30
    with pytest.raises(InputError, match="30 targets but 2 weights"):
        split(np.ones(2, np.float32))


def test_the_loss_of_a_mixture_is_the_mixture_of_the_losses():
    made, batch = settings(mixup=1.0), next(iter(make_loader(split(), 8, shuffle=True)))
    loss = loss_of(made, batch)
    net = model(made)  # leaves the generator where the training step found it
    mixed = mix_series(batch.x, batch.attention_mask, 1.0)
    logits = net(mixed.x, mixed.attention_mask)
    own = F.cross_entropy(logits, batch.target, reduction="none")
    other = F.cross_entropy(logits, batch.target[mixed.partner], reduction="none")
    torch.testing.assert_close(loss, (mixed.weight * own + (1 - mixed.weight) * other).mean())


@pytest.mark.parametrize(
    "changes",
    [
        {"augmentation": ["jitter", "scale", "time_warp", "window", "cut"]},
        {"mixup": 0.4, "label_smoothing": 0.1},
        {"schedule": "cosine", "warmup_epochs": 1, "optimizer": "adamw"},
        {"stem": "convolution", "stem_layers": 2, "ema_decay": 0.9, "views": ["raw", "normalized"]},
    ],
)
def test_a_seed_repeats_a_training_bit_for_bit(changes):
    made = settings(seed=5, **changes)
    first, second = (train_member(made, split(), None, 3, 8).model.state_dict() for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_weights_that_are_kept_are_their_moving_average():
    made = settings(ema_decay=0.5, epochs=1, batch_size=30)
    start = model(made).state_dict()
    end = train_member(dataclasses.replace(made, ema_decay=0.0), split(), None, 3, 8).model
    average = train_member(made, split(), None, 3, 8).model
    assert not torch.equal(end.head.weight, start["head.weight"])
    # The average begins with the first weights that it sees, those after the first step.
    torch.testing.assert_close(average.head.weight, end.head.weight)
    longer = dataclasses.replace(made, epochs=4)
    end = train_member(dataclasses.replace(longer, ema_decay=0.0), split(), None, 3, 8).model
    average = train_member(longer, split(), None, 3, 8).model
    assert not torch.allclose(average.head.weight, end.head.weight)


def test_training_ends_when_its_patience_is_used_up():
    """Targets without a pattern: the held-out loss soon rises."""
    noise = SequenceSplit(split().sequences, np.random.default_rng(1).permutation(split().targets))
    train, held_out = noise.subset(np.arange(0, 30, 2)), noise.subset(np.arange(1, 30, 2))
    made = settings(epochs=200, learning_rate=0.05, patience=3)
    member = train_member(made, train, held_out, 3, 8)
    assert len(member.rows) == member.best_epoch + 3 < 200


def test_training_ends_when_its_time_is_over_and_the_rate_falls_with_the_clock():
    made = settings(epochs=100_000, schedule="cosine")
    member = train_member(made, split(), None, 3, 8, deadline=Deadline(1.0))
    assert 1 <= len(member.rows) < 100_000
    task = made_task(made, max_seconds=10.0)
    assert task._steps_by_clock(1000) == 0
    task._started = -math.inf
    assert task._steps_by_clock(1000) == 1000


@pytest.mark.parametrize(("cases", "size"), [(1, 8), (40, 8), (150, 8), (270, 16), (6600, 64)])
def test_sizes_follow_from_the_number_of_cases(cases, size):
    assert automatic_batch_size(cases) == size
    epochs = automatic_epochs(cases, size, 1500)
    assert epochs >= 20
    assert epochs == 20 or epochs * math.ceil(cases / size) == pytest.approx(1500, rel=0.1)


@pytest.mark.parametrize(("size", "tokens", "steps"), [(8, 10, 1500), (16, 75, 1250), (64, 128, 1000)])
def test_steps_follow_from_the_tokens_of_a_batch(size, tokens, steps):
    assert automatic_steps(size, tokens) == steps


def test_the_temperature_undoes_a_factor_of_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=generator)
    targets = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
    # The deviation of the estimate is some 1 / sqrt(4000), and the prior of log T hardly moves it.
    assert fit_temperature(3 * logits, targets) == pytest.approx(3.0, rel=0.1)
    assert fit_temperature(logits / 4, targets) == pytest.approx(0.25, rel=0.1)


def test_few_cases_that_are_all_right_make_no_model_certain():
    logits = torch.eye(4)[[0, 1, 2]] * 2
    assert 0.3 < fit_temperature(logits, torch.tensor([0, 1, 2])) < 1


def test_warm_up_must_end_before_training():
    with pytest.raises(InputError, match="warmup_epochs=3 must be below epochs=3"):
        settings(warmup_epochs=3)
    with pytest.raises(InputError, match=r"augmentation=.*must be"):
        settings(augmentation=["warp"])
