"""Episodes in environments: what the policy is told, when an episode ends, and the scores."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.models import DecisionTransformer, Policy
from kernel_attention_lab.control import (
    check_spaces,
    make_environment,
    normalized_score,
    random_roll_outs,
    roll_out,
)

LONGEST = 30


class Recorder(Policy):
    """Pushes the cart to where the pole falls, and notes all that it is told."""

    def __init__(self):
        super().__init__(4, 2, actions="discrete")
        self.layers = nn.ModuleList()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.told = []

    def forward(self, returns, states, actions, timesteps, attention_mask=None):
        self.told.append((returns[:, -1].clone(), states[:, -1].clone()))
        score = states[..., 2] + states[..., 3]
        return torch.stack([-score, score], dim=-1) + self.weight


def environments(count, name="CartPole-v1"):
    return [gymnasium.make(name) for _ in range(count)]


def transformer(**options):
    torch.manual_seed(1)
    sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 2, "feedforward_dim": 8, "context": 5}
    model = DecisionTransformer(4, 2, "softmax", actions="discrete", max_timestep=LONGEST, **sizes, **options)
    return model.double().eval()


def test_scores_of_0_and_100_are_the_references():
    """And the score is affine in the return."""
    reference = (-20.272305, 3234.3)
    returns = np.array([*reference, np.mean(reference)])
    np.testing.assert_allclose(normalized_score(returns, reference), [0.0, 100.0, 50.0], atol=1e-12)


def test_the_policy_is_told_the_return_that_is_left():
    """CartPole pays 1 a step, so after t steps target - t is left."""
    policy = Recorder()
    found = roll_out(policy, environments(2), [0, 1], 20.0, longest=LONGEST)
    assert (found.lengths == LONGEST).all()
    assert (found.returns == LONGEST).all()
    for step, (returns, _) in enumerate(policy.told):
        assert returns.tolist() == [20.0 - step] * 2


@pytest.mark.parametrize("memory", ["sliding", "recurrent"])
def test_episodes_do_not_depend_on_those_beside_them(memory):
    """One at a time, three at once or all at once. Their lengths differ, so the batch shrinks on the way."""
    model, seeds = transformer(), list(range(8))
    outcomes = [
        roll_out(model, environments(count), seeds, 9.0, memory=memory, longest=LONGEST)
        for count in (1, 3, 8)
    ]
    assert len(set(outcomes[0].lengths)) > 1
    for other in outcomes[1:]:
        np.testing.assert_array_equal(other.returns, outcomes[0].returns)
        np.testing.assert_array_equal(other.lengths, outcomes[0].lengths)


def test_the_two_memories_play_the_same_while_the_context_holds_the_episode():
    model, seeds = transformer(), list(range(6))
    found = [
        roll_out(model, environments(6), seeds, 9.0, memory=memory, context=LONGEST, longest=LONGEST)
        for memory in ("sliding", "recurrent")
    ]
    np.testing.assert_array_equal(found[0].lengths, found[1].lengths)
    np.testing.assert_array_equal(found[0].returns, found[1].returns)


def test_an_episode_is_the_one_that_a_plain_loop_plays():
    """The environment's own states in, the greedy action out, until it ends."""
    policy = Recorder()
    policy.weight.requires_grad_(False)
    found = roll_out(policy, environments(1), [3], 0.0, longest=LONGEST)
    environment = gymnasium.make("CartPole-v1")
    state, _ = environment.reset(seed=3)
    for step in range(LONGEST):
        np.testing.assert_array_equal(policy.told[step][1][0].numpy(), state.astype(np.float64))
        state, _, terminated, truncated, _ = environment.step(int(state[2] + state[3] > 0))
        if terminated or truncated:
            break
    assert found.lengths.tolist() == [step + 1]


def test_random_actions_are_seeded():
    one, two = (random_roll_outs(environments(2), [0, 1, 2], LONGEST) for _ in range(2))
    np.testing.assert_array_equal(one.returns, two.returns)
    other = random_roll_outs(environments(2), [3, 4, 5], LONGEST)
    assert other.returns.tolist() != one.returns.tolist()


def test_environments_that_cannot_be_made_are_named():
    for name, message in (
        ("CartPole-v9", "environment 'CartPole-v9' cannot be made"),
        ("Nothing-v0", "environment 'Nothing-v0' cannot be made"),
        ("os:system-v0", "is not the name of a registered environment"),
        ("", "is not the name of a registered environment"),
    ):
        with pytest.raises(InputError, match=message):
            make_environment(name)
    with pytest.raises(InputError, match=r"cannot be made: .*gravitation"):
        make_environment("CartPole-v1", {"gravitation": 3})


def test_warnings_of_mujoco_leave_no_file(tmp_path, monkeypatch, caplog):
    """Its default is a file MUJOCO_LOG.TXT in the working folder; the cheetah of gymnasium causes one."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        make_environment("HalfCheetah-v5").close()
    assert list(tmp_path.iterdir()) == []
    assert sum("MuJoCo: " in message for message in caplog.messages) <= 1


def test_spaces_that_do_not_match_are_named():
    cart, pendulum = environments(1)[0], environments(1, "Pendulum-v1")[0]
    discrete = {"low": [], "high": []}
    check_spaces(cart, state_dim=4, action_dim=2, **discrete)
    check_spaces(pendulum, state_dim=3, action_dim=1, low=[-2.0], high=[2.0])
    cases = [
        (cart, {"state_dim": 5, "action_dim": 2} | discrete, "those of the data have 5 numbers"),
        (cart, {"state_dim": 4, "action_dim": 3} | discrete, "the data have 3 discrete ones"),
        (cart, {"state_dim": 4, "action_dim": 2, "low": [-1.0] * 2, "high": [1.0] * 2}, "have 2 numbers"),
        (pendulum, {"state_dim": 3, "action_dim": 1} | discrete, "the data have 1 discrete ones"),
        (pendulum, {"state_dim": 3, "action_dim": 1, "low": [-3.0], "high": [2.0]}, "go from"),
    ]
    for environment, described, message in cases:
        with pytest.raises(InputError, match=message):
            check_spaces(environment, **described)
