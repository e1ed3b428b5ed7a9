"""A small set of coloured images, and a small recipe for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

COLOURS = {"green": (40, 200, 40), "red": (200, 40, 40), "violet": (130, 40, 200)}
SMALL: dict[str, Any] = {
    "task": "images",
    "dataset": "colours",
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "patch_size": 4,
    "pooling": "mean",
    "epochs": 4,
    "batch_size": 8,
    "learning_rate": 0.01,
    "accelerator": "cpu",
    "threads": 1,
}


def write_image(
    path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (12, 12), seed: int = 0
) -> Path:
    """A noisy image of one colour, of ``size`` = (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-40, 41, (size[1], size[0], 3))
    Image.fromarray((np.array(colour) + noise).astype(np.uint8)).save(path)
    return path


def make_colours(root: Path, *, train: int = 10, test: int = 4, size: tuple[int, int] = (12, 12)) -> Path:
    """``root/colours/{train,test}/{green,red,violet}/N.png``; the root."""
    for split, count in (("train", train), ("test", test)):
        for number, (name, colour) in enumerate(COLOURS.items()):
            for index in range(count):
                seed = 1000 * (split == "test") + 100 * number + index
                write_image(root / "colours" / split / name / f"{index}.png", colour, size, seed)
    return root


def write_image_recipe(path: Path, **changes: Any) -> Path:
    """A recipe for the coloured images as a YAML file; it trains in a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(SMALL | changes, sort_keys=False))
    return path
