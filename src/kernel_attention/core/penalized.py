"""Modules with a term of their own in the loss: what a call adds, and where it is kept."""

from __future__ import annotations

import copy
import functools
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.tensors.recompute import is_traced
from kernel_attention.tensors.statistics import mean_or_zero

_log = logging.getLogger(__name__)

OBJECTIVE_BOUND = 16.0
"""Up to this |J| a layer's penalty is the papers' J^2; beyond, it grows with log |J|."""


class Objective(NamedTuple):
    """The objective of one call of a module in training mode.

    Attributes:
        value: J, a 0-dimensional tensor, or (B,) where the module squares it per sequence.
        core: J_S of a core tensor; None for a module without one.
        unit: the unit of the layer's bound: 1, or the number of tokens where J is a sum over them.
        tokens: the real tokens of the call, where J is a mean over tokens; None where it is a mean over
            sequences.
    """

    value: Tensor
    core: Tensor | None = None
    unit: float | Tensor = 1.0
    tokens: Tensor | int | None = None


class Call(NamedTuple):
    """A call of a module, its objective, and whether gradients were enabled."""

    module: PenalizedModule
    objective: Objective
    with_gradients: bool


class Page:
    """The calls of a thread between two readings by ``auxiliary_loss``.

    Attributes:
        number: later pages of a thread have higher ones.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number


class Book:
    """What a thread writes its calls to.

    Attributes:
        lists: the calls of every open collector, the innermost last.
        page: the present page.
    """

    def __init__(self) -> None:
        self.lists: tuple[list[Call], ...] = ()
        self.page = Page()


class _Thread(threading.local):
    # A compiler cannot read a ContextVar, and it loses what is written to a threading.local itself.
    def __init__(self) -> None:
        self.book = Book()


_THREAD = _Thread()


def this_book() -> Book:
    """The book of this thread."""
    return _THREAD.book


@contextmanager
def collecting_alone() -> Iterator[list[Call]]:
    """The calls inside the block, which no other collector gets."""
    book = this_book()
    calls: list[Call] = []
    before, book.lists = book.lists, (calls,)
    try:
        yield calls
    finally:
        book.lists = before


class Note(NamedTuple):
    """The last call of a module in a thread, and what is remembered of the one before.

    Attributes:
        objective: of the call; None before it, and where a model's own ``loss`` has taken it.
        page: the page of the call.
        with_gradients: whether gradients were enabled.
        earlier: the page of the call before.
        earlier_with_gradients: whether they were enabled there.
        is_taken: whether a model's own ``loss`` has it.
    """

    objective: Objective | None
    page: Page
    with_gradients: bool
    earlier: Page
    earlier_with_gradients: bool
    is_taken: bool = False

    @property
    def is_repeated(self) -> bool:
        """Whether another call on the same page may belong to the same loss."""
        # A call without gradients before one with them does not.
        return self.earlier is self.page and (self.earlier_with_gradients or not self.with_gradients)


class LastCall:
    """The last call of a module in one thread.

    Attributes:
        note: what is known of it.
        spent: the page of the last term that a gradient has passed through.
    """

    def __init__(self) -> None:
        self.spent: Page | None = None
        self.clear()

    def clear(self) -> None:
        """Forget the call, as before the first one."""
        self.note = Note(None, Page(), True, Page(), True)

    def write(self, objective: Objective, with_gradients: bool) -> None:
        """Replace the call by the next one."""
        # Nothing is asked, and one attribute is written: a compiler would make a graph for each answer, and
        # may write attributes in another order.
        before, page = self.note, this_book().page
        self.note = Note(objective, page, with_gradients, before.page, before.with_gradients)

    def spend(self, objective: Objective) -> None:
        """Let go of the graph of this objective, and note that a gradient has passed through it."""
        if self.note.objective is objective:
            self.spent = self.note.page
            core = None if objective.core is None else objective.core.detach()
            constant = objective._replace(value=objective.value.detach(), core=core)
            self.note = self.note._replace(objective=constant)

    @property
    def is_dead(self) -> bool:
        """Whether the objective belongs to a transform of torch.func that has ended."""
        return self.note.objective is not None and belongs_to_ended_transform(self.note.objective.value)


class _LastCalls(threading.local):
    def __init__(self) -> None:
        self.own = LastCall()


def belongs_to_ended_transform(x: Tensor) -> bool:
    """Whether x is a tensor inside a transform of torch.func that has ended: it has no value any more."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    # The level of a tensor of ``grad`` that has ended is negative; one of ``vmap`` keeps its own.
    level, now = functorch.maybe_get_level(x), functorch.maybe_current_level()
    return level < 0 or now is None or level > now


class PenalizedModule(nn.Module, ABC):
    """A module with a term of its own, which ``auxiliary_loss`` adds to the task's loss.

    Its forward pass in training mode hands what it finds to ``record_objective``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_calls = _LastCalls()

    @abstractmethod
    def penalty(self, objective: Objective | None = None) -> Tensor | None:
        """The term that a call with this objective adds to the loss, weights included.

        None for the objective: that of the last call. None in return where it adds nothing.
        """

    @property
    def last_call(self) -> LastCall:
        """The last call in this thread."""
        return self._last_calls.own

    @property
    def has_penalty(self) -> bool:
        """Whether a forward in training mode leaves an objective."""
        return True

    @property
    def objective(self) -> Tensor | None:
        """J of the last forward of this thread in training mode; None before it.

        State dicts, copies and pickles do not hold it. A second call replaces it: see
        [`collect_objectives`][kernel_attention.collect_objectives] for the objectives of every call.
        """
        last = self.last_objective
        return None if last is None else last.value

    @objective.setter
    def objective(self, value: Tensor | None) -> None:
        if value is None:
            self.last_call.clear()
        else:
            self.record_objective(value)

    @property
    def last_objective(self) -> Objective | None:
        """The objective of the last call of this thread with its unit and its tokens; None before it."""
        if self.last_call.is_dead:
            self.last_call.clear()
        return self.last_call.note.objective

    def record_objective(
        self,
        value: Tensor,
        *,
        core: Tensor | None = None,
        unit: float | Tensor = 1.0,
        tokens: Tensor | int | None = None,
    ) -> None:
        """Hand what a call in training mode found to the open collectors, and keep it for ``auxiliary_loss``.

        A call inside a backward pass is a checkpointed one that is computed again: it has been counted.

        Args:
            value: J, see ``Objective``.
            core: J_S of a core tensor.
            unit: the unit of the layer's bound.
            tokens: the real tokens of the call, where J is a mean over tokens.

        Raises:
            RuntimeError: in a replica of ``nn.DataParallel``, whose objective nobody would get.
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        objective, with_gradients = Objective(value, core, unit, tokens), torch.is_grad_enabled()
        call = Call(self, objective, with_gradients)
        lists = this_book().lists
        for calls in lists:
            calls.append(call)
        if getattr(self, "_is_replica", False):
            if not lists:
                raise RuntimeError(
                    f"{type(self).__name__} inside nn.DataParallel: its objective stays in a replica, where "
                    "auxiliary_loss does not find it. Use nn.parallel.DistributedDataParallel, or collect "
                    "it inside the module that is replicated, with collect_objectives()"
                )
        elif lists and is_traced() and not torch.compiler.is_compiling():
            self.last_call.clear()  # it would outlive the transform, and the collector has it
        else:
            self.last_call.write(objective, with_gradients)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_last_calls"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._last_calls = _LastCalls()


class PenalizedAttention(AttentionLayer, PenalizedModule):
    """An attention layer with an objective J of its own, which ``auxiliary_loss`` adds to the task's loss.

    Attributes:
        objective_bound: the largest |J| at which the penalty is the papers' square, see ``bounded_square``;
            infinity removes the bound. It counts in the unit of the call's ``Objective``.
    """

    objective_bound: float = OBJECTIVE_BOUND

    def squared_objective(self, objective: Tensor, unit: float | Tensor = 1.0) -> Tensor:
        """``bounded_square`` of J. It logs a warning the first time that |J| exceeds the bound."""
        bound = self.objective_bound * unit
        # Elsewhere the question would stop the stream or break the graph.
        if objective.device.type == "cpu" and not is_traced():
            if not (objective.detach().abs() > bound).any():
                return objective.square()
            _warn_of_large_objectives()
        return bounded_square(objective, bound)

    def measure_objective(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor | None:
        """J on x, a mean over the sequences where each has its own; None where the weight of J is 0.

        The layer's mode and its last objective do not change, and no open collector gets this one.
        """
        twin = copy.copy(self)  # shares the parameters
        twin.training = True
        with collecting_alone() as calls:
            twin.attend(x, None, attention_mask, is_causal)
        return mean_or_zero(calls[-1].objective.value) if calls else None


def checked_bound(objective_bound: float | None) -> float:
    """A layer's option ``objective_bound`` as a number: infinity for None, which is no bound."""
    if objective_bound is None:
        return math.inf
    if isinstance(objective_bound, bool) or not isinstance(objective_bound, Real) or not objective_bound > 0:
        raise InputError(
            f"objective_bound={objective_bound!r} must be a number above 0, or None for no bound"
        )
    return float(objective_bound)


def bounded_square(objective: Tensor, bound: float | Tensor = OBJECTIVE_BOUND) -> Tensor:
    """J^2 where |J| <= c, and c^2 (1 + 2 log(|J| / c)) beyond: once differentiable, and increasing in |J|.

    J is quadratic in the weights and in the input, and J^2 is quartic. On inputs that are not standardised,
    the first steps of an optimiser overshoot, and the next J^2 overflows. The gradient of the logarithm is
    2 c^2 dJ / J: it has the direction of the gradient of J^2, and its size does not depend on the size of the
    input.

    Args:
        objective: J, of any shape.
        bound: c; a positive number, infinity, or a tensor that broadcasts to J.
    """
    size = objective.abs()
    inside = size <= bound
    # Both branches have a gradient of their own, so that neither may overflow where the other is taken.
    square = objective.where(inside, 0.0).square()
    beyond = size.where(~inside, bound).div(bound).log() * (2 * bound**2) + bound**2
    return torch.where(inside, square, beyond)


@functools.cache
def _warn_of_large_objectives() -> None:
    """Log the warning, once in a process."""
    _log.warning(
        "auxiliary_loss: an objective |J| exceeds its layer's objective_bound, beyond which the penalty "
        "grows with log |J|, not J^2. Standardise the inputs: mean 0 and variance 1 of every channel. Where "
        "they are, a wide first layer can exceed it for the first few epochs"
    )
