"""The decision transformer: no look ahead, padding changes nothing, roll-outs are the parallel form."""

from __future__ import annotations

import pytest
import torch
from models.test_causal import CAUSAL

from kernel_attention.errors import InputError
from kernel_attention.models import (
    DecisionTransformer,
    RecurrentMemory,
    SlidingMemory,
    StatePolicy,
    make_memory,
)

BATCH, STEPS, STATE, ACTION = 3, 7, 5, 2
KINDS = ["continuous", "discrete"]
LAST_PRIMAL = ["softmax", {"primal": {"rank": 4, "eta": 0.05, "data_dependent": False}}]


def small(attention="softmax", **options):
    torch.manual_seed(0)
    sizes = {"embed_dim": 6, "num_heads": 2, "num_layers": 2, "feedforward_dim": 11, "dropout": 0.0}
    sizes |= {"context": STEPS, "max_timestep": 13, "return_scale": 10.0}
    model = DecisionTransformer(STATE, ACTION, attention, **{**sizes, **options}).double().eval()
    model.set_scale(torch.randn(STATE), torch.rand(STATE) + 0.5)
    return model


def episodes(actions="continuous", steps=STEPS):
    """(returns, states, actions, timesteps) of a few random episodes."""
    draw = torch.Generator().manual_seed(1)
    taken = torch.rand(BATCH, steps, ACTION, generator=draw, dtype=torch.float64) * 2 - 1
    if actions == "discrete":
        taken = torch.randint(ACTION, (BATCH, steps), generator=draw)
    return (
        torch.randn(BATCH, steps, generator=draw, dtype=torch.float64) * 10,
        torch.randn(BATCH, steps, STATE, generator=draw, dtype=torch.float64),
        taken,
        torch.arange(steps).expand(BATCH, steps),
    )


def played(memory, returns, states, actions):
    """The outputs of every step when the given actions are the ones taken, (B, K, a)."""
    outputs = []
    for step in range(returns.size(1)):
        outputs.append(memory.act(returns[:, step], states[:, step]))
        memory.observe(actions[:, step])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("actions", KINDS)
@pytest.mark.parametrize("name", CAUSAL)
def test_an_action_depends_on_its_state_and_on_nothing_later(name, actions):
    """Changing action t or anything after it leaves action t as it was; changing state t does not."""
    model = small(name, actions=actions)
    returns, states, taken, times = episodes(actions)
    cut = 4
    later = taken.clone()
    later[:, cut:] = 1 - later[:, cut:]
    with torch.no_grad():
        full = model(returns, states, taken, times)
        moved = [returns.clone(), states.clone()]
        for tensor in moved:
            tensor[:, cut + 1 :] += 1.0
        changed = model(*moved, later, times)
        torch.testing.assert_close(changed[:, : cut + 1], full[:, : cut + 1], rtol=0, atol=1e-12)
        moved[1][:, cut] += 1.0
        assert (model(*moved, later, times)[:, cut] - full[:, cut]).abs().max() > 1e-8


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_on_the_right_changes_no_real_step_and_no_objective(name):
    """Whatever the padded steps hold; the objective counts the real tokens only."""
    model = small([name, {"primal": {"rank": 3, "eta": 0.1}}], context=STEPS + 4)
    returns, states, taken, times = episodes()
    mask = torch.arange(STEPS + 4)[None] < torch.tensor([STEPS, STEPS, STEPS])[:, None]
    padded = [
        torch.cat([part, torch.full_like(part[:, :4], fill)], dim=1)
        for part, fill in ((returns, 50.0), (states, -3.0), (taken, 1.0), (times, 2))
    ]
    model.train()
    model.layers[0].attention.sample = False  # samples of two calls differ by design
    alone = model(returns, states, taken, times, torch.ones(BATCH, STEPS, dtype=torch.bool))
    objective = model.layers[1].attention.objective.clone()
    together = model(*padded, mask)
    torch.testing.assert_close(together[:, :STEPS], alone, rtol=0, atol=1e-11)
    torch.testing.assert_close(model.layers[1].attention.objective, objective, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("actions", KINDS)
@pytest.mark.parametrize("name", CAUSAL)
def test_recurrent_and_sliding_roll_outs_are_the_parallel_form(name, actions):
    """For the steps that fit into the context, where both are defined; float64, so 1e-12 is rounding."""
    model = small([name, "softmax"], actions=actions)
    returns, states, taken, times = episodes(actions)
    with torch.no_grad():
        expected = model(returns, states, taken, times)
    for memory in (RecurrentMemory(model, BATCH), SlidingMemory(model, STEPS)):
        torch.testing.assert_close(played(memory, returns, states, taken), expected, rtol=0, atol=1e-12)


def test_the_sliding_memory_forgets_what_left_its_context():
    """Step t is that of a parallel pass over the steps t - K + 1 to t, at their own time steps."""
    model = small(LAST_PRIMAL)
    returns, states, taken, times = episodes(steps=STEPS)
    outputs = played(SlidingMemory(model, 3), returns, states, taken)
    with torch.no_grad():
        for step in range(STEPS):
            window = slice(max(step - 2, 0), step + 1)
            expected = model(*(part[:, window] for part in (returns, states, taken, times)))[:, -1]
            torch.testing.assert_close(outputs[:, step], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("memory", ["sliding", "recurrent"])
def test_episodes_that_end_leave_the_others_as_they_are(memory):
    model = small(LAST_PRIMAL)
    returns, states, taken, times = episodes()
    with torch.no_grad():
        expected = model(returns, states, taken, times)
    kept, cut = torch.tensor([2, 0]), 3
    played_so_far = make_memory(model, BATCH, memory)
    played(played_so_far, returns[:, :cut], states[:, :cut], taken[:, :cut])
    played_so_far.keep(kept)
    rest = played(played_so_far, returns[kept, cut:], states[kept, cut:], taken[kept, cut:])
    torch.testing.assert_close(rest, expected[kept, cut:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["linear", "rpc"])
def test_a_backward_pass_through_a_roll_out_is_an_error(attention):
    """Its steps are computed without gradients, so part of them would be missing."""
    model = small(attention)
    returns, states, _, _ = episodes()
    actions, _ = model.act(returns[:, 0], states[:, 0], model.initial_state(BATCH))
    with pytest.raises(InputError, match="read after a state have no gradients"):
        actions.sum().backward()


def test_actions_stay_in_their_range_and_their_scale_is_the_models():
    """An affine change of the action space changes the actions by the same map, and nothing else."""
    model, returns_to_actions = small(), episodes()
    returns, states, taken, times = returns_to_actions
    low, high = torch.tensor([-4.0, 0.0]), torch.tensor([2.0, 10.0])
    with torch.no_grad():
        unit = model(returns, states, taken, times)
        model.set_action_range(low, high)
        center, radius = (low + high) / 2, (high - low) / 2
        moved = model(returns, states, center + radius * taken, times)
    torch.testing.assert_close(moved, center + radius * unit, rtol=1e-12, atol=1e-12)
    assert ((moved > low) & (moved < high)).all()


def test_a_policy_of_the_state_reads_nothing_else():
    torch.manual_seed(0)
    model = StatePolicy(STATE, ACTION, width=8).double().eval()
    returns, states, taken, times = episodes()
    with torch.no_grad():
        expected = model(returns, states, taken, times)
        other = model(returns + 1, states, -taken, times.flip(1))
    assert torch.equal(other, expected)
    memory = make_memory(model, BATCH, "recurrent")
    torch.testing.assert_close(played(memory, returns, states, taken), expected, rtol=0, atol=1e-13)


def test_the_feed_forward_networks_are_relus_unless_said_otherwise():
    """Where every hidden unit is -1, ReLU gives nothing, and GELU does."""
    steps = episodes()
    outputs = {}
    for activation in ("relu", "gelu"):
        model = small(activation=activation)
        with torch.no_grad():
            for layer in model.layers:
                layer.linear1.weight.zero_()
                layer.linear1.bias.fill_(-1.0)
            before = model(*steps)
            for layer in model.layers:
                layer.linear2.weight.add_(1.0 + torch.arange(6.0)[:, None])
            outputs[activation] = (model(*steps) - before).abs().max()
    assert outputs["relu"] == 0.0
    assert outputs["gelu"] > 1e-6
    with pytest.raises(InputError, match="activation"):
        small(activation="tanh")


def test_bad_shapes_and_sizes_are_named():
    model = small()
    returns, states, taken, times = episodes()
    with pytest.raises(InputError, match=r"states has shape \(3, 7, 4\), expected \(3, 7, 5\)"):
        model(returns, states[..., :4], taken, times)
    with pytest.raises(InputError, match=r"actions has shape \(3, 7\), expected \(3, 7, 2\)"):
        model(returns, states, taken[..., 0], times)
    with pytest.raises(InputError, match="K at least 1"):
        model(*(part[:, :0] for part in (returns, states, taken, times)))
    with pytest.raises(InputError, match="finite low < high"):
        model.set_action_range([-1.0, 0.0], [1.0, float("inf")])
    with pytest.raises(InputError, match="return_scale=0"):
        small(return_scale=0.0)
    with pytest.raises(InputError, match="actions"):
        small(actions="many")
    with pytest.raises(InputError, match="memory"):
        make_memory(model, 1, "endless")
    for memory in ("sliding", "recurrent"):
        played_out = make_memory(small(max_timestep=2), BATCH, memory)
        with pytest.raises(InputError, match="timestep 2 exceeds max_timestep=2"):
            played(played_out, returns, states, taken)
