"""What the parameters of an estimator stand for: entries in turn, a mechanism with options, seeds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.settings import plain
from kernel_attention.mechanisms import factory_options, layer_specs


@contextlib.contextmanager
def refused_in_one_line(name: str) -> Iterator[None]:
    """What scikit-learn's checks of an argument raise, as an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise InputError(reason if name in reason else f"{name}: {reason}") from None


def in_turn(name: str, values: Any, index: int) -> Any:
    """Entry number ``index`` of a list that is used in turn."""
    if not isinstance(values, Sequence) or not values:
        raise InputError(f"{name}={values!r} must list one or more entries, which members use in turn")
    return values[index % len(values)]


def merged_attention(attention: Any, options: Mapping[str, Any] | None) -> Any:
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


def callback_list(callbacks: Any) -> list[Callable[[list[dict[str, Any]]], Any]]:
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
    """A whole number is the seed itself, as in a recipe; None takes fresh entropy from the system."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    generator = check_random_state(random_state)
    return int(random_state) if isinstance(random_state, Integral) else int(generator.randint(2**31))
