"""The methods of uncertainty are what they say, and a record keeps what its figures follow from."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernel_attention.models import VisionTransformer
from kernel_attention.series.closed_form import fit_temperature
from kernel_attention_lab.data.images.splits import ImageSplit
from kernel_attention_lab.robustness import (
    LabelledInputs,
    UncertainCases,
    answers_of,
    calibration_figures,
    detection_figures,
    measure_uncertainty,
    sampled_probabilities,
)
from kernel_attention_lab.robustness.pixel_logits import PixelBatches, pixel_logits

N, DISTINCT, UNSEEN = 53, 7, 29


def split(generator, count):
    images = generator.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    return ImageSplit(images, generator.integers(0, 4, count))


class Images(NamedTuple):
    known: ImageSplit
    corrupted: ImageSplit
    unseen: np.ndarray
    validation: ImageSplit

    @property
    def cases(self) -> UncertainCases:
        known, corrupted, validation = (
            LabelledInputs(PixelBatches(each.images), each.targets)
            for each in (self.known, self.corrupted, self.validation)
        )
        return UncertainCases(known, corrupted, PixelBatches(self.unseen), validation, DISTINCT)


@pytest.fixture
def images() -> Images:
    generator = np.random.default_rng(0)
    once = split(generator, DISTINCT)
    corrupted = ImageSplit(np.concatenate([once.images, 255 - once.images]), np.tile(once.targets, 2))
    return Images(split(generator, N), corrupted, split(generator, UNSEEN).images, split(generator, 41))


def make_model(attention="softmax", dropout=0.0, seed=0) -> VisionTransformer:
    torch.manual_seed(seed)
    model = VisionTransformer(
        (8, 8), num_outputs=4, attention=["softmax", attention], embed_dim=12, num_heads=2, num_layers=2,
        feedforward_dim=16, patch_size=4, dropout=dropout,
    )  # fmt: skip
    nn.init.normal_(model.head.weight, std=2.0)
    return model.eval()


def test_plain_and_temperature_are_softmax_of_the_logits(images):
    model = make_model()
    record = measure_uncertainty([model], images.cases)
    assert list(record["methods"]) == ["plain", "temperature"], "nothing in the model samples"
    logits = pixel_logits(model, images.known.images).double()
    held_out = pixel_logits(model, images.validation.images)
    assert record["temperature"] == fit_temperature(held_out, torch.from_numpy(images.validation.targets))
    for name, temperature in (("plain", 1.0), ("temperature", record["temperature"])):
        probabilities = (logits / temperature).softmax(1).numpy()
        expected = calibration_figures(probabilities, images.known.targets)
        assert expected.items() <= record["methods"][name]["known"].items()
        unseen = (pixel_logits(model, images.unseen).double() / temperature).softmax(1).numpy()
        expected = detection_figures(1 - probabilities.max(1), 1 - unseen.max(1))
        assert expected.items() <= record["methods"][name]["unseen"].items()
    plain, scaled = (record["methods"][name]["known"] for name in ("plain", "temperature"))
    assert scaled["accuracy"] == plain["accuracy"]
    assert record["temperature"] > 1, "labels are random, so these logits are too large"
    assert scaled["nll"] < plain["nll"]


def test_the_temperature_is_the_most_likely_one():
    """Logits three times those that drew the labels: the temperature is 3, but for the prior's pull."""
    torch.manual_seed(0)
    honest = torch.randn(20_000, 5)
    targets = torch.distributions.Categorical(logits=honest).sample()
    assert fit_temperature(3 * honest, targets) == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize(
    ("attention", "dropout", "method"),
    [("softmax", 0.2, "dropout"), ({"kernel_gp": {"rank": 3}}, 0.2, "samples"), ("sgpa", 0.0, "samples")],
)
def test_what_samples_is_sampled(images, attention, dropout, method):
    model = make_model(attention, dropout)
    before = torch.random.get_rng_state()
    record = measure_uncertainty([model], images.cases, samples=3)
    assert torch.equal(torch.random.get_rng_state(), before), "the global generator was touched"
    assert not any(each.training for each in model.modules())
    assert list(record["methods"]) == ["plain", "temperature", method]
    drawn = sampled_probabilities(model, images.cases.known.inputs, 3, dropout=method == "dropout")
    expected = calibration_figures(drawn, images.known.targets)
    assert expected.items() <= record["methods"][method]["known"].items()
    plain = pixel_logits(model, images.known.images).softmax(1).numpy()
    assert np.abs(drawn - plain).max() > 1e-4
    many = sampled_probabilities(model, images.cases.known.inputs, 200, dropout=method == "dropout")
    np.testing.assert_allclose(many.sum(1), 1, atol=1e-6)


def test_an_ensemble_is_the_mean_of_its_members(images):
    members = [make_model(seed=seed) for seed in range(3)]
    record = measure_uncertainty(members, images.cases)
    assert (record["members"], list(record["methods"])) == (3, ["ensemble"])
    each = [pixel_logits(model, images.known.images).double().softmax(1).numpy() for model in members]
    found = record["methods"]["ensemble"]["known"]
    assert calibration_figures(np.mean(each, axis=0), images.known.targets).items() <= found.items()
    # Jensen: -log is convex.
    assert found["nll"] <= np.mean([calibration_figures(p, images.known.targets)["nll"] for p in each])


def test_a_record_keeps_the_answers_behind_its_figures(images):
    record = json.loads(json.dumps(measure_uncertainty([make_model()], images.cases), allow_nan=False))
    assert record["cases"] == {"known": N, "corrupted": 2 * DISTINCT, "unseen": UNSEEN}
    model = make_model()
    logits = pixel_logits(model, images.known.images).double()
    known = record["methods"]["plain"]["known"]
    answers = answers_of(known, N)
    nll = F.cross_entropy(logits, torch.from_numpy(images.known.targets), reduction="none").numpy()
    np.testing.assert_array_equal(answers.is_right, logits.argmax(1).numpy() == images.known.targets)
    np.testing.assert_allclose(answers.confidence, logits.softmax(1).amax(1), atol=0.5 / 63 + 1e-9)
    np.testing.assert_allclose(answers.nll[nll < 7.9], nll[nll < 7.9], atol=1 / 16 + 1e-9)
    corrupted = pixel_logits(model, images.corrupted.images).double()
    targets = torch.from_numpy(images.corrupted.targets)
    nll = F.cross_entropy(corrupted, targets, reduction="none").clamp_max(-math.log(1e-12))
    by_image = nll.reshape(2, DISTINCT).mean(0)
    found = record["methods"]["plain"]["corrupted"]
    np.testing.assert_allclose(found["nll_by_image"], by_image, atol=6e-5)
    assert known["risk"][-1] == pytest.approx(1 - known["accuracy"], abs=1e-5)
    assert sum(known["reliability"]["cases"]) == N


def test_sets_that_are_not_there_have_no_figures(images):
    alone = UncertainCases(images.cases.known)
    record = measure_uncertainty([make_model()], alone)
    assert list(record["methods"]) == ["plain"], "no temperature without validation images"
    assert list(record["methods"]["plain"]) == ["seconds", "known"]
