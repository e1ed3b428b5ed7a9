"""Whole episodes of a policy, many at once.

Legend: E episodes, B of them under way, o numbers of a state, a numbers of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernel_attention.models import Policy, make_memory


@dataclass(frozen=True)
class RollOuts:
    """E whole episodes.

    Args:
        returns: the sum of the rewards of each, (E,).
        lengths: the steps of each, (E,).
    """

    returns: np.ndarray
    lengths: np.ndarray


def roll_out(
    policy: Policy,
    environments: Sequence[Any],
    seeds: Sequence[int],
    target: float,
    *,
    memory: str = "sliding",
    context: int = 0,
    longest: int,
    seen: Callable[[int], None] | None = None,
) -> RollOuts:
    """One episode for each seed, as many at once as there are environments.

    The policy is asked for a return of ``target``; what an episode has earned is taken off it. The most
    likely of discrete actions is taken. An episode that has ended leaves the batch, so its environment takes
    no further step.

    Args:
        policy: a model, which is put into evaluation mode.
        environments: of one kind.
        seeds: the seed of each episode's first state.
        target: the return that is asked for.
        memory: "sliding" or "recurrent"; see ``kernel_attention.models.control.decision_transformer``.
        context: steps that the sliding memory keeps; 0: those of training.
        longest: steps after which an episode ends in any case.
        seen: called with the number of the step before every step, for pictures.
    """
    policy.eval()
    parts = []
    for first in range(0, len(seeds), len(environments)):
        group = list(seeds[first : first + len(environments)])
        parts.append(_play(policy, environments[: len(group)], group, target, memory, context, longest, seen))
    return RollOuts(*(np.concatenate(values) for values in zip(*parts, strict=True)))


@torch.no_grad()
def _play(
    policy: Policy,
    environments: Sequence[Any],
    seeds: Sequence[int],
    target: float,
    memory: str,
    context: int,
    longest: int,
    seen: Callable[[int], None] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns and lengths of one episode in each environment."""
    parameter = next(policy.parameters())
    remembered = make_memory(policy, len(environments), memory, context)
    states = [each.reset(seed=seed)[0] for each, seed in zip(environments, seeds, strict=True)]
    returns, lengths = np.zeros(len(environments)), np.zeros(len(environments), dtype=np.int64)
    going = np.arange(len(environments))
    for step in range(longest):
        if seen is not None:
            seen(step)
        wanted = torch.as_tensor(target - returns[going]).to(parameter)
        outputs = remembered.act(wanted, torch.as_tensor(np.stack(states)).to(parameter))
        actions = outputs.argmax(dim=-1) if policy.is_discrete else outputs
        taken = actions.cpu().numpy()
        states, goes_on = [], []
        for place, number in enumerate(going.tolist()):
            action = int(taken[place]) if policy.is_discrete else taken[place]
            state, reward, terminated, truncated, _ = environments[number].step(action)
            returns[number] += float(reward)
            lengths[number] += 1
            if not (terminated or truncated):
                states.append(state)
                goes_on.append(place)
        if not goes_on:
            break
        remembered.observe(actions)
        if len(goes_on) < len(going):
            remembered.keep(torch.tensor(goes_on, device=parameter.device))
            going = going[goes_on]
    return returns, lengths


def random_roll_outs(environments: Sequence[Any], seeds: Sequence[int], longest: int) -> RollOuts:
    """One episode for each seed of actions that are drawn uniformly."""
    returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), dtype=np.int64)
    for place, seed in enumerate(seeds):
        each = environments[place % len(environments)]
        each.reset(seed=seed)
        each.action_space.seed(seed)
        for _ in range(longest):
            _, reward, terminated, truncated, _ = each.step(each.action_space.sample())
            returns[place] += float(reward)
            lengths[place] += 1
            if terminated or truncated:
                break
    return RollOuts(returns, lengths)


def normalized_score(returns: np.ndarray, reference: tuple[float, float]) -> np.ndarray:
    """100 (R - random) / (expert - random), D4RL's score (Fu et al. 2020); reference is (random, expert)."""
    random, expert = reference
    return 100.0 * (returns - random) / (expert - random)
