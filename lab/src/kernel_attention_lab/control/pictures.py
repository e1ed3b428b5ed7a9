"""Pictures of an episode, drawn offscreen.

MuJoCo draws with OpenGL: EGL or OSMesa where there is no screen. A backend that fails can leave the process
unable to load another, so each is tried in a process of its own.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, writing
from kernel_attention.files import write_atomically
from kernel_attention_lab.control.environments import is_mujoco, make_environment

VARIABLE = "MUJOCO_GL"
_BACKENDS = ("egl", "osmesa")
_SECONDS = 60  # for one try
_TRY = """
import gymnasium
each = gymnasium.make("InvertedPendulum-v5", render_mode="rgb_array", width=16, height=16)
each.reset(seed=0)
assert each.render().shape == (16, 16, 3)
each.close()
"""
_COLORS = 96  # of a GIF


@functools.cache
def find_renderer() -> tuple[str | None, str]:
    """The OpenGL backend that draws on this machine, and the reasons why others do not; None for none.

    ``MUJOCO_GL``, where it is set, is the only one tried.
    """
    given = os.environ.get(VARIABLE)
    reasons = []
    for name in (given,) if given else (*_BACKENDS, *(("glfw",) if os.environ.get("DISPLAY") else ())):
        try:
            tried = subprocess.run(
                [sys.executable, "-c", _TRY],
                env=os.environ | {VARIABLE: name},
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{name}: {error}")
            continue
        if tried.returncode == 0:
            return name, "; ".join(reasons)
        lines = [line for line in tried.stderr.splitlines() if line[:1].strip() and "Error" in line]
        reasons.append(f"{name}: {lines[-1] if lines else f'exit code {tried.returncode}'}")
    return None, "; ".join(reasons)


def require_pictures(name: str) -> None:
    """Choose the OpenGL backend of an environment that needs one; InputError where there is none.

    Args:
        name: of the environment.
    """
    if not is_mujoco(name):
        return
    renderer, reasons = find_renderer()
    if renderer is None:
        raise InputError(
            f"environment {name} cannot be drawn without a screen ({reasons}): install EGL (libegl1) or "
            f"OSMesa (libosmesa6), or set {VARIABLE}"
        )
    os.environ[VARIABLE] = renderer


def film(name: str, options: dict[str, Any], side: int) -> Any:
    """An environment whose ``render()`` gives a picture (side, side, 3) uint8.

    Raises:
        InputError: for an environment that cannot be drawn here.
    """
    require_pictures(name)
    if not is_mujoco(name):
        return make_environment(name, options, render_mode="rgb_array")
    size = {"width": side, "height": side}
    made = make_environment(name, options, render_mode="rgb_array", **size)
    try:
        made.unwrapped.model.camera("track")
    except (KeyError, AttributeError):
        return made
    made.close()
    # Without its name, gymnasium 1.4 takes a camera that stays where it is, and the robot walks away.
    return make_environment(name, {"camera_name": "track"} | options, render_mode="rgb_array", **size)


def write_gif(path: Path, frames: Sequence[np.ndarray], seconds: float) -> None:
    """Frames (H, W, 3) uint8 as an endless GIF that takes so many seconds.

    Raises:
        InputError: where the file cannot be written.
    """
    from PIL import Image

    pictures = [Image.fromarray(frame).quantize(_COLORS) for frame in frames]
    buffer = io.BytesIO()
    duration = max(round(1000 * seconds / len(pictures)), 20)  # browsers slow shorter ones down
    pictures[0].save(
        buffer, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0, optimize=True
    )
    with writing(f"output {path}"):
        write_atomically(path, lambda file: file.write(buffer.getvalue()))
