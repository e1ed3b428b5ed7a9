"""The parameters of an estimator as the settings and the seed of every member."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state

from kernel_attention.errors import InputError, require_probability, unknown
from kernel_attention.fields import checked, plain
from kernel_attention.mechanisms import factory_options, layer_specs
from kernel_attention.models.series_stem import LARGEST_NUMBER_OF_TOKENS, Stem, automatic_patch_len
from kernel_attention.series.augmentation import AugmentationName
from kernel_attention.series.members import (
    automatic_batch_size,
    automatic_epochs,
    automatic_steps,
)
from kernel_attention.series.settings import MemberSettings

Callback = Callable[[list[dict[str, Any]]], Any]

_WARPED: tuple[AugmentationName, ...] = ("jitter", "scale", "time_warp", "window")
_LONGEST_LEARNT = 2 * LARGEST_NUMBER_OF_TOKENS["convolution"]  # steps of a series
_STEPS_BESIDE_CLOSED_FORM = 400
_OF_ALL = ("optimizer", "schedule", "gradient_clip", "patience", "accelerator")
_OF_A_MEMBER = (
    "attention", "attention_options", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout",
    "short_convolution", "stem", "stem_layers", "patch_len", "views", "positions", "pooling", "readout",
    "epochs", "batch_size", "learning_rate", "weight_decay", "warmup", "label_smoothing", "augmentation",
    "mixup", "ema_decay",
)  # fmt: skip


@contextlib.contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """As many threads of torch as ``n_jobs`` says: None, as many as before; -1, one for every CPU."""
    if n_jobs is None:
        yield
        return
    count = (os.cpu_count() or 1) if n_jobs == -1 else plain(n_jobs)
    if count is True or not isinstance(count, int) or count < 1:
        raise InputError(f"n_jobs={n_jobs!r} must be a whole number of at least 1, -1 for all CPUs, or None")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def refused_in_one_line(name: str) -> Iterator[None]:
    """Raise what scikit-learn's checks of an argument raise, as an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InputError(reason if name in reason else f"{name}: {reason}") from None


def member_settings(estimator: Any, seed: int, cases: int, max_len: int, index: int) -> MemberSettings:
    """The parameters of member number ``index`` as settings, which also checks them."""
    given = {name: plain(getattr(estimator, name)) for name in (*_OF_ALL, *_OF_A_MEMBER)}
    given |= _overrides(estimator.members, index)
    if given["stem"] is None:
        given["stem"] = _automatic_stem(max_len, index)
    elif not isinstance(given["stem"], str):
        given["stem"] = _in_turn("stem", given["stem"], index)
    augmentation = given["augmentation"]
    if augmentation is None:
        given["augmentation"] = _automatic_augmentation(given["stem"], index)
    elif isinstance(augmentation, list | tuple) and not all(isinstance(each, str) for each in augmentation):
        given["augmentation"] = _in_turn("augmentation", augmentation, index)
    given["readout"] = checked(MemberSettings, "readout", given["readout"]) and given["stem"] == "rocket"
    attention = _merged_attention(given.pop("attention"), given.pop("attention_options"))
    batch_size, epochs = given.pop("batch_size"), given.pop("epochs")
    if batch_size is None:
        batch_size = automatic_batch_size(cases)
    if epochs is None:
        stem = checked(MemberSettings, "stem", given["stem"])
        patch_len = checked(MemberSettings, "patch_len", given["patch_len"])
        patch_len = patch_len or automatic_patch_len(max_len, stem)
        batch_size = checked(MemberSettings, "batch_size", batch_size)
        steps = automatic_steps(batch_size, -(-max_len // patch_len))
        if estimator.closed_form:  # which has learnt most of what there is
            epochs = automatic_epochs(cases, batch_size, _STEPS_BESIDE_CLOSED_FORM, fewest=3)
        else:
            epochs = automatic_epochs(cases, batch_size, steps)
    warmup = given.pop("warmup")
    require_probability(warmup=warmup)
    given["warmup_epochs"] = int(warmup * checked(MemberSettings, "epochs", epochs))
    if estimator.validation_fraction is not None:
        given["validation_fraction"] = estimator.validation_fraction
    return MemberSettings(attention=attention, epochs=epochs, batch_size=batch_size, seed=seed, **given)


def _automatic_stem(max_len: int, index: int) -> Stem:
    """Random convolutions, and in every third member learnt ones, unless these had to leave steps out."""
    return "convolution" if index % 3 == 1 and max_len <= _LONGEST_LEARNT else "rocket"


def _automatic_augmentation(stem: str, index: int) -> Sequence[AugmentationName]:
    """Learnt convolutions want warped series; random ones on some sets only, so every third has them."""
    return () if stem == "rocket" and index % 3 != 2 else _WARPED


def _overrides(members: Any, index: int) -> Mapping[str, Any]:
    """The parameters that member number ``index`` has of its own."""
    if not members:
        return {}
    overrides = _in_turn("members", members, index)
    if not isinstance(overrides, Mapping):
        raise InputError(f"members={members!r} must list dicts of parameters")
    for name in overrides:
        if name not in _OF_A_MEMBER:
            raise unknown("parameter of members", name, _OF_A_MEMBER)
    return overrides


def _in_turn(name: str, values: Any, index: int) -> Any:
    """Entry number ``index`` of a list that is used in turn."""
    if not isinstance(values, Sequence) or not values:
        raise InputError(f"{name}={values!r} must list one or more entries, which members use in turn")
    return values[index % len(values)]


def _merged_attention(attention: Any, options: Mapping[str, Any] | None) -> Any:
    """``attention`` with ``attention_options`` merged in."""
    if not options:
        return attention
    if not isinstance(options, Mapping):
        raise InputError(f"attention_options={options!r} must be a dict or None")
    if isinstance(attention, list):
        raise InputError(
            f"attention_options={options!r} cannot serve attention={attention!r}: "
            "in a list, give each layer its options as {name: options}"
        )
    if callable(attention):
        accepted = factory_options(attention)
        for option in options:
            if option not in accepted:
                raise unknown(f"option of attention {attention!r}", option, accepted)
        return functools.partial(attention, **plain(options))
    ((name, given),) = layer_specs(attention, 1)
    return {name: plain({**given, **options})}


def callback_list(callbacks: Any) -> list[Callback]:
    """The parameter ``callbacks`` as a list."""
    given = [] if callbacks is None else [callbacks] if callable(callbacks) else callbacks
    if not isinstance(given, list | tuple) or not all(callable(entry) for entry in given):
        raise InputError(f"callbacks={callbacks!r} must be a callable, a list of them, or None")
    return list(given)


def member_seeds(random_state: int | np.random.RandomState | None, count: int) -> list[int]:
    """The seed of every member; the first has the estimator's own."""
    seed = _seed(random_state)
    return [seed, *(derived_seed(seed, index) for index in range(1, count))]


def derived_seed(seed: int, index: int) -> int:
    """Another seed, the same for the same arguments."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _seed(random_state: int | np.random.RandomState | None) -> int:
    """A whole number is the seed itself, as in a run; None takes fresh entropy from the system."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    generator = check_random_state(random_state)
    return int(random_state) if isinstance(random_state, Integral) else int(generator.randint(2**31))
