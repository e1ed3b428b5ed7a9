"""Running the checks on a layer, and what they compare by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError, unknown
from kernel_attention.testing.subjects import Subject, subject

Check = Callable[[Subject], None]
CHECKS: dict[str, Check] = {}
"""Every check by name."""
# What a layer must support: "causal", "context", "decoding", "packing"; "any length"; or "placement".
_NEEDS: dict[str, str] = {}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected)


def refused(call: Callable[[], Any], *words: str) -> None:
    """Check that the call raises InputError with one of the words, in one line."""
    try:
        call()
    except InputError as error:
        message = str(error)
    else:
        raise AssertionError(f"a call was not refused; expected an error that names one of {words}")
    assert any(word in message for word in words), f"refused without one of {words}: {message}"
    assert "\n" not in message, f"more than one line: {message}"


def required(value: Tensor | None) -> Tensor:
    assert value is not None, "the objective is gone"
    return value


def check(needs: str = "") -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        CHECKS[function.__name__] = function
        _NEEDS[function.__name__] = needs
        return function

    return register


def checks_of(case: Subject) -> list[str]:
    """The names of the checks that apply to a subject."""
    layer = case.build()
    able = {name for name in ("causal", "context", "decoding", "packing") if layer.supports(**{name: True})}
    able |= {""} if case.fixed_length else {"", "any length"}
    able |= {"placement"} if case.places_parameters() else set()
    return [name for name, needs in _NEEDS.items() if needs in able and name not in case.exempt]


def check_attention(
    mechanism: str | Callable[..., AttentionLayer] | Subject,
    *,
    only: Iterable[str] | None = None,
    exempt: Mapping[str, str] | None = None,
    **options: Any,
) -> list[str]:
    """Check the contract of every attention mechanism. Return the names of the checks that ran.

    Args:
        mechanism: a registered name, ``make(embed_dim, num_heads)``, or a ``Subject``.
        only: names of ``CHECKS``; None: all.
        exempt: {name of a check: why it does not apply}.
        options: of a registered mechanism.

    Raises:
        AssertionError: for the first check that fails or cannot run, with its name; notes list what passed.
        InputError: for an unknown mechanism, option or check.
    """
    case = mechanism if isinstance(mechanism, Subject) else subject(mechanism, **options)
    case = dataclasses.replace(case, exempt={**case.exempt, **(exempt or {})})
    wanted = set(CHECKS) if only is None else set(only)
    for name in (*wanted, *case.exempt):
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    run = [name for name in checks_of(case) if name in wanted]
    for passed, name in enumerate(run):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                CHECKS[name](case)
            except Exception as error:
                raise _failed(case, name, error, run[:passed]) from error
    return run


def _failed(case: Subject, name: str, error: Exception, passed: list[str]) -> AssertionError:
    """The error of a check that failed, or met something that the layer cannot do."""
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    failed = AssertionError(f"{case.name}: {name}: {kind}{error}")
    failed.add_note(f"to leave the check out: exempt={{{name!r}: 'why'}}")
    failed.add_note(f"passed before it: {', '.join(passed) or 'none'}")
    return failed
