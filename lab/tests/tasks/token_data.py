"""Small data sets of every kind that the task ``tokens`` reads, in the formats they are distributed in."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

GOOD, BAD, OTHER = (
    ["fine", "lovely", "moving"],
    ["dull", "empty", "tired"],
    ["the", "film", "is", ",", "a", "plot"],
)
TOKENS: dict[str, Any] = {
    "task": "tokens",
    "attention": {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}},
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "batch_size": 5,
    "learning_rate": 0.01,
    "steps": 12,
    "warmup_steps": 3,
    "evaluate_every": 4,
    "accelerator": "cpu",
    "threads": 1,
}


def sentence(generator: np.random.Generator, label: int) -> str:
    words = generator.choice(OTHER, generator.integers(2, 9)).tolist()
    words.insert(int(generator.integers(0, len(words))), str(generator.choice(GOOD if label else BAD)))
    return " ".join(words)


def make_tokens(root: Path) -> Path:
    """SST-2 and SST-5, IMDb, the pair files of Retrieval, and CIFAR-10 as folders of images."""
    generator = np.random.default_rng(0)
    (root / "sst").mkdir(parents=True)
    for kind, classes in (("binary", 2), ("fine", 5)):
        for split, count in (("train", 43), ("dev", 11), ("test", 13)):
            labels = [index % classes for index in range(count)]
            lines = [f"{label} {sentence(generator, int(label > classes // 2 - 1))}" for label in labels]
            (root / "sst" / f"stsa.{kind}.{split}").write_text("\n".join(lines) + "\n")
    (root / "imdb").mkdir()
    for split in ("train", "test"):
        with gzip.open(root / "imdb" / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
            for index in range(22):
                text = f"Well<br />{sentence(generator, index % 2)} – it is."
                file.write(json.dumps({"text": text, "label": index % 2}) + "\n")
    (root / "tsv_data").mkdir()
    for split, count in (("train", 21), ("eval", 8), ("test", 9)):
        rows = []
        for index in range(count):
            texts = [sentence(generator, 0), sentence(generator, index % 2)]
            rows.append("\t".join([f"{index % 2}.0", f"P{index}", f"Q{index}", *texts]))
        (root / "tsv_data" / f"new_aan_pairs.{split}.tsv").write_text("\n".join(rows) + "\n")
    return root


def make_images(root: Path) -> Path:
    """Two images of two classes in each split."""
    from PIL import Image

    for split in ("train", "test"):
        for value, name in ((60, "cat"), (200, "truck")):
            folder = root / "cifar10" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = np.full((32, 32, 3), value + number, np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root
