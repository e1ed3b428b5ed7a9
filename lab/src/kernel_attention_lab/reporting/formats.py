"""The format of figures, durations and mechanisms, in the terminal and in the report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from kernel_attention_lab.run_folder import is_number

METRIC_NAMES = {"rmse": "RMSE", "r2": "R²", "val_accuracy": "best validation accuracy"}
STAGES = {"train": "training", "val": "validation"}
COLUMN_NAMES = {
    "tokens_per_second": "tokens per second",
    "peak_rss_mb": "peak memory (MiB)",
    "peak_gpu_mb": "peak GPU memory (MiB)",
}
COUNTS = {
    "bigram_perplexity": "bigram counts",
    "unigram_perplexity": "unigram counts",
    "uniform_perplexity": "a uniform guess",
}
"""Predictors of a text without a network."""
MISSING = "–"


def metric_name(metric: str) -> str:
    """The readable name of a metric; for an unknown one, its words."""
    return METRIC_NAMES.get(metric, re.sub(r"\biou\b", "IoU", metric.replace("_", " ")))


def column_name(key: str, evaluated: str = "validation") -> str:
    """The readable name of a column of ``metrics.csv``.

    Args:
        key: the column.
        evaluated: the name of the split that selects the epoch.
    """
    stage, _, metric = key.partition("_")
    if stage in STAGES:
        return f"{evaluated if stage == 'val' else STAGES[stage]} {metric_name(metric)}"
    layer = re.fullmatch(r"objective_layer_(\d+)", key)
    return f"J, layer {layer[1]}" if layer else COLUMN_NAMES.get(key, key.replace("_", " "))


def layer_name(path: str) -> str:
    """``layer 1`` for ``encoder.layers.1.attention`` of our models; any other module keeps its path."""
    ours = re.fullmatch(r"(?:encoder\.)?layers\.(\d+)\.attention", path)
    return f"layer {ours[1]}" if ours else path


def format_number(value: object, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, NaN and infinities by name, a dash for None."""
    if value is None:
        return MISSING
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        is_long = 10**digits <= abs(value) < 1e6  # in full: 10,000 and not 1e+04
        text = f"{value:,.0f}" if is_long else f"{value:.{digits}g}"
        return text.replace("-", "−", 1) if text.startswith("-") else text
    return str(value)


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction of the cases or pixels, to be shown in per cent."""
    return metric.rpartition("_")[2] in ("accuracy", "iou")


def is_error(metric: str) -> bool:
    """Return whether a metric is an error, so that the smaller value is the better one."""
    return metric.rpartition("_")[2] in ("loss", "mse", "perplexity", "rmse")


def format_metric(metric: str, value: object) -> str:
    """A metric's value with its unit: accuracies and IoU in per cent, other metrics as plain numbers."""
    if is_share(metric) and is_number(value):
        return f"{100 * float(value):.2f} %"
    return format_number(value)


def format_spread(metric: str, mean: object, std: object) -> str:
    """``mean ± std`` in the unit of the metric; the mean alone where ``std`` is None."""
    if not is_number(std):
        return format_metric(metric, mean)
    if is_share(metric) and is_number(mean):
        return f"{100 * float(mean):.2f} ± {100 * float(std):.2f} %"
    return f"{format_metric(metric, mean)} ± {format_number(std, digits=2)}"


def format_duration(seconds: object) -> str:
    """Seconds in readable units: ``8.3 s``, ``4 min 05 s``, ``1 h 02 min``."""
    if not is_number(seconds):
        return MISSING
    value = float(seconds)
    if value < 60 and round(value, 1) < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_seeds(seeds: Sequence[object]) -> str:
    """``seed 0`` or ``seeds 0, 1, 2``."""
    listed = ", ".join(str(seed) for seed in seeds)
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {listed}" if seeds else "no seed"


def format_count(value: object) -> str:
    """A whole number with its thousands separated: ``929,589``; anything else as ``format_value`` has it."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else format_value(value)


def format_value(value: Any) -> str:
    """Any JSON value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {format_value(item)}" for key, item in value.items()) or MISSING
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value) or MISSING
    return format_number(value)


def sentence(text: str) -> str:
    """``text`` with a capital letter at its beginning and a full stop at its end."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if not text or text[-1] in ".!?" else ".")


def mechanisms_in(spec: Any) -> list[tuple[str, dict[str, Any]]]:
    """The (name, options) pairs behind an attention spec: one pair, or one for each layer of a list.

    It accepts the specs of recipes, also after a round trip through JSON: ``"primal"``, ``{"primal": {"rank":
    20}}``, ``["primal", {"rank": 20}]``, or a list of such.
    """
    if isinstance(spec, str):
        return [(spec, {})]
    if isinstance(spec, Mapping):
        return [(str(name), dict(options or {})) for name, options in spec.items()]
    if isinstance(spec, list | tuple):
        if (
            len(spec) == 2
            and isinstance(spec[0], str)
            and isinstance(spec[1], Mapping)
            and not _one_entry(spec[1])
        ):
            return [(spec[0], dict(spec[1]))]
        return [pair for entry in spec for pair in mechanisms_in(entry)]
    return []


def _one_entry(options: Mapping[str, Any]) -> bool:
    """Return whether the mapping reads as a spec ``{"name": {options}}`` rather than as options."""
    return len(options) == 1 and all(isinstance(value, Mapping) for value in options.values())


def attention_title(spec: Any) -> str:
    """The mechanism's name for a title; different layers are joined in order: ``softmax + primal``."""
    return " + ".join(_distinct(name for name, _ in mechanisms_in(spec))) or "unknown"


def attention_details(spec: Any) -> str:
    """The mechanism with its options, for each layer where layers differ."""
    parts = []
    for name, options in mechanisms_in(spec):
        listed = ", ".join(f"{key.replace('_', ' ')} {format_value(value)}" for key, value in options.items())
        parts.append(f"{name} ({listed})" if listed else name)
    if len(set(parts)) <= 1:
        return parts[0] if parts else "unknown"
    said, start = [], 0
    for part, group in groupby(parts):
        end = start + len(list(group))
        where = f"layer {start}" if end == start + 1 else f"layers {start} to {end - 1}"
        said.append(f"{where}: {part}")
        start = end
    return "; ".join(said)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
