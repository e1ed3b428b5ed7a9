"""Small data sets of decisions in Minari's format, rolled out in environments that need no MuJoCo."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
from gymnasium.spaces import Box, Discrete

CART, PENDULUM, INVERTED = "tiny/cart/mixed-v0", "tiny/pendulum/mixed-v0", "tiny/inverted/mixed-v0"
DECISIONS: dict[str, Any] = {
    "task": "decisions",
    "dataset": CART,
    "attention": ["softmax", {"primal": {"rank": 3, "eta": 0.1, "data_dependent": False}}],
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "dropout": 0.1,
    "context": 4,
    "return_scale": 50.0,
    "batch_size": 6,
    "learning_rate": 0.01,
    "steps": 12,
    "warmup_steps": 2,
    "evaluate_every": 4,
    "target_returns": [60.0, 20.0],
    "evaluation_episodes": 3,
    "validation_fraction": 0.2,
    "accelerator": "cpu",
    "threads": 1,
}
_WEIGHTS = {
    "CartPole-v1": np.array([0.1, 0.5, 1.0, 1.0]),
    "Pendulum-v1": np.array([-1.0, -2.0, -1.0]),
    "InvertedPendulum-v5": np.array([0.1, 3.0, 0.5, 1.0]),
}


def write_minari(
    folder: Path,
    name: str,
    episodes: Sequence[dict[str, np.ndarray]],
    environment: str,
    spaces: tuple[str, str],
    **metadata: Any,
) -> Path:
    """A data set as Minari's HDF5 format has it; spaces are those of the states and of the actions."""
    data = folder / name / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for number, episode in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            for key, values in episode.items():
                group[key] = values
            group["terminations"] = np.zeros(len(episode["rewards"]), dtype=bool)
            group["truncations"] = np.zeros(len(episode["rewards"]), dtype=bool)
    described = {
        "total_episodes": len(episodes),
        "total_steps": sum(len(episode["rewards"]) for episode in episodes),
        "data_format": "hdf5",
        "observation_space": spaces[0],
        "action_space": spaces[1],
        "env_spec": json.dumps({"id": environment, "kwargs": {}}),
        "dataset_id": name,
        "minari_version": "0.5.4",
    }
    (data / "metadata.json").write_text(json.dumps(described | metadata))
    return folder


def space_text(space: Any) -> str:
    """A space as Minari writes it."""
    if isinstance(space, Discrete):
        return json.dumps(
            {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
        )
    assert isinstance(space, Box)
    bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
    return json.dumps({"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds})


def played(environment: str, episodes: int, longest: int = 80) -> list[dict[str, np.ndarray]]:
    """Episodes of a linear policy with another share of random actions in each."""
    made, draw = gymnasium.make(environment), np.random.default_rng(0)
    found = []
    for number in range(episodes):
        made.action_space.seed(number)
        state, _ = made.reset(seed=number)
        states, actions, rewards = [state], [], []
        while len(rewards) < longest:
            action = made.action_space.sample()
            if draw.random() > number / episodes:
                wanted = float(state @ _WEIGHTS[environment])
                is_discrete = isinstance(made.action_space, Discrete)
                action = int(wanted > 0) if is_discrete else np.clip([wanted], -2, 2).astype(np.float32)
            state, reward, terminated, truncated, _ = made.step(action)
            states.append(state)
            actions.append(action)
            rewards.append(float(reward))
            if terminated or truncated:
                break
        found.append(
            {
                "observations": np.asarray(states, np.float32),
                "actions": np.asarray(actions),
                "rewards": np.asarray(rewards, np.float64),
            }
        )
    return found


def make_decisions(root: Path, *, mujoco: bool = False) -> Path:
    """A data root with a set of CartPole (two actions, with reference scores) and one of Pendulum (a number).

    With ``mujoco`` one of its InvertedPendulum instead.
    """
    sets: list[tuple[str, str, dict[str, Any]]] = [
        (CART, "CartPole-v1", {"ref_min_score": 20.0, "ref_max_score": 80.0}),
        (PENDULUM, "Pendulum-v1", {}),
    ]
    for name, environment, more in [(INVERTED, "InvertedPendulum-v5", {})] if mujoco else sets:
        made = gymnasium.make(environment)
        spaces = (space_text(made.observation_space), space_text(made.action_space))
        write_minari(root / "minari", name, played(environment, 12), environment, spaces, **more)
    return root
