"""Engines: ways of computing a layer that give the numbers of its formulas sooner, and the plan of a call."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown
from kernel_attention.tensors.gpu import FLA, FLA_PAYS_FROM, why_no_kernel
from kernel_attention.tensors.padding import is_exporting
from kernel_attention.tensors.recompute import only_formulas

AUTO, REFERENCE = "auto", "reference"


class Unsupported(NamedTuple):
    """The reason, in words, why an engine does not serve a call, or why no measurement speaks for it."""

    reason: str


class EngineCall(Protocol):
    """A call as an engine sees it: a family's tensors and options, the layer's input among them."""

    @property
    def x(self) -> Tensor:
        """(B, N, d)."""


CallT = TypeVar("CallT", bound=EngineCall)
ResultT = TypeVar("ResultT")
_CallIn = TypeVar("_CallIn", bound=EngineCall, contravariant=True)
_ResultOut = TypeVar("_ResultOut", covariant=True)


class Engine(Protocol[_CallIn, _ResultOut]):
    """One way of computing a layer. Its results are those of the formulas, up to rounding.

    Attributes:
        name: the value of the layer's option ``impl`` that asks for it.
        shares_sequences: whether it takes sequences that are divided among processes.
    """

    name: str
    shares_sequences: bool = False

    def why_not(self, call: _CallIn, compiled: bool) -> Unsupported | None:
        """The reason why it cannot serve the call; None: it can.

        ``compiled``: whether torch.compile runs the layer.
        """

    def pays_from(self, call: _CallIn, compiled: bool) -> int | Unsupported | None:
        """The tokens of a sequence from which it was measured to be faster on the device of the call.

        Why no measurement speaks for it where others of that device do; None: none was made there, or none
        was faster.
        """

    def attend(self, call: _CallIn) -> _ResultOut:
        """The results of the layer."""


class CausalKernel:
    """The base of engines by the kernels of flash-linear-attention for causal attention.

    Their calls have ``num_heads``, ``head_dim``, ``is_causal``, ``is_whole`` and ``packed`` too: see
    ``LinearCall``.
    """

    name = FLA
    shares_sequences = False

    def kernel(self, call: Any) -> str | Unsupported:
        """The name of the kernel, or why there is none."""
        raise NotImplementedError

    def why_not(self, call: Any, compiled: bool) -> Unsupported | None:
        """The reason why it cannot serve the call; None: it can."""
        if not (call.is_causal and call.is_whole):
            return Unsupported("its kernel is for causal self-attention without padding")
        name = self.kernel(call)
        if isinstance(name, Unsupported):
            return name
        sizes, is_packed = (call.num_heads, call.head_dim), call.packed is not None
        reason = why_no_kernel(name, call.x, *sizes, compiled=compiled, is_packed=is_packed)
        return None if reason is None else Unsupported(reason)

    def pays_from(self, call: Any, compiled: bool) -> int | Unsupported | None:
        """The tokens from which ``impl="auto"`` takes it."""
        return FLA_PAYS_FROM


class LayerPlan(NamedTuple):
    """Which engine serves a call, and why. Printed, it is the table of the layer's engines.

    Attributes:
        engine: "reference", the formulas, or the name of an engine of the layer.
        reason: why that one.
        answers: of every engine, in the order in which ``impl="auto"`` asks them, and of the formulas:
            the name, and whether it serves the call, or why not.
    """

    engine: str
    reason: str
    answers: tuple[tuple[str, str], ...] = ((REFERENCE, "yes"),)

    def __str__(self) -> str:
        rows = [("engine", "serves the call", "chosen")]
        rows += [(name, answer, self.reason if name == self.engine else "") for name, answer in self.answers]
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(
            f"{name:{widths[0]}}  {answer:{widths[1]}}  {chosen}".rstrip() for name, answer, chosen in rows
        )


def checked_impl(impl: str, engines: Iterable[Engine[CallT, ResultT]], retired: Sequence[str] = ()) -> str:
    """The value of an option ``impl``.

    A ``retired`` engine, which files of earlier releases may name, gives way to "auto" with a warning.

    Raises:
        InputError: for another name than "auto", "reference" and those of the engines.
    """
    accepted = (AUTO, REFERENCE, *(engine.name for engine in engines))
    if impl in retired:
        warnings.warn(f"impl={impl!r} exists no more; impl='auto' takes its place", stacklevel=3)
        return AUTO
    if impl not in accepted:
        raise unknown("impl", impl, accepted)
    return impl


def choose(
    impl: str,
    engines: Sequence[Engine[CallT, ResultT]],
    call: CallT,
    *,
    is_sharded: bool = False,
    compiled: bool | None = None,
) -> tuple[Engine[CallT, ResultT] | None, str]:
    """The engine that serves a call, None for the formulas, and the reason.

    Args:
        impl: the layer's option: "auto", "reference" or the name of an engine.
        engines: those of the layer, in the order in which "auto" asks them.
        call: what is to be computed.
        is_sharded: whether processes share every sequence, which the formulas cannot.
        compiled: whether torch.compile runs the layer; None: whether it does now.

    Raises:
        InputError: for an engine that was asked for and does not serve the call.
    """
    x, tracing = call.x, torch.compiler.is_compiling()
    compiled = tracing if compiled is None else compiled
    if impl == REFERENCE:
        return None, "impl='reference'"
    if not (tracing or is_sharded) and x.size(0) == 0:
        return None, "there are no sequences"
    only = only_formulas()
    if impl != AUTO:
        engine = _named(impl, engines)
        reason = only or _reason(engine.why_not(call, compiled))
        if reason is not None:
            raise InputError(f"impl={impl!r}: {reason}; use impl='auto' or 'reference'")
        return engine, f"impl={impl!r}"
    if is_sharded:
        for engine in engines:
            if engine.shares_sequences:
                return engine, "processes share the sequence"
    if only is not None:
        return None, only
    if is_exporting():
        return None, "an exported program should run without this package"
    where = f"({x.device.type}, {'compiled' if compiled else 'eager'})"
    reason = f"no engine was measured to be faster {where}"
    for engine in engines:
        least = engine.pays_from(call, compiled)
        if least is None:
            continue
        why = engine.why_not(call, compiled)
        if why is None and isinstance(least, int) and x.size(1) >= least:
            return engine, f"at least {least} tokens {where}"
        reason = _reason(why) or _reason(least) or f"fewer than {least} tokens {where}"
    return None, reason


def plan_call(
    impl: str,
    engines: Sequence[Engine[CallT, ResultT]],
    call: CallT,
    *,
    is_sharded: bool = False,
    compiled: bool | None = None,
) -> LayerPlan:
    """The plan of a call; the arguments are those of ``choose``."""
    engine, reason = choose(impl, engines, call, is_sharded=is_sharded, compiled=compiled)
    is_compiled = torch.compiler.is_compiling() if compiled is None else compiled
    only = only_formulas()
    answers = []
    for each in engines:
        why = only or _reason(each.why_not(call, is_compiled))
        least = each.pays_from(call, is_compiled)
        pays = "not measured to be faster here" if least is None else _reason(least) or f"pays from {least}"
        answers.append((each.name, f"yes, {pays}" if why is None else f"no: {why}"))
    answers.append((REFERENCE, "yes"))
    return LayerPlan(REFERENCE if engine is None else engine.name, reason, tuple(answers))


def _named(name: str, engines: Sequence[Engine[CallT, ResultT]]) -> Engine[CallT, ResultT]:
    for engine in engines:
        if engine.name == name:
            return engine
    raise unknown("impl", name, (AUTO, REFERENCE, *(engine.name for engine in engines)))


def _reason(answer: Unsupported | int | None) -> str | None:
    return answer.reason if isinstance(answer, Unsupported) else None
