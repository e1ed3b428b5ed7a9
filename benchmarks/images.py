"""Attention-Conv2D on images, where it has its token grid: CIFAR-10 as 8 x 8 patches of 4 x 4 pixels.

    python benchmarks/images.py DATA/images/cifar10_15k_3k.tar --seeds 0 1 2

Reads ``train/CLASS/*`` and ``test/CLASS/*`` of a tar of image folders, trains ``AttentionClassifier`` on some
of the training images and prints the accuracy on some of the test images: the last epoch's, no model is
selected.
"""

from __future__ import annotations

import argparse
import statistics
import tarfile
import time

import numpy as np
from PIL import Image

import kernel_attention as ka

PATCH = 4
CONTENDERS = {"conv2d": {"grid_size": (8, 8)}, "softmax": {}}


def read_patches(path: str, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """``count`` images, evenly over the classes, as (count, 48 values of a patch, 64 patches), and labels."""
    by_class: dict[str, list[np.ndarray]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            parts = member.name.split("/")
            if not member.isfile() or split not in parts[:-2]:
                continue
            images = by_class.setdefault(parts[-2], [])
            if len(images) < count // 10:
                image = Image.open(archive.extractfile(member)).convert("RGB")
                images.append(np.asarray(image, dtype=np.float32) / 255.0)
    images = np.stack([image for name in sorted(by_class) for image in by_class[name]])
    labels = np.array([name for name in sorted(by_class) for _ in by_class[name]])
    cases, height, width, channels = images.shape
    patches = images.reshape(cases, height // PATCH, PATCH, width // PATCH, PATCH, channels)
    return patches.transpose(0, 2, 4, 5, 1, 3).reshape(cases, -1, height * width // PATCH**2), labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="tar of image folders")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--test", type=int, default=1000, help="test images")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    train, test = (read_patches(options.data, split, getattr(options, split)) for split in ("train", "test"))
    for name, attention_options in CONTENDERS.items():
        started, scores = time.perf_counter(), []
        for seed in options.seeds:
            model = ka.AttentionClassifier(
                name, attention_options, epochs=options.epochs, batch_size=32, random_state=seed
            )
            scores.append(100 * model.fit(*train).score(*test))
        spread = statistics.stdev(scores) if len(scores) > 1 else float("nan")
        seconds = time.perf_counter() - started
        print(
            f"{name}: {statistics.fmean(scores):.1f} ± {spread:.1f} % {np.round(scores, 1)}, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
