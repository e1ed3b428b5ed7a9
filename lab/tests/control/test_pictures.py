"""Pictures of MuJoCo's environments without a screen."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention_lab.control import film, find_renderer, require_pictures, write_gif


@pytest.fixture
def _renderer(monkeypatch):
    name, reasons = find_renderer()
    if name is None:
        pytest.skip(f"no OpenGL without a screen here: {reasons}")
    monkeypatch.setenv("MUJOCO_GL", name)


@pytest.mark.usefixtures("_renderer")
def test_an_environment_is_drawn():
    """The picture has the size asked for, shows something, and changes when the robot moves."""
    environment = film("InvertedPendulum-v5", {}, 48)
    environment.reset(seed=0)
    first = environment.render()
    for _ in range(20):
        environment.step(np.array([3.0], dtype=np.float32))
    second = environment.render()
    environment.close()
    assert first.shape == (48, 48, 3)
    assert first.std() > 1.0
    assert np.abs(first.astype(int) - second.astype(int)).max() > 20


def test_a_backend_that_does_not_draw_is_named(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    find_renderer.cache_clear()
    try:
        with pytest.raises(InputError, match=r"InvertedPendulum-v5 cannot be drawn .*nonsense: .*libosmesa6"):
            require_pictures("InvertedPendulum-v5")
        require_pictures("CartPole-v1")  # which has no need of OpenGL
    finally:
        find_renderer.cache_clear()


def test_a_gif_holds_its_frames(tmp_path):
    frames = [np.full((8, 10, 3), 20 * place, dtype=np.uint8) for place in range(5)]
    write_gif(tmp_path / "a.gif", frames, seconds=1.0)
    with Image.open(tmp_path / "a.gif") as opened:
        assert (opened.n_frames, opened.size) == (5, (10, 8))
        assert opened.info["duration"] == 200
        opened.seek(3)
        assert abs(int(np.asarray(opened.convert("RGB"))[4, 4, 0]) - 60) <= 2
    with pytest.raises(InputError, match="cannot be written"):
        write_gif(tmp_path / "none" / "a.gif", frames, seconds=1.0)
