"""Batches of windows of episodes.

Legend: B windows of a batch, K time steps of a window, o numbers of a state, a numbers of an action.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernel_attention_lab.data.decisions.episodes import Episodes
from kernel_attention_lab.data.step_sampler import StepSampler

TOKENS_PER_STEP = 3  # return-to-go, state, action


class DecisionBatch(NamedTuple):
    """returns (B, K); states (B, K, o); actions (B, K, a) or (B, K); timesteps (B, K); is_real (B, K) bool.

    The steps of a window that are not real come last and are zero.
    """

    returns: Tensor
    states: Tensor
    actions: Tensor
    timesteps: Tensor
    is_real: Tensor

    @property
    def attention_mask(self) -> Tensor:
        """The real tokens, three a step, (B, 3 K)."""
        return self.is_real.repeat_interleave(TOKENS_PER_STEP, dim=1)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The arguments of a policy."""
        return tuple(self)


class WindowSampler(StepSampler[int]):
    """Windows by their first step, every step equally likely, with replacement.

    So an episode is chosen in proportion to its length, and a start in it uniformly, as in the decision
    transformer's code. Batch i is a function of (seed, i) alone.

    Args:
        steps_of_data: steps of all episodes.
        batch_size: B.
        steps: batches of a round.
        seed: of the draws.
    """

    per_epoch = 1

    def __init__(self, steps_of_data: int, batch_size: int, steps: int, seed: int = 0) -> None:
        super().__init__(batch_size, steps)
        self.steps_of_data = steps_of_data
        self.seed = seed

    def batches(self, epoch: int) -> list[list[int]]:
        """The first steps of the windows of batch ``epoch``."""
        draw = np.random.default_rng((self.seed, epoch))
        return [draw.integers(self.steps_of_data, size=self.batch_size).tolist()]


class _Windows(Dataset[DecisionBatch]):
    """Windows of K steps, indexed by the first steps of a whole batch."""

    def __init__(self, episodes: Episodes, context: int) -> None:
        self.episodes = episodes
        self.context = context

    def __len__(self) -> int:
        return self.episodes.steps

    def __getitem__(self, starts: list[int]) -> DecisionBatch:
        return windows_from(self.episodes, np.asarray(starts), self.context)


def windows_from(episodes: Episodes, starts: np.ndarray, context: int) -> DecisionBatch:
    """The windows that begin at these steps (B,) of the data and end with their episode, or after K steps."""
    steps = starts[:, None] + np.arange(context)
    is_real = steps < episodes.step_ends[starts][:, None]
    steps = np.where(is_real, steps, 0)

    def chosen(values: np.ndarray) -> Tensor:
        found = torch.from_numpy(values[steps])
        mask = torch.from_numpy(is_real)
        return found.masked_fill(~(mask if found.dim() == 2 else mask[..., None]), 0)

    parts = (episodes.returns_to_go, episodes.states, episodes.actions, episodes.timesteps)
    returns, states, actions, timesteps = map(chosen, parts)
    return DecisionBatch(returns, states, actions, timesteps, torch.from_numpy(is_real))


def training_windows(
    episodes: Episodes, context: int, batch_size: int, steps: int, seed: int = 0
) -> DataLoader[DecisionBatch]:
    """Rounds of ``steps`` batches of drawn windows; see ``WindowSampler``."""
    return _loader(_Windows(episodes, context), WindowSampler(episodes.steps, batch_size, steps, seed))


def ordered_windows(
    episodes: Episodes, context: int, batch_size: int, most: int = 0
) -> DataLoader[DecisionBatch]:
    """Windows that cover every step of the episodes once, or ``most`` evenly spaced ones of them."""
    starts = np.flatnonzero(episodes.timesteps % context == 0)
    if most and len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    batches = [starts[first : first + batch_size].tolist() for first in range(0, len(starts), batch_size)]
    return _loader(_Windows(episodes, context), batches)


def _loader(windows: _Windows, batches: Iterable[list[int]]) -> DataLoader[DecisionBatch]:
    # A loader draws a number for its workers; its own generator keeps this from the global one.
    return DataLoader(windows, batch_size=None, sampler=batches, generator=torch.Generator())
