"""A small text with its three splits, and a recipe small enough for a fraction of a second."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

LANGUAGE: dict[str, Any] = {
    "task": "language",
    "dataset": "fables",
    "attention": ["softmax", {"primal": {"rank": 3, "eta": 0.1}}],
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "context": 7,
    "max_len": 30,
    "batch_size": 4,
    "steps": 30,
    "warmup_steps": 3,
    "evaluate_every": 10,
    "optimizer": "adamw",
    "learning_rate": 0.01,
    "swap_rate": 0.3,
    "accelerator": "cpu",
    "threads": 1,
}


def sentences(count: int, seed: int) -> str:
    """Lines of four words drawn at random."""
    chance = random.Random(seed)
    words = [("the a one", "cat dog fox"), ("sat ran slept", "here there")]
    lines = [" ".join(chance.choice(part.split()) for pair in words for part in pair) for _ in range(count)]
    return "\n".join([*lines, ""])


def make_text(root: Path) -> Path:
    """The text ``fables`` under a data root."""
    (root / "fables").mkdir()
    for seed, (name, count) in enumerate([("train", 60), ("valid", 12), ("test", 13)]):
        (root / "fables" / f"{name}.txt").write_text(sentences(count, seed))
    return root
