"""Layers under test and their inputs, the checks that run on them, and what these compare by."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms import get_mechanism

BATCH, HEADS, LENGTH, HEAD_DIM, CONTEXT = 7, 3, 11, 5, 13
EMBED_DIM = HEADS * HEAD_DIM
MAX_LEN = 17
LENGTHS = (11, 7, 2, 5, 1, 10, 3)  # real tokens of each sequence in a padded batch
PROMPTS = (6, 1, 4, 3, 2, 0, 5)  # real tokens of each sequence's prompt


@dataclass(frozen=True)
class Subject:
    """A mechanism under test.

    Attributes:
        name: for messages.
        make: ``make(embed_dim, num_heads)`` gives a new layer. Where it accepts ``device`` and ``dtype`` too,
            they are checked.
        objective_over: what an objective that is one number is a mean over, "tokens" or "sequences".
        mixes_tokens: "yes", "no", or words for "it depends", which are not checked.
        fixed_length: whether the layer takes sequences of ``LENGTH`` tokens only, as one over a grid does.
        exempt: {name of a check: why it does not apply}.
    """

    name: str
    make: Callable[..., AttentionLayer]
    objective_over: str = "tokens"
    mixes_tokens: str = "yes"
    fixed_length: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)

    def build(self, dtype: torch.dtype = torch.float64) -> AttentionLayer:
        """A layer in training mode, with no parameter at its initial value, where zeros hide errors."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            layer = self.make(EMBED_DIM, HEADS)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return layer.to(dtype).train()

    def places_parameters(self) -> bool:
        """True where ``make`` accepts ``device`` and ``dtype``."""
        try:
            inspect.signature(self.make).bind(EMBED_DIM, HEADS, device=None, dtype=None)
        except TypeError:
            return False
        return True

    def call_forms(self) -> list[dict[str, bool]]:
        """The ways in which the layer may be called on one batch of sequences."""
        forms = [{"is_causal": False}]
        return [*forms, {"is_causal": True}] if self.build().supports(causal=True) else forms


def subject(mechanism: str | Callable[..., AttentionLayer], **options: Any) -> Subject:
    """A registered mechanism with these options, or what makes a layer, to be checked.

    Options that the mechanism cannot do without come from the ``example`` of its registration. ``max_len`` is
    set where the mechanism has it and the options do not. ``sample`` is off, because calls are compared.
    """
    if not isinstance(mechanism, str):
        return Subject(getattr(mechanism, "__name__", repr(mechanism)), mechanism)
    row = get_mechanism(mechanism)
    options = {**row.example, **options}
    if "sample" in row.options:
        options.setdefault("sample", False)
    if "max_len" in row.options:
        options.setdefault("max_len", MAX_LEN)
    is_fixed = _is_fixed(row.build(EMBED_DIM, HEADS, **options))
    placed = {"device", "dtype"} <= set(inspect.signature(row.layer).parameters)
    make = functools.partial(row.build, **options)
    return Subject(
        mechanism,
        make if placed else lambda *sizes: make(*sizes),
        mixes_tokens=row.mixes_tokens,
        fixed_length=is_fixed,
    )


def _is_fixed(layer: AttentionLayer) -> bool:
    """True where the layer takes ``LENGTH`` tokens and refuses fewer."""
    layer(torch.zeros(1, LENGTH, EMBED_DIM))
    try:
        layer(torch.zeros(1, LENGTH - 1, EMBED_DIM))
    except InputError:
        return True
    return False


def inputs(dtype: torch.dtype = torch.float64, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Standard normal inputs, (B, N, d)."""
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


def right_padding(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """A mask of right padding, (B, N) bool, True = real token."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def masks() -> Iterator[Tensor]:
    """Masks with right padding, left padding, and holes."""
    yield right_padding()
    yield right_padding().flip(1)
    holes = torch.rand(BATCH, LENGTH) < 0.6
    holes[:, 4] = True
    yield holes


def objective(layer: AttentionLayer) -> Tensor | None:
    """J of the last training forward, a number or (B,); None for a layer without one."""
    return layer.objective if isinstance(layer, PenalizedAttention) else None


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
