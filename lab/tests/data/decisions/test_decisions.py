"""Episodes, their windows, and the formats they come in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given
from hypothesis import strategies as st
from tasks.decision_data import CART, PENDULUM, make_decisions, played, space_text, write_minari

from kernel_attention.errors import InputError
from kernel_attention_lab.data.decisions.batches import (
    WindowSampler,
    ordered_windows,
    training_windows,
    windows_from,
)
from kernel_attention_lab.data.decisions.d4rl import convert_d4rl, read_d4rl
from kernel_attention_lab.data.decisions.episodes import Episode, join_episodes
from kernel_attention_lab.data.decisions.loading import load_decisions
from kernel_attention_lab.data.decisions.sets import list_decision_sets
from kernel_attention_lab.data.fetching import NotDownloadedError, without_fetching

SCORES = {
    "halfcheetah": {"medium": 37.5, "expert": 94.7, "replay": 12.0},
    "hopper": {"medium": 50.8, "expert": 99.6, "replay": 21.9},
    "walker2d": {"medium": 73.1, "expert": 87.9, "replay": 42.6},
}
"""Mean normalised returns that come with the sets of the environment variable's folder."""

BOX = space_text(Box(-np.inf, np.inf, (4,), np.float32))
SPACES = (BOX, space_text(Discrete(2)))
REAL = Path(os.environ.get("MINARI_DATASETS_PATH", "/nowhere")) / "mujoco-local"
real = pytest.mark.skipif(not REAL.is_dir(), reason="MINARI_DATASETS_PATH has no data sets mujoco-local/*")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_decisions(tmp_path_factory.mktemp("decisions"))


@pytest.fixture(autouse=True)
def _without_other_sets(monkeypatch, tmp_path, request):
    """Only the sets of a test are at hand, and nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "real" not in request.node.name:
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "none"))


def drawn(lengths=(5, 1, 9, 3), discrete=False):
    """Random episodes of these lengths, as files have them."""
    draw = np.random.default_rng(0)
    return [
        Episode(
            draw.normal(size=(length + 1, 2)),
            draw.integers(3, size=length) if discrete else draw.normal(size=(length, 4)),
            draw.normal(size=length),
        )
        for length in lengths
    ]


def test_what_follows_from_episodes_is_what_a_loop_finds():
    parts = drawn()
    found = join_episodes(parts, "drawn")
    assert (len(found), found.steps, found.lengths.tolist()) == (4, 18, [5, 1, 9, 3])
    step = 0
    for number, part in enumerate(parts):
        assert found.returns[number] == pytest.approx(sum(part.rewards), abs=1e-12)
        for time in range(len(part.rewards)):
            assert found.returns_to_go[step] == pytest.approx(sum(part.rewards[time:]), abs=1e-6)
            assert found.timesteps[step] == time
            np.testing.assert_array_equal(found.states[step], part.states[time].astype(np.float32))
            np.testing.assert_array_equal(found.actions[step], part.actions[time].astype(np.float32))
            step += 1


def test_the_best_and_a_part_of_the_episodes():
    found = join_episodes(drawn((4,) * 10), "drawn")
    best = found.best(0.3)
    assert sorted(best.returns) == sorted(found.returns)[-3:]
    assert found.best(0.01).returns == [found.returns.max()]
    rest, held_out = found.split(0.2, seed=1)
    assert (len(rest), len(held_out)) == (8, 2)
    assert sorted([*rest.returns, *held_out.returns]) == pytest.approx(sorted(found.returns))
    again = found.split(0.2, seed=1)[1]
    np.testing.assert_array_equal(again.states, held_out.states)
    with pytest.raises(InputError, match="none is left"):
        found.best(0.1).split(0.5, seed=0)


@pytest.mark.parametrize("discrete", [False, True])
def test_a_window_is_a_part_of_one_episode_and_the_rest_is_zero(discrete):
    found = join_episodes(drawn(discrete=discrete), "drawn")
    starts = np.arange(found.steps)
    batch = windows_from(found, starts, 4)
    assert batch.attention_mask.shape == (found.steps, 12)
    for start, end in zip(starts, found.step_ends, strict=True):
        count = min(4, end - start)
        assert batch.is_real[start].tolist() == [True] * count + [False] * (4 - count)
        for values, whole in (
            (batch.returns, found.returns_to_go),
            (batch.states, found.states),
            (batch.actions, found.actions),
            (batch.timesteps, found.timesteps),
        ):
            np.testing.assert_array_equal(values[start, :count].numpy(), whole[start : start + count])
            assert not values[start, count:].any()


def test_windows_in_order_cover_every_step_once():
    found = join_episodes(drawn(), "drawn")
    batches = list(ordered_windows(found, 4, 3))
    assert sum(int(batch.is_real.sum()) for batch in batches) == found.steps
    states = torch.cat([batch.states[batch.is_real] for batch in batches]).numpy()
    np.testing.assert_array_equal(states, found.states)
    assert sum(len(batch.returns) for batch in ordered_windows(found, 2, 3, most=5)) == 5


def test_windows_are_drawn_in_proportion_to_the_length_of_their_episode():
    found = join_episodes(drawn(), "drawn")
    draws = 40_000
    sampler = WindowSampler(found.steps, 100, draws // 100, seed=3)
    starts = np.concatenate(list(sampler))
    counts = np.histogram(starts, np.concatenate([[0], found.ends]))[0]
    shares = found.lengths / found.steps
    deviations = np.sqrt(draws * shares * (1 - shares))
    assert (np.abs(counts - draws * shares) < 4.5 * deviations).all()  # one in 40,000 by chance
    within = np.bincount(starts, minlength=found.steps)
    assert (np.abs(within - draws / found.steps) < 4.5 * np.sqrt(draws / found.steps)).all()


def test_a_batch_depends_on_the_seed_and_its_number_alone():
    """Two rounds of two batches are one round of four; a skipped batch leaves the others as they are."""
    short, long = WindowSampler(18, 3, 2, seed=5), WindowSampler(18, 3, 4, seed=5)
    expected = list(long)
    first = list(short)
    short.set_epoch(1)
    assert [*first, *short] == expected
    long.skip(3)
    assert list(long) == expected[3:]
    assert list(WindowSampler(18, 3, 4, seed=6)) != expected
    loader = training_windows(join_episodes(drawn(), "drawn"), 4, 3, 2, seed=5)
    state = torch.get_rng_state()
    assert [batch.states.shape for batch in loader] == [(3, 4, 2)] * 2
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not read"


def test_the_generated_sets_are_read_as_they_were_written(root):
    assert [info.name for info in list_decision_sets(root)] == [CART, PENDULUM]
    cart, pendulum = load_decisions(CART, root), load_decisions(PENDULUM, root)
    assert (cart.state_dim, cart.action_dim, cart.low, cart.environment) == (4, 2, (), "CartPole-v1")
    assert cart.reference == (20.0, 80.0)
    assert (pendulum.action_dim, pendulum.low, pendulum.high) == (1, (-2.0,), (2.0,))
    assert pendulum.reference is None
    for number, episode in enumerate(played("CartPole-v1", 12)):
        part = cart.episodes.subset([number])
        np.testing.assert_array_equal(part.states, episode["observations"][:-1])
        np.testing.assert_array_equal(part.actions, episode["actions"])


def test_joined_sets_are_one_after_the_other(root):
    one = load_decisions(CART, root).episodes
    two = load_decisions(f"{CART} + {CART}", root).episodes
    assert (len(two), two.steps) == (2 * len(one), 2 * one.steps)
    for key in ("returns", "lengths", "timesteps", "returns_to_go"):
        np.testing.assert_array_equal(getattr(two, key), np.tile(getattr(one, key), 2))
    with pytest.raises(InputError, match="cannot be joined: environment is CartPole-v1 and Pendulum-v1"):
        load_decisions(f"{CART}+{PENDULUM}", root)


@real
@pytest.mark.parametrize("name", SCORES)
def test_the_real_sets_have_their_known_scores(name):
    for level, score in SCORES[name].items():
        data = load_decisions(f"mujoco-local/{name}/{level}-v0")
        low, high = data.reference
        assert 100 * (data.episodes.returns.mean() - low) / (high - low) == pytest.approx(score, abs=0.05)
        assert 50_000 <= data.episodes.steps < 51_000
        assert data.environment.lower() == f"{name}-v5"
    joined = load_decisions(f"mujoco-local/{name}/medium-v0+mujoco-local/{name}/expert-v0")
    assert joined.episodes.steps > 100_000 - 1


@pytest.fixture
def d4rl(tmp_path):
    """A D4RL file of 30 steps: ends at 10 and 25, cut off at 18, the rest unfinished; and a change of it."""

    def make(name="hopper_medium-v2.hdf5", **changes):
        draw = np.random.default_rng(0)
        ends = np.zeros(30, dtype=bool)
        parts = {
            "observations": draw.normal(size=(30, 11)).astype(np.float32),
            "actions": draw.uniform(-1, 1, size=(30, 3)).astype(np.float32),
            "rewards": draw.normal(size=30).astype(np.float32),
            "terminals": np.where(np.isin(np.arange(30), [9, 24]), True, ends),
            "timeouts": np.where(np.arange(30) == 17, True, ends),
        }
        with h5py.File(tmp_path / name, "w") as file:
            for key, values in (parts | changes).items():
                if values is not None:
                    file[key] = values
        return tmp_path / name

    return make


def test_d4rl_files_are_cut_where_episodes_end(d4rl, tmp_path):
    path = d4rl()
    assert read_d4rl(path).lengths.tolist() == [10, 8, 7]
    data = load_decisions("hopper_medium-v2.hdf5", tmp_path)
    assert (data.environment, data.reference) == ("Hopper-v5", (-20.272305, 3234.3))
    assert (data.low, data.high) == ((-1.0,) * 3, (1.0,) * 3)
    assert read_d4rl(d4rl(timeouts=None)).lengths.tolist() == [10, 15]
    long = {
        key: np.zeros((2500, *shape), np.float32)
        for key, shape in (("observations", (11,)), ("actions", (3,)))
    }
    long |= {"rewards": np.ones(2500), "terminals": np.arange(2500) == 2100, "timeouts": None}
    assert read_d4rl(d4rl(**long)).lengths.tolist() == [1000, 1000, 101]


def test_a_converted_file_is_the_same_data(d4rl, tmp_path):
    path = d4rl()
    folder = convert_d4rl(path, "d4rl/hopper/medium-v0", "Hopper-v5", tmp_path / "sets")
    assert folder == tmp_path / "sets/d4rl/hopper/medium-v0"
    one, two = load_decisions(str(path)), load_decisions("d4rl/hopper/medium-v0", tmp_path / "sets")
    assert (two.environment, two.low, two.high, two.reference) == (
        one.environment,
        one.low,
        one.high,
        one.reference,
    )
    for key in ("states", "actions", "rewards", "ends"):
        np.testing.assert_array_equal(getattr(two.episodes, key), getattr(one.episodes, key))
    with pytest.raises(InputError, match="is there already"):
        convert_d4rl(path, "d4rl/hopper/medium-v0", "Hopper-v5", tmp_path / "sets")
    for wrong in (("no version", "Hopper-v5"), ("d4rl/x-v0", "Hoper-v5")):
        with pytest.raises(InputError, match="convert_d4rl"):
            convert_d4rl(path, *wrong, tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_bad_d4rl_files_are_named(d4rl, tmp_path):
    whole = d4rl().read_bytes()
    (tmp_path / "cut.hdf5").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.hdf5").write_text("no data")
    cases = {
        "cut.hdf5": "cut.hdf5: truncated or not an HDF5 file",
        "text.hdf5": "text.hdf5: truncated or not an HDF5 file",
        "none.hdf5": r"dataset 'none.hdf5': no such file",
        d4rl("a.hdf5", terminals=None).name: "not a D4RL file .it has no terminals",
        d4rl("b.hdf5", rewards=np.ones(29)).name: "different lengths",
        d4rl("c.hdf5", rewards=np.where(np.arange(30) == 12, np.nan, 1.0)).name: (
            "episode 1: rewards are not finite at step 2"
        ),
        d4rl("d.hdf5", terminals=np.zeros(30), timeouts=None).name: "no episode in it ends",
        d4rl("e.hdf5", actions=np.full((30, 3), 1.5)).name: "an action is 1.5",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            load_decisions(name, tmp_path)


def test_bad_sets_are_named(root, tmp_path):
    def written(name, change=None, spaces=SPACES, **metadata):
        episodes = played("CartPole-v1", 3)
        if change is not None:
            change(episodes)
        write_minari(tmp_path, name, episodes, "CartPole-v1", spaces, **metadata)
        return name

    def empty(episodes):
        episodes[1] = {key: values[: int(key == "observations")] for key, values in episodes[1].items()}

    def not_a_number(episodes):
        episodes[2]["rewards"][4] = np.nan

    def infinite(episodes):
        episodes[0]["observations"][3, 1] = np.inf

    def torn(episodes):
        episodes[0]["actions"] = episodes[0]["actions"][:-2]

    unbounded = json.loads(BOX) | {"shape": [1], "low": [float("-inf")], "high": [float("inf")]}
    cases = {
        written("a-v0", empty): "dataset a-v0: episode 1 has no step",
        written("b-v0", not_a_number): "dataset b-v0: episode 2: rewards are not finite at step 4",
        written("c-v0", infinite): "episode 0: states are not finite at step 3",
        written("d-v0", torn): "it is not whole",
        written("e-v0", spaces=(BOX, json.dumps(unbounded))): "have no bounds",
        written("f-v0", spaces=(BOX, space_text(Discrete(2, start=1)))): "those that start at 0",
        written("g-v0", env_spec=json.dumps({"id": "os:system-v0", "kwargs": {}})): (
            "'os:system-v0' is not the name of a registered environment"
        ),
        written("h-v0", env_spec="3"): "env_spec does not describe an environment",
        written("i-v0", action_space=None): "has no action_space",
        "j-v0": "unknown dataset 'j-v0' .not downloaded.*at hand in .*a-v0, b-v0",
        "mujoco-local/a/b-v0": "a data set of this machine",
        "../a-v0": "a name ends in -v and a number",
        "tiny": "a name ends in -v and a number",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            load_decisions(name, tmp_path)
    (tmp_path / "a-v0/data/metadata.json").write_text("{")
    with pytest.raises(InputError, match="not readable as JSON"):
        load_decisions("a-v0", tmp_path)
    file = tmp_path / "b-v0/data/main_data.hdf5"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(InputError, match="truncated or not a Minari data set"):
        load_decisions("b-v0", tmp_path)
    with pytest.raises(InputError, match="did you mean 'tiny/cart/mixed-v0'"):
        load_decisions("tiny/carts/mixed-v0", root)


def test_nothing_is_downloaded_where_nothing_is_to_be_fetched(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("minari.download_dataset", lambda name: pytest.fail(f"downloads {name}"))
    with without_fetching(), pytest.raises(NotDownloadedError, match="'j-v0' is not on this machine"):
        load_decisions("j-v0", tmp_path)


def test_metadata_run_no_code(tmp_path, monkeypatch):
    """An entry point that would be imported is in the metadata; a set without spaces would need it."""
    (tmp_path / "boom.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = json.dumps({"id": "CartPole-v1", "entry_point": "boom:Boom", "kwargs": {}})
    write_minari(tmp_path, "x-v0", played("CartPole-v1", 3), "CartPole-v1", SPACES, env_spec=spec)
    assert load_decisions("x-v0", tmp_path).environment == "CartPole-v1"


WHOLE = st.integers(0, 4)
ACTIONS = st.one_of(
    st.lists(WHOLE, min_size=4, max_size=4),
    st.lists(st.one_of(WHOLE, st.integers(-(2**63), 2**64 - 1)), min_size=4, max_size=4),
    st.lists(st.floats(width=64), min_size=4, max_size=4),
    st.lists(st.sampled_from([True, False]), min_size=4, max_size=4),
)


@given(values=ACTIONS, numbers=st.lists(st.floats(width=64), min_size=4, max_size=4), wide=st.booleans())
def test_what_is_kept_is_what_was_given_or_the_episode_is_refused(values, numbers, wide):
    """Discrete actions are whole numbers from 0 on; nothing becomes infinite or another number."""
    actions = np.array(values)
    given = actions[:, None] if wide else actions
    states = np.array(numbers)[:, None]
    try:
        found = join_episodes([Episode(states, given, np.array(numbers))], "drawn")
    except InputError:
        return
    for values in (found.states, found.actions, found.rewards, found.returns_to_go):
        assert np.isfinite(values).all()
    if wide:
        np.testing.assert_allclose(found.actions, given.astype(float), rtol=1e-6, atol=1e-30)
    else:
        assert [int(value) for value in found.actions] == [float(value) for value in actions.tolist()]
        assert found.actions.min() >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"actions": np.linspace(-1, 1, 30)},
            r"episode 0: its action is -1.0 at step 0; accepted .*\(T, a\)",
        ),
        ({"actions": np.full(30, -1)}, "its action is -1 at step 0"),
        ({"actions": np.full(30, 2**64 - 1, np.uint64)}, "its action is 18446744073709551615 at step 0"),
        ({"observations": np.full((30, 3), 1e39)}, "episode 0: states are not finite at step 0"),
        ({"rewards": np.full(30, 1e38)}, "episode 0: returns are not finite at step 0"),
        ({"terminals": np.zeros((30, 2))}, r"terminals have the shape \(30, 2\)"),
        ({"rewards": np.float64(3)}, "rewards are no array of numbers"),
        ({"observations": np.full((30, 3), b"x")}, "observations are no array of numbers"),
        ({"actions": np.zeros((30, 0))}, "one is empty"),
    ],
)
def test_d4rl_data_of_another_kind_are_refused(d4rl, tmp_path, change, message):
    path = d4rl("x.hdf5", **change)
    for read in (
        lambda: load_decisions(str(path)),
        lambda: convert_d4rl(path, "a/b-v0", "Pendulum-v1", tmp_path / "made"),
    ):
        with pytest.raises(InputError, match=message):
            read()
    assert not (tmp_path / "made").exists()


def test_arrays_that_no_memory_holds_are_refused_before_they_are_made(d4rl, root, tmp_path, monkeypatch):
    """A few kilobytes can claim any number of rows."""
    path = d4rl(actions=None)
    with h5py.File(path, "a") as file:
        file.create_dataset("actions", (10**9, 3), np.float32, chunks=(1000, 3))
    monkeypatch.setenv("KERNEL_ATTENTION_MEMORY_LIMIT", "1")
    with pytest.raises(InputError, match=r"hopper_medium-v2.hdf5 would take about 11\.\d+ GiB"):
        read_d4rl(path)
    monkeypatch.setenv("KERNEL_ATTENTION_MEMORY_LIMIT", "1e-6")
    with pytest.raises(InputError, match=f"dataset {CART} would take"):
        load_decisions(CART, root)


@pytest.mark.parametrize(
    ("actions", "space", "message"),
    [
        (lambda n: np.arange(n) % 3, Discrete(2), r"has action 2, and its actions are Discrete\(2\): 0 to 1"),
        (lambda n: np.full(n, -1), Discrete(2), "its action is -1 at step 0"),
        (lambda n: np.full(n, 0.7), Discrete(2), "its action is 0.7 at step 0"),
        (lambda n: np.zeros((n, 1)), Discrete(2), r"are Discrete\(2\), and their arrays \(T, 1\)"),
        (lambda n: np.zeros(n), Box(-1, 1, (1,)), r"and their arrays \(T,\)"),
        (lambda n: np.zeros((n, 2)), Box(-1, 1, (1,)), "and have 2 numbers"),
        (
            lambda n: np.zeros((n, 1), int),
            Box(0, 4, (1,), np.int64),
            "accepted: Discrete, or a Box of floats",
        ),
    ],
)
def test_actions_are_what_a_set_declares(tmp_path, actions, space, message):
    episodes = played("CartPole-v1", 2)
    for episode in episodes:
        episode["actions"] = actions(len(episode["actions"]))
    write_minari(tmp_path, "a-v0", episodes, "CartPole-v1", (BOX, space_text(space)))
    with pytest.raises(InputError, match=message):
        load_decisions("a-v0", tmp_path)


@pytest.mark.parametrize(
    "described", ['{"id": "CartPole-v1", "kwargs": [1]}', "[" * 100_000, "[]", '"x"', "null"]
)
def test_a_description_of_an_environment_that_is_none_is_named(tmp_path, described):
    write_minari(tmp_path, "a-v0", played("CartPole-v1", 2), "CartPole-v1", SPACES, env_spec=described)
    with pytest.raises(InputError, match="env_spec does not describe an environment"):
        load_decisions("a-v0", tmp_path)
