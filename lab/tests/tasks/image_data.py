"""A small set of coloured images, and a recipe of seconds for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (30, 180, 60), "red": (210, 50, 40)}
IMAGES: dict[str, Any] = {
    "task": "images",
    "dataset": "patches",
    "attention": "softmax",
    "embed_dim": 16,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 24,
    "patch_size": 4,
    "epochs": 3,
    "batch_size": 8,
    "learning_rate": 0.01,
    "validation_fraction": 0.25,
    "accelerator": "cpu",
    "threads": 1,
}


def make_images(folder: Path) -> Path:
    """A data root with the set ``patches``: noisy images of 12 x 8 pixels in three colours."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 7)):
        for name, colour in COLOURS.items():
            place = folder / "patches" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                noisy = np.array(colour) + generator.normal(0, 60, (12, 8, 3))
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    return folder
