"""A recipe for one's own series, as a text to be read and changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernel_attention.models.series_stem import automatic_patch_len
from kernel_attention.series.members import automatic_batch_size, automatic_epochs, automatic_steps
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.plain_yaml import key_lines
from kernel_attention_lab.tasks.time_series import Recipe, split_data

_MODEL: dict[str, Any] = {
    "attention": {"primal": {"rank": 20, "eta": 0.1}},
    "embed_dim": 64,
    "num_heads": 4,
    "num_layers": 2,
    "feedforward_dim": 128,
    "stem": "convolution",
    "patch_len": 0,
    "views": ["raw", "normalized"],
    "positions": "time_absolute",
    "pooling": "mean_max",
}
_TRAINING: dict[str, Any] = {
    "optimizer": "adamw",
    "learning_rate": 0.002,
    "weight_decay": 0.05,
    "schedule": "cosine",
    "label_smoothing": 0.1,
    "augmentation": ["jitter", "scale", "time_warp", "window"],
    "seeds": [0],
}
_WARMUP = 0.1
_NAMED = 24  # classes or channels at most that are named one by one
_UNEQUAL = 3  # times as many cases in the largest class as in the smallest


def recipe_template(given: dict[str, Any], data: TimeSeriesData | None, name: str) -> str:
    """The text of a recipe.

    Args:
        given: the keys that say what the data are.
        data: the data set, from which the sizes of training follow; None: those of a small set.
        name: the file of the recipe, for the command in its first lines.
    """
    keys = {"dataset": "series.csv", **given}
    lines = ["# A model of own series. Any key of `kernel-attention train --help` may be added.", "#"]
    lines += [f"#   kernel-attention train {name}", "#   kernel-attention predict RUN FILE", "#"]
    if data is None:
        lines.append("# dataset: labelled series in a .csv, .tsv, .parquet, .npz or .ts file.")
    else:
        lines += [f"# {line}" for line in _described(data)]
        if 0 < len(data.channel_names) <= _NAMED and all(data.channel_names):
            keys.setdefault("channel_columns", list(data.channel_names))
    training = {**_sizes(keys, data), **_TRAINING}
    return "\n".join(
        [
            *lines,
            key_lines(keys),
            "# The model.",
            key_lines(_MODEL),
            "# Its training.",
            key_lines(training).rstrip(),
            "",
        ]
    )


def _described(data: TimeSeriesData) -> list[str]:
    """Lines that say what the data are."""
    lengths = [len(sequence) for split in (data.train, data.test) for sequence in split.sequences]
    steps = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else str(max(lengths))
    lines = [
        f"{data.name}: {len(data.train)} cases to train and {len(data.test)} to test, {data.num_features} "
        f"channel{'s' if data.num_features > 1 else ''}, {steps} steps, "
        f"{f'{len(data.class_names)} classes' if data.class_names else 'values'}"
    ]
    if data.class_names:
        counts = np.bincount(data.train.targets, minlength=len(data.class_names)).tolist()
        pairs = zip(data.class_names[:_NAMED], counts, strict=False)
        more = "" if len(counts) <= _NAMED else f", and {len(counts) - _NAMED} classes more"
        lines.append(f"cases to train of each class: {', '.join(f'{n} {k}' for n, k in pairs)}{more}")
        if max(counts) > _UNEQUAL * min(counts):
            lines.append("`class_weight: balanced` gives all classes the same weight")
    return lines


def _sizes(keys: dict[str, Any], data: TimeSeriesData | None) -> dict[str, int]:
    cases, max_len = 200, 128
    if data is not None:
        cases = len(split_data(data, Recipe(**keys), 0).train)
        max_len = data.max_len
    batch_size = automatic_batch_size(cases)
    steps = automatic_steps(batch_size, -(-max_len // automatic_patch_len(max_len, _MODEL["stem"])))
    epochs = automatic_epochs(cases, batch_size, steps)
    return {"epochs": epochs, "batch_size": batch_size, "warmup_epochs": int(_WARMUP * epochs)}
