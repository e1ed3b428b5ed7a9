"""Images of a finished run for its report: predictions, and what the first layer attends to."""

from __future__ import annotations

import numpy as np
import torch

from kernel_attention.analysis import capture
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.experiments.data.images.batches import make_image_loader
from kernel_attention.experiments.data.images.sets import ImageSplit
from kernel_attention.experiments.training.evaluation import collect_outputs
from kernel_attention.models.vision import VisionTransformer

EXAMPLES = 12


def image_examples(model: VisionTransformer, split: ImageSplit, precision: str) -> dict[str, np.ndarray]:
    """The content of ``examples.npz``: evenly spaced images of a split, n of them.

    ``images`` (n, H, W, 3) uint8, ``targets`` and ``predictions`` (n,), ``probabilities`` (n,) of the
    predicted classes, ``attention`` (n, h, rows, columns), see ``patch_attention``, which is absent for a
    mechanism without a matrix, and ``attention_text``, what it shows.
    """
    chosen = split.evenly(EXAMPLES)
    loader = make_image_loader(chosen, len(chosen))
    logits = collect_outputs(model, loader, precision)
    found = {
        "images": np.ascontiguousarray(chosen.images),
        "targets": chosen.targets,
        "predictions": logits.argmax(-1).numpy(),
        "probabilities": logits.softmax(-1).amax(-1).numpy(),
    }
    batch = next(iter(loader)).arguments[0].to(model.head.weight.device)
    (attention,) = capture(model, (batch,), "first").values()
    maps = patch_attention(model, attention)
    if maps is None:
        text = f"{attention.mechanism} has no attention matrix, so there is no picture of it"
    elif model.class_tokens:
        text = f"{attention.mechanism}: the attention of the class token to the patches"
    else:
        text = f"{attention.mechanism}: the attention to every patch, mean over the queries"
    if maps is not None:
        found["attention"] = maps
    return found | {"attention_text": np.array(text)}


@torch.no_grad()
def patch_attention(model: VisionTransformer, attention: CapturedAttention) -> np.ndarray | None:
    """The attention to the patches over the image, (n, h, rows, columns) float32; None without a matrix.

    It is the row of the class token, without its weight for itself, or with mean pooling the mean of the
    rows. A mechanism that has a kernel instead of weights shows the kernel.
    """
    maps = []
    for case in range(attention.num_sequences):
        matrix = attention.matrix(case)
        if matrix is None:
            return None
        row = matrix[:, 0] if model.class_tokens else matrix.mean(1)
        maps.append(row[:, model.class_tokens :].unflatten(-1, model.grid_size))
    return torch.stack(maps).numpy()
