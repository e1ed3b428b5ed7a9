"""The sum of the modules' own terms of the loss: over the calls of a block, or over the last forward."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import (
    Note,
    Objective,
    ObjectiveCall,
    Page,
    belongs_to_ended_transform,
    this_book,
)
from kernel_attention.core.penalized import PenalizedAttention, PenalizedModule, bounded_square
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.tensors.recompute import can_ask, is_traced

_pages = itertools.count(1)


class ObjectiveCollector:
    """The objectives of every call inside a ``with`` block; made by ``collect_objectives``.

    Attributes:
        calls: the calls in their order. A layer that is called twice has two.
    """

    def __init__(self) -> None:
        self.calls: list[ObjectiveCall] = []

    def __enter__(self) -> ObjectiveCollector:
        book = this_book()
        book.lists = (*book.lists, self.calls)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Collect no more calls. Blocks that were opened inside this one and not closed end with it."""
        book = this_book()
        places = [place for place, calls in enumerate(book.lists) if calls is self.calls]
        book.lists = book.lists[: places[-1]] if places else book.lists

    def total(self, reduction: str = "sum") -> Tensor:
        """The sum over the calls of eta J^2, with the terms of other modules; a 0-dimensional tensor.

        It may be asked for inside the block or after it, and is 0 where no module has an objective. The terms
        have the graph of their forward pass: call ``backward`` once, as for the task's loss.

        Args:
            reduction: of eta J^2: "sum" over the calls of attention layers (Primal-Attention poster) or
                "mean" (the released code). The terms of other modules are summed.

        Raises:
            InputError: for another reduction.
            RuntimeError: if a call was made without gradients, and gradients are enabled now; or inside a
                transform of torch.func that has ended.
        """
        return _total(self.calls, reduction)

    def of(self, module: nn.Module) -> list[Tensor]:
        """J of every call of this module, without a graph."""
        return [call.objective.value.detach() for call in self.calls if call.module is module]


def collect_objectives() -> ObjectiveCollector:
    """Collect the objectives of the layers for the duration of a block.

        with ka.collect_objectives() as objectives:
            y = model(x)
        loss = task_loss(y) + objectives.total()

    Every call in training mode counts once: also the second one of a shared layer, and those of a function
    that is compiled, checkpointed without re-entrance, or transformed by ``torch.func`` (open the block
    inside the function that is transformed). A layer that is not called adds nothing. The block collects the
    calls of its own thread. Inside another block, both collect them.
    """
    return ObjectiveCollector()


def auxiliary_loss(model: nn.Module, reduction: str = "sum") -> Tensor:
    """The layers' own term of the loss: the sum over layers of eta J^2, a 0-dimensional tensor.

    What mixtures of experts add to balance their experts is part of it.

    Where |J| exceeds a layer's ``objective_bound``, ``bounded_square`` replaces the square, and a warning is
    logged once. This happens on inputs that are not standardised, and in the first epochs of wide layers.

    It is for the loop with one forward in training mode before each backward, and reads the last call of
    every layer in this thread. A layer that was not called since the last reading adds nothing where another
    one was. Where it cannot know what belongs to the step it raises, and
    [`collect_objectives`][kernel_attention.collect_objectives] serves: a layer called twice, say.

    The square is taken per micro-batch, so gradient accumulation averages J^2 of the parts, which is not J^2
    of the whole batch. So does data parallelism, unless ``average_objectives`` comes first. The loss is 0 for
    a model without such layers, or in evaluation mode.

    Args:
        model: any module that holds our layers.
        reduction: of eta J^2: "sum" over the layers (Primal-Attention poster) or "mean" (the released code).
            The terms of other modules are summed.

    Raises:
        InputError: for another reduction.
        RuntimeError: if no forward in training mode has left an objective, or none since the last backward
            pass; if a layer was called more than once; or if a call was made without gradients, and gradients
            are enabled now.
    """
    _require_reduction(reduction)
    modules = _penalized(model)
    notes = _last_notes(modules)
    if not notes:
        _require_forward(modules)
    for module, note in notes:
        if note.is_repeated:
            raise RuntimeError(
                f"auxiliary_loss: {_name(model, module)} was called more than once since the last "
                "auxiliary_loss, and only its last objective is kept. Collect those of one step: "
                "with kernel_attention.collect_objectives() as objectives: y = model(x), then "
                "objectives.total()"
            )
    if torch.is_grad_enabled() and any(module.last_call.spent is note.page for module, note in notes):
        raise RuntimeError(
            "auxiliary_loss: no forward in training mode since the last backward pass. Call it once per "
            "backward, after the forward. For a second backward pass keep its first result; for a number to "
            "log, call it under torch.no_grad()"
        )
    total = _total(_calls(notes), reduction, next((p.device for p in model.parameters()), None))
    # What is called from now on belongs to another step.
    this_book().page = Page(0 if torch.compiler.is_compiling() else next(_pages))
    return total


def average_objectives(
    source: nn.Module | ObjectiveCollector, num_sequences: int, group: SequenceGroup
) -> None:
    """Replace every J by its mean over the batches of several processes; one all-reduce each way.

    Call it after the forward and before ``auxiliary_loss`` or ``total``, on all processes. The square is then
    that of J of the whole batch. Every process adds the same penalty, and DistributedDataParallel, which
    averages the gradients, gives those of one process with the whole batch.

    A J per sequence is squared per sequence and stays as it is, and so do terms of other modules.

    Args:
        source: a collector; or a module that holds our layers, each of which was called once.
        num_sequences: sequences of this process's batch; 0 for one that does not count.
        group: the processes, each with sequences of its own.
    """
    calls = _calls(_last_notes(_penalized(source))) if isinstance(source, nn.Module) else source.calls
    places = [index for index, call in enumerate(calls) if _is_shared(call)]
    found = _averages([calls[place].objective for place in places], num_sequences, group)
    for place, objective in zip(places, found, strict=True):
        module = calls[place].module
        calls[place] = calls[place]._replace(objective=objective)
        if isinstance(source, nn.Module):
            module.last_call.note = module.last_call.note._replace(objective=objective)


def take_calls(calls: Sequence[ObjectiveCall], reduction: str = "sum") -> Tensor:
    """The total of these calls, which no other collector and no ``auxiliary_loss`` counts afterwards."""
    total = _total(calls, reduction)
    for others in this_book().lists:
        others[:] = [call for call in others if not any(call is taken for taken in calls)]
    for call in calls:
        last = call.module.last_call
        last.note = last.note._replace(objective=None, earlier=Page(), is_taken=True)
    return total


def _penalized(model: nn.Module) -> list[PenalizedModule]:
    return [module for module in model.modules() if isinstance(module, PenalizedModule)]


def _last_notes(modules: Iterable[PenalizedModule]) -> list[tuple[PenalizedModule, Note]]:
    """The calls of the last forward: those on the newest page."""
    called = []
    for module in modules:
        if module.last_call.is_dead:
            module.last_call.clear()
        note = module.last_call.note
        if note.objective is not None or note.is_taken:
            called.append((module, note))
    newest = max([note.page.number for _, note in called], default=0)
    return [(module, note) for module, note in called if note.page.number == newest]


def _calls(notes: Iterable[tuple[PenalizedModule, Note]]) -> list[ObjectiveCall]:
    return [
        ObjectiveCall(module, note.objective, note.with_gradients)
        for module, note in notes
        if note.objective is not None
    ]


def _require_forward(modules: Iterable[PenalizedModule]) -> None:
    for module in modules:
        if module.training and module.has_penalty:
            raise RuntimeError(
                f"auxiliary_loss: {type(module).__name__} is in training mode, and no forward in training "
                "mode has left an objective in this thread. Call it after model(x); a copy of the model, a "
                "replica, or a transform of torch.func that has ended, keeps its own"
            )


def _name(model: nn.Module, module: nn.Module) -> str:
    name = next((name for name, each in model.named_modules() if each is module), "")
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def _require_reduction(reduction: str) -> None:
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction={reduction!r} must be 'sum' or 'mean'")


def _total(calls: Sequence[ObjectiveCall], reduction: str, device: torch.device | None = None) -> Tensor:
    """The sum of the calls' penalties; on this device where there are none."""
    _require_reduction(reduction)
    layers: list[Tensor] = []
    others: list[Tensor] = []
    for call, objective in zip(calls, _with_squares(calls), strict=True):
        if belongs_to_ended_transform(call.objective.value):
            raise RuntimeError(
                f"an objective of {type(call.module).__name__} belongs to a transform of torch.func that has "
                "ended: open collect_objectives() inside the function that is transformed"
            )
        if torch.is_grad_enabled() and not call.with_gradients:
            raise RuntimeError(
                f"an objective of {type(call.module).__name__} was computed without gradients. Call the "
                "model in training mode with gradients enabled; with activation checkpointing use "
                "use_reentrant=False; ask for a number to log under torch.no_grad()"
            )
        if (penalty := call.module.penalty(objective)) is not None:
            (layers if isinstance(call.module, PenalizedAttention) else others).append(penalty)
    if not layers and not others:
        return torch.zeros((), device=device)
    first = (layers or others)[0].device
    parts = [torch.stack([term.to(first) for term in each]).sum() for each in (layers, others) if each]
    if layers and reduction == "mean":
        parts[0] = parts[0] / len(layers)
    total = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    _spend_after_backward(total, calls)
    return total


def _with_squares(calls: Sequence[ObjectiveCall]) -> list[Objective]:
    """The calls' objectives; on an accelerator the squares of all that have one bound come from one pass."""
    found, alike = [call.objective for call in calls], defaultdict(list)
    if is_traced():
        return found
    for place, (module, (value, _, unit, *_), _) in enumerate(calls):
        if can_ask(value) or value.dim() > 0 or isinstance(unit, Tensor):
            continue
        if isinstance(module, PenalizedAttention) and module.is_squared:
            alike[module.objective_bound * unit, value.device, value.dtype].append(place)
    for (bound, *_), places in alike.items():
        if len(places) > 1:
            squares = bounded_square(torch.stack([found[place].value for place in places]), bound)
            for place, square in zip(places, squares.unbind(), strict=True):
                found[place] = found[place]._replace(square=square)
    return found


def _spend_after_backward(total: Tensor, calls: Sequence[ObjectiveCall]) -> None:
    if not total.requires_grad or is_traced():
        return
    last = [(call.module.last_call, call.objective) for call in calls]  # a backward pass has its own threads

    def spend(_: Tensor) -> None:
        for call, objective in last:
            call.spend(objective)

    total.register_hook(spend)


def _is_shared(call: ObjectiveCall) -> bool:
    """True where J is one number over the batch, and not one a sequence."""
    return isinstance(call.module, PenalizedAttention) and call.objective.value.dim() == 0


def _averages(objectives: Sequence[Objective], num_sequences: int, group: SequenceGroup) -> list[Objective]:
    if not objectives:
        return []
    values = torch.stack([objective.value for objective in objectives])
    counts = [num_sequences if objective.tokens is None else objective.tokens for objective in objectives]
    weights = torch.stack([torch.as_tensor(count).to(values) for count in counts]) * (num_sequences > 0)
    units = torch.stack([torch.as_tensor(objective.unit).to(values) for objective in objectives])
    sums = group.total(torch.stack([values * weights, units * weights, weights]))
    means = sums[:2] / sums[2].clamp_min(1)
    return [
        objective._replace(value=value, unit=unit if isinstance(objective.unit, Tensor) else objective.unit)
        for objective, value, unit in zip(objectives, means[0], means[1].detach(), strict=True)
    ]
