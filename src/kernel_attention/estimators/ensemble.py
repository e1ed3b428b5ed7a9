"""The members of an estimator: which cases train each, their training, and what they give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.base import is_regressor
from torch import Tensor

from kernel_attention.errors import note_once
from kernel_attention.estimators.parameters import Callback, callback_list, derived_seed, member_settings
from kernel_attention.fields import checked, plain
from kernel_attention.limits import Deadline
from kernel_attention.mechanisms import dropped_objective
from kernel_attention.models import SequenceClassifier
from kernel_attention.models.rocket_stem import RocketStem, cases_at_once
from kernel_attention.series import SequenceSplit, stratified_split, windows_of
from kernel_attention.series.members import Member, seconds_of_case, train_member
from kernel_attention.series.outputs import predict_outputs
from kernel_attention.series.rocket_features import FITTED_CASES
from kernel_attention.series.settings import MemberSettings
from kernel_attention.training.modes import in_plain_modes
from kernel_attention.training.processes import training_device

FEWEST_JUDGED = 20
"""Cases below which none is held out for probabilities, the share of members, or intervals."""

_CALIBRATION_PART = 0.2
_PREDICTED_AT_ONCE = 64
_MOST_READ = 4096  # training cases of a member beside a closed form, whose features are in memory
_READING_PART = 0.6  # of a member's time, for all but its steps of training
_FEWEST_FITTED = 4
_MARGIN = 1.3  # on what reading a case takes


class MemberPlan(NamedTuple):
    """The training of one model: its seed, its cases, those held out, and whether these choose the epoch."""

    seed: int
    kept: SequenceSplit
    held_out: SequenceSplit | None = None
    selects: bool = False


def plan_members(
    estimator: Any, split: SequenceSplit, validation: SequenceSplit | None, seeds: list[int], *, judges: bool
) -> list[MemberPlan]:
    """The plan of every model; one more than there are members where a single one is to be judged.

    Beside a closed form, which reads all cases, a single member itself holds cases out.

    Args:
        estimator: whose parameters say what is held out.
        split: the training cases.
        validation: given held-out cases.
        seeds: of the members.
        judges: whether cases are held out to judge the answers, where none are held out otherwise.
    """
    task = "regression" if is_regressor(estimator) else "classification"
    if validation is not None:
        return [MemberPlan(seed, split, validation, True) for seed in seeds]
    fraction = estimator.validation_fraction
    if fraction is not None:
        checked(MemberSettings, "validation_fraction", fraction)
        return [MemberPlan(seed, *stratified_split(split, fraction, seed, task), True) for seed in seeds]
    plan = [MemberPlan(seed, split) for seed in seeds]
    if judges:
        # The last of several members holds cases out; a single one needs a second model that does.
        has_part = len(seeds) > 1 or bool(estimator.closed_form)
        seed = seeds[-1] if has_part else derived_seed(seeds[0], 1)
        parted = MemberPlan(seed, *stratified_split(split, _CALIBRATION_PART, seed, task))
        plan = [*plan[:-1], parted] if has_part else [*plan, parted]
    return plan


def train_members(
    estimator: Any,
    plan: list[MemberPlan],
    split: SequenceSplit,
    num_outputs: int,
    max_len: int,
    earlier: Sequence[SequenceClassifier],
    deadline: Deadline,
) -> tuple[list[Member], list[tuple[Tensor, SequenceSplit]]]:
    """Train the models of a plan in turn, and judge those that hold cases out.

    Args:
        estimator: with the parameters.
        plan: of ``plan_members``.
        split: the training cases, all of which train a member anew with ``refit``.
        num_outputs: of a model.
        max_len: of a model.
        earlier: the models of the last fit, which the first of the plan continue.
        deadline: by which all of this is done. Where it is near, members read a part of the cases, and
            none is judged by a handful of them.

    Returns:
        The models, and the outputs on held-out cases with these.
    """
    callbacks = callback_list(estimator.callbacks)
    members: list[Member] = []
    judged: list[tuple[Tensor, SequenceSplit]] = []
    for index, (seed, kept, held_out, selects) in enumerate(plan):
        settings = member_settings(estimator, seed, len(kept), max_len, index)
        if index == 0:
            dropped = dropped_objective(settings.named_layers())
            if dropped is not None:
                note_once(dropped)
        if estimator.closed_form and not selects and len(kept) > _MOST_READ:
            share = _MOST_READ / len(kept)
            kept = _part_of(kept, share, seed)
            held_out = None if held_out is None else _part_of(held_out, share, seed)
        own, fitted_cases = deadline.part(1 / (len(plan) - index)), FITTED_CASES
        training = own
        if own.is_set:
            work = _work_in_time(
                settings, MemberPlan(seed, kept, held_out, selects), num_outputs, max_len, own
            )
            kept, held_out, fitted_cases, reserve = work
            training = own.part(0.5 if selects and estimator.refit else 1.0, reserve)
        continues = index < len(earlier)
        before = [row for row in estimator.history_ if row["member"] == index] if continues else []
        sizes = (num_outputs, max_len)
        options: dict[str, Any] = {
            "is_regression": is_regressor(estimator), "fitted_cases": fitted_cases,
            "progress": bool(estimator.verbose), "start": earlier[index].state_dict() if continues else None,
        }  # fmt: skip
        watch = _watch(callbacks, before, index)
        chooses = held_out if selects else None
        member = train_member(settings, kept, chooses, *sizes, watch=watch, deadline=training, **options)
        if held_out is not None:
            outputs = member_outputs(estimator, member.model, held_out.sequences, max_len)
            judged.append((outputs, held_out))
        if selects and estimator.refit:
            epochs = member.best_epoch
            warmup = min(settings.warmup_epochs, epochs - 1)
            again = dataclasses.replace(settings, epochs=epochs, warmup_epochs=warmup)
            whole = kept if own.is_set else split
            member = train_member(again, whole, None, *sizes, deadline=own, **options)
        rows = _history(before, member.rows, index)
        members.append(member._replace(rows=rows, best_epoch=len(before) + member.best_epoch))
    return members, judged


class _Work(NamedTuple):
    """The cases of a member, as in its plan or fewer, and the seconds that its predictions take."""

    kept: SequenceSplit
    held_out: SequenceSplit | None
    fitted_cases: int
    reserve: float


def _work_in_time(
    settings: MemberSettings, plan: MemberPlan, num_outputs: int, max_len: int, deadline: Deadline
) -> _Work:
    """The same part of all that a member of this plan reads beside its steps of training, so that it ends.

    Random convolutions are read once of every case; learnt ones in the steps, which follow the clock. Fewer
    than twenty held-out cases judge no member.
    """
    _, kept, held_out, selects = plan
    cost = _MARGIN * seconds_of_case(settings, kept, num_outputs, max_len)
    is_rocket, judged = settings.stem == "rocket", 0 if held_out is None else len(held_out)
    cases = judged * (1 + (is_rocket and selects)) + (len(kept) + 2 * FITTED_CASES if is_rocket else 0)
    share = _READING_PART * deadline.left() / (cost * cases) if cases else 1.0
    if share >= 1:
        return _Work(kept, held_out, FITTED_CASES, cost * judged)
    fitted_cases = max(round(share * FITTED_CASES), _FEWEST_FITTED)
    if is_rocket:
        kept = _part_of(kept, share, plan.seed)
    if held_out is not None:
        held_out = _part_of(held_out, share, plan.seed)
        if len(held_out) < min(FEWEST_JUDGED, judged) and not selects:
            held_out = None
    return _Work(kept, held_out, fitted_cases, 0.0 if held_out is None else cost * len(held_out))


def _part_of(split: SequenceSplit, share: float, seed: int) -> SequenceSplit:
    """About this share of the cases, one of every class at least."""
    is_regression = split.targets.dtype.kind == "f"
    if is_regression and share * len(split) < 1:
        return split.subset([0])
    if not is_regression and np.unique(split.targets, return_counts=True)[1].max() < 2:
        return split
    task = "regression" if is_regression else "classification"
    return stratified_split(split, 1 - max(share, 1e-6), seed, task)[0]


@in_plain_modes
def member_outputs(
    estimator: Any, model: SequenceClassifier, sequences: list[Any], max_len: int, pooled: bool = False
) -> Tensor:
    """Outputs of one model for every sequence; the mean over the windows of a longer one."""
    windows, counts = windows_of(sequences, max_len)
    # The model is kept on the CPU, so that an estimator pickled on a GPU machine opens on any other.
    try:
        model = model.to(training_device(estimator.accelerator))
        at_once = plain(estimator.batch_size) or _PREDICTED_AT_ONCE
        if isinstance(model.encoder.project, RocketStem) and not model.encoder.input_std.is_cuda:
            at_once = min(at_once, cases_at_once(max_len))
        outputs = predict_outputs(model, windows, at_once, pooled=pooled)
    finally:
        model.cpu()
    return torch.stack([part.mean(dim=0) for part in outputs.split(counts)])


def _history(before: list[dict[str, Any]], rows: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """The rows of a member in ``history_``: those of the fits that it continues, then those of this one."""
    return [*before, *({"member": index, **row, "epoch": len(before) + row["epoch"]} for row in rows)]


def _watch(
    callbacks: list[Callback], before: list[dict[str, Any]], index: int
) -> Callable[[list[dict[str, Any]]], bool] | None:
    """True where a callback ends training, given the rows of every epoch so far; None without callbacks."""
    if not callbacks:
        return None
    # A list, so that every callback sees every epoch.
    return lambda rows: any([bool(callback(_history(before, rows, index))) for callback in callbacks])
