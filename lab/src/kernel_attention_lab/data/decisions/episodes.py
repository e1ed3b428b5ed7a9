"""Episodes of an agent: states, actions, rewards, and what follows from them.

Legend: E episodes, n steps of all of them, o numbers of a state, a numbers of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError


class Episode(NamedTuple):
    """One episode as a file has it: states (T, o) or (T + 1, o), actions (T, a) or (T,), rewards (T,)."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class Episodes:
    """The steps of all episodes, one after the other.

    Args:
        states: (n, o) float32.
        actions: (n, a) float32, or (n,) int64 where actions are discrete.
        rewards: (n,) float64.
        ends: (E,) int64; episode i has the steps from ``ends[i - 1]`` to ``ends[i] - 1``.
    """

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        """The number of episodes."""
        return len(self.ends)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.rewards)

    @property
    def is_discrete(self) -> bool:
        """Return whether the actions are whole numbers."""
        return self.actions.ndim == 1

    @cached_property
    def starts(self) -> np.ndarray:
        """The first step of every episode, (E,)."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The steps of every episode, (E,)."""
        return self.ends - self.starts

    @cached_property
    def returns(self) -> np.ndarray:
        """The sum of every episode's rewards, (E,)."""
        return np.add.reduceat(self.rewards, self.starts)

    @cached_property
    def returns_to_go(self) -> np.ndarray:
        """The sum of the rewards from each step to its episode's end, (n,) float32."""
        parts = np.split(self.rewards, self.ends[:-1])
        return np.concatenate([part[::-1].cumsum()[::-1] for part in parts]).astype(np.float32)

    @cached_property
    def timesteps(self) -> np.ndarray:
        """The number of each step in its episode, (n,) int64."""
        return np.arange(self.steps) - np.repeat(self.starts, self.lengths)

    @cached_property
    def step_ends(self) -> np.ndarray:
        """The end of each step's episode, (n,) int64."""
        return np.repeat(self.ends, self.lengths)

    def subset(self, chosen: Sequence[int] | np.ndarray) -> Episodes:
        """The episodes of these numbers, in this order."""
        steps = np.concatenate([np.arange(self.starts[one], self.ends[one]) for one in chosen])
        ends = self.lengths[np.asarray(chosen)].cumsum()
        return Episodes(self.states[steps], self.actions[steps], self.rewards[steps], ends)

    def best(self, fraction: float) -> Episodes:
        """The episodes of the largest returns, in their order: this fraction of all, at least one."""
        count = max(round(fraction * len(self)), 1)
        return self.subset(np.sort(np.argsort(-self.returns, kind="stable")[:count]))

    def split(self, fraction: float, seed: int) -> tuple[Episodes, Episodes]:
        """(the rest, a random fraction of the episodes, at least one).

        Raises:
            InputError: where nothing would be left.
        """
        count = max(round(fraction * len(self)), 1)
        if count >= len(self):
            raise InputError(
                f"validation_fraction={fraction} holds out {count} of {len(self)} episodes: none is left to "
                "train on"
            )
        order = np.random.default_rng(seed).permutation(len(self))
        return self.subset(np.sort(order[count:])), self.subset(np.sort(order[:count]))


def join_episodes(episodes: Sequence[Episode], source: str) -> Episodes:
    """Check the episodes of a file and put them one after the other.

    Raises:
        InputError: for no episode, one without a step, parts of different lengths, values that are no numbers
            or not finite as they are kept, and discrete actions that are not whole numbers from 0 on. The
            message names the episode and the step.
    """
    if not episodes:
        raise InputError(f"{source}: has no episode")
    for number, (states, actions, rewards) in enumerate(episodes):
        for name, values in (("states", states), ("actions", actions), ("rewards", rewards)):
            if values.dtype.kind not in "biuf":
                raise InputError(f"{source}: episode {number}: {name} are no numbers ({values.dtype})")
        where = f"{source}: episode {number}"
        if states.ndim != 2 or rewards.ndim != 1 or actions.ndim not in (1, 2):
            shapes = f"states {states.shape}, actions {actions.shape}, rewards {rewards.shape}"
            raise InputError(f"{where} has {shapes}, expected (T, o), (T, a) or (T,), (T,)")
        if len(rewards) == 0:
            raise InputError(f"{where} has no step")
        if 0 in (*states.shape, *actions.shape):
            raise InputError(f"{where} has states {states.shape} and actions {actions.shape}: one is empty")
        if len(actions) != len(rewards) or len(states) - len(rewards) not in (0, 1):
            raise InputError(
                f"{where} has {len(states)} states, {len(actions)} actions and {len(rewards)} rewards: it is "
                "not whole"
            )
        widths = [(one.states.shape[1:], one.actions.shape[1:]) for one in (episodes[0], episodes[number])]
        if widths[0] != widths[1]:
            raise InputError(
                f"{where} has states and actions of {widths[1]} numbers, episode 0 of {widths[0]}"
            )
    kept = [_kept(*one, f"{source}: episode {number}") for number, one in enumerate(episodes)]
    states, actions, rewards = (np.concatenate(part) for part in zip(*kept, strict=True))
    return Episodes(states, actions, rewards, np.cumsum([len(one.rewards) for one in episodes]))


def _kept(states: np.ndarray, actions: np.ndarray, rewards: np.ndarray, where: str) -> Episode:
    """An episode in the types of ``Episodes``, checked as it is kept: a cast can make infinities."""
    with np.errstate(over="ignore", invalid="ignore"):
        to_go = rewards.astype(np.float64)[::-1].cumsum()[::-1].astype(np.float32)
        found = Episode(
            states.astype(np.float32),
            actions.astype(np.int64 if actions.ndim == 1 else np.float32),
            rewards.astype(np.float64),
        )
    for name, values in (
        ("states", found.states),
        ("actions", actions if actions.ndim == 1 else found.actions),
        ("rewards", found.rewards),
        ("returns", to_go),
    ):
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if not finite.all():
            raise InputError(f"{where}: {name} are not finite at step {int(np.argmin(finite))}")
    if actions.ndim == 1:
        right = (found.actions == actions) & (found.actions >= 0)
        if not right.all():
            step = int(np.argmin(right))
            raise InputError(
                f"{where}: its action is {actions[step]} at step {step}; accepted where actions have the "
                "shape (T,), so that they are discrete: whole numbers from 0 on. Continuous ones have (T, a)"
            )
    return found._replace(states=found.states[: len(rewards)])
