"""Predictions of classifiers with an uncertainty: methods, and their figures on three sets of cases.

The methods need no training of their own. ``plain``: one pass in evaluation mode. ``temperature``: its logits
divided by a temperature that is fitted to validation cases (Guo et al. 2017). ``samples``: the mean over
passes of layers that sample, for models with ``kernel_gp`` or ``sgpa``; ``dropout``: MC dropout (Gal &
Ghahramani 2016), for other models with dropout. ``ensemble``: the mean over models that differ in their seed
(Lakshminarayanan et al. 2017).

Legend: n cases, k classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kernel_attention.analysis.predictive import has_samples, predict_distribution
from kernel_attention.errors import InputError, require_positive
from kernel_attention_lab.packing import LEVELS, pack_bits, pack_levels, unpack_bits, unpack_levels
from kernel_attention_lab.robustness.calibration import calibration_figures, reliability, risk_coverage
from kernel_attention_lab.robustness.out_of_distribution import detection_figures, score_levels
from kernel_attention_lab.robustness.pixel_logits import Inputs, input_logits, placed

SAMPLES = 10
NLL_STEPS = 8  # levels a nat
_COVERAGES = np.linspace(0.05, 1, 20)

Probabilities = dict[str, np.ndarray]
"""By set of cases, (n, k) each."""


class LabelledInputs(NamedTuple):
    """The cases of a set as a model takes them, and their classes (n,)."""

    inputs: Inputs
    targets: np.ndarray


class UncertainCases(NamedTuple):
    """The cases that uncertainty is measured on.

    known: cases of the classes.
    corrupted: corrupted versions of ``distinct`` cases, first one version of each, then the next; or None.
    unseen: cases of none of the classes; or None.
    validation: cases of the classes that did not train the model; None: no temperature is fitted.
    distinct: the number of cases behind ``corrupted``.
    """

    known: LabelledInputs
    corrupted: LabelledInputs | None = None
    unseen: Inputs | None = None
    validation: LabelledInputs | None = None
    distinct: int = 0

    @property
    def sets(self) -> dict[str, Inputs]:
        """The inputs by the name of the set, without ``validation``."""
        found = {"known": self.known.inputs}
        found |= {} if self.corrupted is None else {"corrupted": self.corrupted.inputs}
        return found | ({} if self.unseen is None else {"unseen": self.unseen})


def measure_uncertainty(
    models: Sequence[nn.Module],
    cases: UncertainCases,
    *,
    samples: int = SAMPLES,
    on_progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """The figures of every method of one model, or of the ensemble of several.

    Args:
        models: each gives logits (B, k) for a batch of the cases.
        cases: as the models take them.
        samples: passes of a method that samples.
        on_progress: called with the name of a method that begins.

    Returns:
        A record of JSON's types: ``cases`` by set; ``samples``; ``temperature``, where one was fitted;
        ``methods``: by name, ``seconds`` of its predictions and ``uncertainty_figures``.
    """
    require_positive(samples=samples)
    say = on_progress or (lambda line: None)
    record: dict[str, Any] = {}
    methods: dict[str, Any] = {}

    def keep(name: str, begun: float, predicted: Probabilities) -> None:
        record["cases"] = {name: len(of_set) for name, of_set in predicted.items()}
        figures = uncertainty_figures(predicted, cases)
        methods[name] = {"seconds": round(time.perf_counter() - begun, 2)} | figures

    begun = time.perf_counter()
    if len(models) > 1:
        say("ensemble")
        members = [_softmax(_logits(model, cases.sets)) for model in models]
        mean = {name: np.mean([member[name] for member in members], axis=0) for name in cases.sets}
        keep("ensemble", begun, mean)
        return record | {"members": len(models), "methods": methods}
    (model,) = models
    say("plain")
    logits = _logits(model, cases.sets)
    keep("plain", begun, _softmax(logits))
    if cases.validation is not None:
        # scikit-learn, which comes with it, takes seconds.
        from kernel_attention.series.closed_form import fit_temperature

        held_out = input_logits(model, cases.validation.inputs)
        temperature = fit_temperature(held_out, torch.from_numpy(cases.validation.targets))
        record |= {"temperature": temperature, "validation_cases": len(held_out)}
        scaled = {name: each / temperature for name, each in logits.items()}
        keep("temperature", begun, _softmax(scaled))
    if name := sampling_method(model):
        say(name)
        begun = time.perf_counter()
        drawn = {
            key: sampled_probabilities(model, inputs, samples, dropout=name == "dropout")
            for key, inputs in cases.sets.items()
        }
        keep(name, begun, drawn)
        record["samples"] = samples
    return record | {"methods": methods}


def sampling_method(model: nn.Module) -> str | None:
    """``samples`` for a model with layers that sample, else ``dropout`` for one with dropout, else None."""
    if has_samples(model):
        return "samples"
    has_dropout = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    return "dropout" if has_dropout else None


def sampled_probabilities(
    model: nn.Module, inputs: Inputs, samples: int = SAMPLES, *, dropout: bool = False, seed: int = 0
) -> np.ndarray:
    """Mean probabilities (n, k) over ``samples`` passes; the global generators stay as they were.

    Args:
        model: gives logits (B, k), with something that samples.
        inputs: batches of its arguments.
        samples: passes.
        dropout: whether dropout samples too.
        seed: of the draws.
    """
    like = next(model.parameters())
    devices = [like.device] if like.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        parts = [
            predict_distribution(model, placed(batch, model), samples, dropout=dropout).probabilities.cpu()
            for batch in inputs
        ]
    return torch.cat(parts).numpy()


def uncertainty_figures(predicted: Probabilities, cases: UncertainCases) -> dict[str, dict[str, Any]]:
    """The figures of one method by set of cases, in JSON's types.

    Args:
        predicted: the probabilities, by the names of ``cases.sets``.
        cases: their targets.

    Returns:
        ``known``: ``calibration_figures``; ``reliability``, its bins; ``risk``, the share of wrong cases
        among the least uncertain ones at coverages of 5 %, 10 %, .., 100 %; what paired tests need
        (``answers_of``). ``corrupted``: ``calibration_figures`` over all versions, and ``nll_by_image``, the
        mean over the versions of an image or a text. ``unseen``: ``detection_figures`` by one minus the
        confidence, and the ``levels`` of both sets.
    """
    known, targets = predicted["known"], cases.known.targets
    doubt, is_right = 1 - known.max(axis=1), known.argmax(axis=1) == targets
    diagram = reliability(known, targets)
    risk = risk_coverage(is_right, doubt)
    places = np.ceil(_COVERAGES * len(risk) - 1e-9).astype(int).clip(1) - 1
    found: dict[str, dict[str, Any]] = {
        "known": {
            **calibration_figures(known, targets),
            "reliability": {name: values.round(5).tolist() for name, values in diagram._asdict().items()},
            "risk": risk[places].round(5).tolist(),
            "bits": pack_bits(is_right),
            "confidence_levels": pack_levels(np.rint((LEVELS - 1) * (1 - doubt)).astype(int)),
            "nll_levels": pack_levels(np.minimum(NLL_STEPS * _nll(known, targets), LEVELS - 1).astype(int)),
        }
    }
    if cases.corrupted is not None:
        corrupted, targets = predicted["corrupted"], cases.corrupted.targets
        by_image = _nll(corrupted, targets).reshape(-1, cases.distinct).mean(axis=0)
        found["corrupted"] = calibration_figures(corrupted, targets) | {
            "nll_by_image": by_image.round(4).tolist()
        }
    if cases.unseen is not None:
        unseen = 1 - predicted["unseen"].max(axis=1)
        levels = zip(("in", "out"), map(pack_levels, score_levels(doubt, unseen)), strict=True)
        found["unseen"] = detection_figures(doubt, unseen) | {"levels": dict(levels)}
    return found


class Answers(NamedTuple):
    """The answers to the known cases as a record keeps them, (n,) each.

    is_right: whether the class is right.
    confidence: to 1/63.
    nll: negative log-likelihood in nats, in the middle of steps of 1/8; the last step has all above 7.9.
    """

    is_right: np.ndarray
    confidence: np.ndarray
    nll: np.ndarray


def answers_of(known: Mapping[str, Any], cases: int) -> Answers:
    """The answers in the ``known`` figures of a record.

    Raises:
        InputError: for other texts, or another number of cases.
    """
    levels = [unpack_levels(known[name], cases) for name in ("confidence_levels", "nll_levels")]
    return Answers(unpack_bits(known["bits"], cases), levels[0] / (LEVELS - 1), (levels[1] + 0.5) / NLL_STEPS)


def _nll(probabilities: np.ndarray, targets: np.ndarray) -> np.ndarray:
    chosen = probabilities[np.arange(len(targets)), targets]
    found: np.ndarray = -np.log(np.maximum(chosen, 1e-12))
    return found


def _logits(model: nn.Module, sets: Mapping[str, Inputs]) -> dict[str, torch.Tensor]:
    return {name: input_logits(model, inputs).double() for name, inputs in sets.items()}


def _softmax(logits: Mapping[str, torch.Tensor]) -> Probabilities:
    return {name: each.softmax(dim=1).numpy() for name, each in logits.items()}


def require_members(count: int, where: str) -> None:
    """InputError where an ensemble would have fewer than two members."""
    if count < 2:
        raise InputError(f"ensemble: {where} has {count} trained model, accepted: 2 and more seeds")
