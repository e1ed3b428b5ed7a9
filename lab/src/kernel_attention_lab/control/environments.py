"""Gymnasium's environments by name, and whether one fits a policy."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, note_once
from kernel_attention_lab.data.decisions.sets import check_environment_name
from kernel_attention_lab.extras import install_hint


def make_environment(name: str, options: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A registered environment.

    Args:
        name: such as ``Hopper-v5``; ``module:Name``, which would import a module, is refused.
        options: keyword arguments of the environment.
        more: further ones of ``gymnasium.make``, such as ``render_mode``.

    Raises:
        InputError: for an unknown name, options that it does not have, and a package that it needs and that
            is not installed.
    """
    check_environment_name(name, "environment")
    import gymnasium

    if is_mujoco(name):
        _warnings_become_notes()
    try:
        return gymnasium.make(name, **dict(options or {}), **more)
    except gymnasium.error.DependencyNotInstalled as error:
        wanted = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else None
        package = ModuleNotFoundError(name="mujoco" if "mujoco" in str(error).lower() else None)
        said = install_hint(wanted or package, f"environment {name}")
        raise InputError(said or f"environment {name}: {_in_one_line(error)}") from None
    except (gymnasium.error.Error, ImportError, TypeError, AttributeError, ValueError, OSError) as error:
        raise InputError(f"environment {name!r} cannot be made: {_in_one_line(error)}") from None


def is_mujoco(name: str) -> bool:
    """Return whether a registered environment is simulated by MuJoCo; False for an unknown one."""
    import gymnasium

    try:
        return "mujoco" in str(gymnasium.spec(name).entry_point)
    except gymnasium.error.Error:
        return False


def _warnings_become_notes() -> None:
    """Without this MuJoCo writes a file MUJOCO_LOG.TXT into the working folder."""
    try:
        import mujoco
    except ImportError:  # gymnasium says what is missing
        return
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(lambda message: note_once(f"MuJoCo: {message}"))


def check_spaces(
    environment: Any, *, state_dim: int, action_dim: int, low: list[float], high: list[float]
) -> None:
    """InputError where an environment's spaces are not those of the data.

    Args:
        environment: made by ``make_environment``.
        state_dim: numbers of a state.
        action_dim: numbers of an action, or how many discrete actions there are.
        low: the least actions; empty where they are discrete.
        high: the largest ones.
    """
    from gymnasium.spaces import Box, Discrete

    name = environment.spec.id
    states, actions = environment.observation_space, environment.action_space
    if not isinstance(states, Box) or states.shape != (state_dim,):
        raise InputError(
            f"environment {name}: its states are {states}, those of the data have {state_dim} numbers"
        )
    if not low:
        if not isinstance(actions, Discrete) or actions.start != 0 or actions.n != action_dim:
            raise InputError(
                f"environment {name}: its actions are {actions}, the data have {action_dim} discrete ones"
            )
        return
    if not isinstance(actions, Box) or actions.shape != (action_dim,):
        raise InputError(
            f"environment {name}: its actions are {actions}, those of the data have {action_dim} numbers"
        )
    if np.any(np.asarray(low) < actions.low) or np.any(np.asarray(high) > actions.high):
        raise InputError(
            f"environment {name}: its actions are {actions}, those of the data go from {low} to {high}"
        )


def longest_episode(environment: Any) -> int:
    """The steps after which gymnasium ends an episode; 0 where it does not."""
    return int(environment.spec.max_episode_steps or 0)


def simulator_versions() -> dict[str, str]:
    """The versions of gymnasium and of MuJoCo, where they are installed: the scores depend on them."""
    found = {}
    for package in ("gymnasium", "mujoco"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
