"""Objectives of calls, and where a thread keeps them until the loss is computed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Objective(NamedTuple):
    """The objective of one call of a module in training mode.

    Attributes:
        value: J, a 0-dimensional tensor, or (B,) where the module squares it per sequence.
        core: a second term, of the parameters alone: J_S of a core tensor, or the divergence of a posterior
            from its prior; None for a module without one.
        unit: the unit of the layer's bound: 1, or the number of tokens where J is a sum over them.
        tokens: the real tokens of the call, where J is a mean over tokens; None where it is a mean over
            sequences.
        square: ``bounded_square`` of J, where it has been computed with that of other calls.
    """

    value: Tensor
    core: Tensor | None = None
    unit: float | Tensor = 1.0
    tokens: Tensor | int | None = None
    square: Tensor | None = None


class ObjectiveCall(NamedTuple):
    """A call of a ``PenalizedModule``, its objective, and whether gradients were enabled."""

    module: Any
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
    """The calls of a thread: every open collector's, and the present page.

    Attributes:
        lists: the calls of every open collector, the innermost last.
        page: the present page.
    """

    def __init__(self) -> None:
        self.lists: tuple[list[ObjectiveCall], ...] = ()
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
def collecting_alone() -> Iterator[list[ObjectiveCall]]:
    """The calls inside the block, which no other collector gets."""
    book = this_book()
    calls: list[ObjectiveCall] = []
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
        """True where another call on the same page may belong to the same loss."""
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
        """True where the objective belongs to a transform of torch.func that has ended."""
        return self.note.objective is not None and belongs_to_ended_transform(self.note.objective.value)


class LastCalls(threading.local):
    """The last call of a module in every thread."""

    def __init__(self) -> None:
        self.own = LastCall()


def belongs_to_ended_transform(x: Tensor) -> bool:
    """True for a tensor x inside a transform of torch.func that has ended: it has no value any more."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    if not functorch.is_functorch_wrapped_tensor(x):
        return False
    # The level of a tensor of ``grad`` that has ended is negative; one of ``vmap`` keeps its own.
    level, now = functorch.maybe_get_level(x), functorch.maybe_current_level()
    return level < 0 or now is None or level > now
