"""Modules with a term of their own in the loss."""

import copy
import functools
import logging
import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import (
    LastCall,
    LastCalls,
    Objective,
    ObjectiveCall,
    collecting_alone,
    this_book,
)
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.tensors.recompute import (
    can_ask,
    differentiable_gradients,
    differentiable_leaves,
    is_traced,
    only_formulas,
)
from kernel_attention.tensors.statistics import mean_or_zero

_log = logging.getLogger(__name__)

OBJECTIVE_BOUND = 16.0
"""Up to this |J| a layer's penalty is the papers' J^2; beyond, it grows with log |J|."""


class PenalizedModule(nn.Module):
    """A module with a term of its own, which ``auxiliary_loss`` adds to the task's loss.

    Its forward pass in training mode hands what it finds to ``record_objective``. An attention layer's
    ``attend`` returns it instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_calls = LastCalls()

    def penalty(self, objective: Objective | None = None) -> Tensor | None:
        """The term that a call with this objective adds to the loss, weights included.

        None for the objective: that of the last call. None in return where it adds nothing.
        """
        objective = self.last_objective if objective is None else objective
        return None if objective is None else self.weigh_objective(objective)

    def weigh_objective(self, objective: Objective) -> Tensor:
        """The term of the loss with this objective, weights included. Every module has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no weigh_objective")

    @property
    def last_call(self) -> LastCall:
        """The last call in this thread."""
        return self._last_calls.own

    @property
    def has_penalty(self) -> bool:
        """True where a forward in training mode leaves an objective."""
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
            self.record_objective(Objective(value))

    @property
    def last_objective(self) -> Objective | None:
        """The objective of the last call of this thread with its unit and its tokens; None before it."""
        if self.last_call.is_dead:
            self.last_call.clear()
        return self.last_call.note.objective

    def record_objective(self, objective: Objective | Tensor) -> None:
        """Hand what a call in training mode found, a tensor being J alone, to the open collectors and
        ``auxiliary_loss``.

        A call inside a backward pass is a checkpointed one that is computed again: it has been counted.

        Raises:
            RuntimeError: in a replica of ``nn.DataParallel``, whose objective nobody would get.
        """
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return
        objective = Objective(objective) if isinstance(objective, Tensor) else objective
        with_gradients = torch.is_grad_enabled()
        call = ObjectiveCall(self, objective, with_gradients)
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
        self._last_calls = LastCalls()


class PenalizedAttention(AttentionLayer, PenalizedModule):
    """An attention layer with an objective J of its own, which ``auxiliary_loss`` adds to the task's loss.

    Attributes:
        objective_bound: the largest |J| at which the penalty is the papers' square, see ``bounded_square``;
            infinity removes the bound. It counts in the unit of the call's ``Objective``.
    """

    objective_bound: float = OBJECTIVE_BOUND

    record_objective = PenalizedModule.record_objective  # in place of the refusal of other layers

    @property
    def is_squared(self) -> bool:
        """True where the penalty has the square of J."""
        return True

    def squared_objective(self, objective: Tensor, unit: float | Tensor = 1.0) -> Tensor:
        """``bounded_square`` of J. It logs a warning the first time that |J| exceeds the bound."""
        bound = self.objective_bound * unit
        if can_ask(objective):
            if not (objective.detach().abs() > bound).any():
                return objective.square()
            _warn_of_large_objectives()
        return bounded_square(objective, bound)

    def square_of(self, objective: Objective) -> Tensor:
        """``squared_objective``, unless it is known."""
        if objective.square is not None:
            return objective.square
        return self.squared_objective(objective.value, objective.unit)

    def measure_objective(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor | None:
        """J on x, a mean over the sequences where each has its own; None where the weight of J is 0.

        The layer's mode and its last objective do not change, and no open collector gets this one.
        """
        twin = copy.copy(self)  # shares the parameters
        twin.training = True
        with collecting_alone() as calls:
            twin.forward(x, attention_mask=attention_mask, is_causal=is_causal)
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
    if torch.compiler.is_compiling() or only_formulas():
        return _bounded_square(objective, bound)
    if not isinstance(bound, Tensor) and math.isinf(bound):
        return objective.square()
    return _BoundedSquare.apply(objective, bound)


def _bounded_square(objective: Tensor, bound: float | Tensor) -> Tensor:
    # Both branches have a gradient of their own, so that neither may overflow where the other is taken.
    size = objective.abs()
    inside = size <= bound
    square = objective.where(inside, 0.0).square()
    beyond = size.where(~inside, bound).div(bound).log() * (2 * bound**2) + bound**2
    return torch.where(inside, square, beyond)


class _BoundedSquare(torch.autograd.Function):
    """In few launches: m^2 + 2 c^2 log r with m = min(max(J, -c), c), r = max(|J| / c, 1). Slope 2 m / r."""

    @staticmethod
    def forward(ctx: Any, objective: Tensor, bound: float | Tensor) -> Tensor:
        excess = (objective / bound).abs_().clamp_min_(1.0)
        cut = torch.clamp(objective, -bound, bound)  # type: ignore[arg-type]  # either kind of bound
        ctx.bound = bound
        ctx.save_for_backward(objective, cut, excess)
        if isinstance(bound, Tensor):
            return torch.addcmul(cut * cut, excess.log(), bound.square(), value=2)
        return torch.add(cut * cut, excess.log(), alpha=2 * bound**2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        objective, cut, excess = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = differentiable_leaves([objective], [True])
            value = _bounded_square(leaves[0], ctx.bound)
            return *differentiable_gradients([value], leaves, [True], grads), None
        return (grads[0] * cut).div_(excess).mul_(2), None


@functools.cache
def _warn_of_large_objectives() -> None:
    """Log the warning, once in a process."""
    _log.warning(
        "auxiliary_loss: an objective |J| exceeds its layer's objective_bound, beyond which the penalty "
        "grows with log |J|, not J^2. Standardise the inputs: mean 0 and variance 1 of every channel. Where "
        "they are, a wide first layer can exceed it for the first few epochs"
    )
