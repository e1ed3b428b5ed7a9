"""Layers with an auxiliary objective, and the sum of it that is added to a task's loss."""

from __future__ import annotations

import copy
import functools
import logging
import math
from abc import ABC, abstractmethod
from numbers import Real

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.tensors.recompute import is_traced

_log = logging.getLogger(__name__)

OBJECTIVE_BOUND = 16.0
"""Up to this |J| a layer's penalty is the papers' J^2; beyond, it grows with log |J|."""


class PenalizedModule(nn.Module, ABC):
    """A module with a term of its own, which ``auxiliary_loss`` adds to the task's loss.

    Attributes:
        objective: what the last forward in training mode found. None before such a forward. State dicts,
            copies and pickles do not hold it.
    """

    objective: Tensor | None = None

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """The term that the module adds to the loss, weights included; None where it adds nothing."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "objective": None}  # a tensor inside an autograd graph cannot be copied


class PenalizedAttention(AttentionLayer, PenalizedModule):
    """An attention layer with an objective J of its own, which ``auxiliary_loss`` adds to the task's loss.

    Attributes:
        objective: J of the last forward in training mode, a 0-dimensional tensor, or (B,) where the layer
            squares it per sequence. None before such a forward, or where the weight of J is 0. State dicts,
            copies and pickles do not hold it.
        objective_bound: the largest |J| at which the penalty is the papers' square, see ``bounded_square``;
            infinity removes the bound.
        objective_unit: the unit of that bound: 1, or the number of tokens where J is a sum over them.
        objective_tokens: the real tokens of that forward, where J is a mean over tokens; None where it is a
            mean over sequences.
    """

    objective: Tensor | None
    objective_tokens: Tensor | int | None = None
    objective_bound: float = OBJECTIVE_BOUND
    objective_unit: float | Tensor = 1.0

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.objective = None

    def squared_objective(self, objective: Tensor) -> Tensor:
        """``bounded_square`` of J. It logs a warning the first time that |J| exceeds the bound."""
        bound = self.objective_bound * self.objective_unit
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

        The layer's mode and its last objective do not change.
        """
        twin = copy.copy(self)  # shares the parameters
        twin.training, twin.objective = True, None
        twin.attend(x, None, attention_mask, is_causal)
        return None if twin.objective is None else twin.objective.mean()


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


def auxiliary_loss(model: nn.Module, reduction: str = "sum") -> Tensor:
    """The layers' own term of the loss: the sum over layers of eta J^2, a 0-dimensional tensor.

    What mixtures of experts add to balance their experts is part of it.

    Where |J| exceeds a layer's ``objective_bound``, ``bounded_square`` replaces the square, and a warning is
    logged once. This happens on inputs that are not standardised, and in the first epochs of wide layers.

    Call it after a forward in training mode, once per backward. The square is taken per micro-batch, so
    gradient accumulation averages J^2 of the parts, which is not J^2 of the whole batch. So does data
    parallelism, unless ``average_objectives`` comes first. The loss is 0 for a model without such layers.

    Args:
        model: any module that holds our layers.
        reduction: of eta J^2: "sum" over the layers (Primal-Attention poster) or "mean" (the released code).
            The terms of other modules are summed.

    Raises:
        InputError: for another reduction.
        RuntimeError: if the objective was computed without gradients, and gradients are enabled now.
    """
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction={reduction!r} must be 'sum' or 'mean'")
    modules = [module for module in model.modules() if isinstance(module, PenalizedModule)]
    terms = [(module, penalty) for module in modules if (penalty := module.penalty()) is not None]
    if not terms:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    if torch.is_grad_enabled() and not all(penalty.requires_grad for _, penalty in terms):
        raise RuntimeError(
            "auxiliary_loss: an objective was computed without gradients. Call it after a forward in "
            "training mode with gradients enabled; with activation checkpointing use use_reentrant=False"
        )
    layers = [penalty for module, penalty in terms if isinstance(module, PenalizedAttention)]
    others = [penalty for module, penalty in terms if not isinstance(module, PenalizedAttention)]
    parts = [torch.stack(each).sum() for each in (layers, others) if each]
    if layers and reduction == "mean":
        parts[0] = parts[0] / len(layers)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def average_objectives(model: nn.Module, cases: int, group: SequenceGroup) -> None:
    """Replace J of every layer by its mean over the batches of several processes; one all-reduce each way.

    Call it between the forward and ``auxiliary_loss``, on all processes. The square is then that of J of the
    whole batch. Every process adds the same penalty, and DistributedDataParallel, which averages the
    gradients, gives those of one process with the whole batch.

    A J per sequence is squared per sequence and stays as it is, and so do terms of other modules.

    Args:
        model: any module that holds our layers.
        cases: sequences of this process's batch; 0 for one that does not count.
        group: the processes, each with sequences of its own.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, PenalizedAttention)
        and module.objective is not None
        and module.objective.dim() == 0
    ]
    if not layers:
        return
    values = torch.stack([layer.objective for layer in layers if layer.objective is not None])
    counts = [cases if layer.objective_tokens is None else layer.objective_tokens for layer in layers]
    weights = torch.stack([torch.as_tensor(count).to(values) for count in counts]) * (cases > 0)
    units = torch.stack([torch.as_tensor(layer.objective_unit).to(values) for layer in layers])
    sums = group.total(torch.stack([values * weights, units * weights, weights]))
    means = sums[:2] / sums[2].clamp_min(1)
    for layer, objective, unit in zip(layers, means[0], means[1].detach(), strict=True):
        layer.objective = objective
        if isinstance(layer.objective_unit, Tensor):
            layer.objective_unit = unit
