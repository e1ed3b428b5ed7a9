"""Memories of the episodes that a policy plays: the last steps, all of them, or none.

The legend is that of ``kernel_attention.models.control.policies``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.decoding import reorder
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import unknown
from kernel_attention.models.control.decision_transformer import DecisionTransformer
from kernel_attention.models.control.policies import Policy

MEMORIES = ("sliding", "recurrent")


class Memory(ABC):
    """B episodes under way, all at the same step.

    Every step is ``act`` and then ``observe``. Gradients are off; put the model into evaluation mode first.
    """

    @abstractmethod
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """Returns-to-go (B,) and states (B, o) of a step -> its actions in their range or logits, (B, a)."""

    @abstractmethod
    def observe(self, actions: Tensor) -> None:
        """Remember the actions that were taken, (B, a), or (B,) where they are discrete."""

    @abstractmethod
    def keep(self, episodes: Tensor) -> None:
        """Go on with these episodes alone, int64 indices."""


class _Steps(NamedTuple):
    """Steps of B episodes: (B, K), (B, K, o), and (B, K, a) or (B, K)."""

    returns: Tensor
    states: Tensor
    actions: Tensor


class SlidingMemory(Memory):
    """The last steps, read anew at every step, as the decision transformer's released code does.

    Args:
        model: any policy.
        context: the number of steps that are kept.
    """

    def __init__(self, model: Policy, context: int) -> None:
        require_positive(context=context)
        self.model = model
        self.context = context
        self.timestep = 0
        self.steps: _Steps | None = None

    @torch.no_grad()
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """The action after the last steps and these returns and states."""
        if isinstance(self.model, DecisionTransformer):
            self.model.check_time(self.timestep)
        # The action of this step is not taken yet; a causal model does not read it.
        kind = torch.long if self.model.is_discrete else states.dtype
        shape = (len(states), 1) if self.model.is_discrete else (len(states), 1, self.model.action_dim)
        new = _Steps(returns[:, None], states[:, None], torch.zeros(shape, dtype=kind, device=states.device))
        if self.steps is not None:
            new = _Steps(*(torch.cat(parts, dim=1) for parts in zip(self.steps, new, strict=True)))
        self.steps = _Steps(*(part[:, -self.context :] for part in new))
        first = self.timestep + 1 - self.steps.returns.size(1)
        times = torch.arange(first, self.timestep + 1, device=states.device).expand_as(self.steps.returns)
        return self.model(*self.steps, times)[:, -1]

    def observe(self, actions: Tensor) -> None:
        """Put the actions that were taken in the place of those to come."""
        assert self.steps is not None, "act comes first"
        taken = self.steps.actions.clone()
        taken[:, -1] = actions
        self.steps = self.steps._replace(actions=taken)
        self.timestep += 1

    def keep(self, episodes: Tensor) -> None:
        """Forget the other episodes."""
        if self.steps is not None:
            self.steps = _Steps(*(part[episodes] for part in self.steps))


class RecurrentMemory(Memory):
    """All steps, in the layers' decoding states: constant time and memory a step where these are constant.

    For the first K steps of an episode its actions are those of ``SlidingMemory`` with a context of K. Later
    they differ: here no step is forgotten, and no step is read as if it were the first.

    Args:
        model: a decision transformer.
        batch_size: B.
    """

    def __init__(self, model: DecisionTransformer, batch_size: int) -> None:
        self.model = model
        self.state = model.initial_state(batch_size)

    @torch.no_grad()
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """The action after all steps so far and these returns and states."""
        actions, self.state = self.model.act(returns, states, self.state)
        return actions

    @torch.no_grad()
    def observe(self, actions: Tensor) -> None:
        """Read the actions that were taken."""
        self.state = self.model.observe(actions, self.state)

    def keep(self, episodes: Tensor) -> None:
        """Forget the other episodes."""
        self.state = reorder(self.state, episodes)


def make_memory(model: Policy, batch_size: int, memory: str = "sliding", context: int = 0) -> Memory:
    """The memory of B new episodes.

    Args:
        model: any policy. One that reads the current state alone needs no more than this state.
        batch_size: B.
        memory: "sliding" or "recurrent".
        context: steps that the sliding memory keeps; 0: those of the model's training.

    Raises:
        InputError: for another memory.
    """
    if memory not in MEMORIES:
        raise unknown("memory", memory, MEMORIES)
    if not isinstance(model, DecisionTransformer):
        return SlidingMemory(model, 1)
    if memory == "recurrent":
        return RecurrentMemory(model, batch_size)
    return SlidingMemory(model, context or model.context)
