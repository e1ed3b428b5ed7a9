"""Pictures of the kernels' singular values: pure functions from data to a matplotlib ``Figure``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    seed_styles,
    whole_numbers,
)

Spectra = Mapping[int, Mapping[int, Sequence[np.ndarray]]]  # layer -> seed -> singular values of each head

HEAD_LIMIT = 8  # the legend names each head up to this number
REACHED = 0.999  # curves of the explained variance end here
SINGULAR_FLOOR = 1e-8  # below this, float32 singular values are rounding noise


@report_style()
def singular_value_curves(layers: Spectra, names: Mapping[int, str] | None = None) -> Figure:
    """sigma_i / sigma_1 of each layer's kernel on a log axis.

    One seed: one line per head, and their mean dashed. Several seeds: a line for each seed's mean over its
    heads, in a light band from the smallest head to the largest.

    Args:
        layers: layer -> seed -> descending singular values of each head, (values,) each, the first positive.
        names: layer -> the title of its panel.
    """
    scaled = _map_spectra(layers, lambda sigma: sigma / sigma[0])
    figure, axes = _spectrum_panels(scaled, names or {})
    lowest = min(float(head[head > 0].min()) for head in _all_heads(scaled))
    longest = max(int((head >= SINGULAR_FLOOR).sum()) for head in _all_heads(scaled))
    for axis in axes:
        axis.set_xlim(0.5, max(longest, 5) + 0.5)
        axis.set_yscale("log")
        axis.set_ylim(max(lowest * 0.6, SINGULAR_FLOOR), 1.6)
    axes[0].set_ylabel("singular value σᵢ / σ₁")
    return figure


@report_style()
def explained_variance_curves(layers: Spectra, names: Mapping[int, str] | None = None) -> Figure:
    """The cumulative share of the squared singular values, up to where all lines pass ``REACHED``.

    Lines and arguments as in ``singular_value_curves``.
    """
    shares = _map_spectra(layers, cumulative_share)
    reached = max(5, *(int(np.searchsorted(head, REACHED)) + 1 for head in _all_heads(shares)))
    figure, axes = _spectrum_panels(_map_spectra(shares, lambda head: head[:reached]), names or {})
    for axis in axes:
        axis.set_xlim(0.5, reached + 0.5)
        axis.set_ylim(0, 1.03)
        axis.axhline(0.9, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("cumulative explained variance")
    return figure


def cumulative_share(sigma: np.ndarray) -> np.ndarray:
    """sum_{j <= i} sigma_j^2 / sum_j sigma_j^2 for singular values of shape (values,), not all 0."""
    energy: np.ndarray = np.cumsum(np.square(sigma))
    share: np.ndarray = energy / energy[-1]
    return share


def _spectrum_panels(layers: Spectra, names: Mapping[int, str]) -> tuple[Figure, list[Axes]]:
    seeds = sorted({seed for by_seed in layers.values() for seed in by_seed})
    figure, axes = panel_grid(len(layers), height=3.3)
    for axis, (layer, by_seed) in zip(axes, sorted(layers.items()), strict=True):
        axis.set_title(names.get(layer, f"layer {layer}"), parse_math=False)
        axis.set_xlabel("index i")
        axis.xaxis.set_major_locator(whole_numbers())
        if len(seeds) == 1:
            _one_line_a_head(axis, by_seed[seeds[0]])
        else:
            _one_style_a_seed(axis, by_seed, seed_styles(seeds))
    legend_below(figure, axes[0])
    return figure, axes


def _one_line_a_head(axis: Axes, heads: Sequence[np.ndarray]) -> None:
    for index, (head, color) in enumerate(zip(heads, ordered_colors(len(heads)), strict=True)):
        label = f"head {index}" if len(heads) <= HEAD_LIMIT else ("heads" if index == 0 else None)
        axis.plot(_ranks(head), head, color=color, linewidth=1.2, label=label, **markers(head))
    if len(heads) > 1:
        mean = _mean_head(heads)
        axis.plot(_ranks(mean), mean, color=INK, linewidth=2.2, linestyle=(0, (5, 2)), label="mean of heads")


def _one_style_a_seed(
    axis: Axes, by_seed: Mapping[int, Sequence[np.ndarray]], styles: Mapping[int, Mapping[str, Any]]
) -> None:
    for seed, heads in sorted(by_seed.items()):
        mean = _mean_head(heads)
        if len(heads) > 1:
            stacked = np.stack([head[: len(mean)] for head in heads])
            color = styles[seed]["color"]
            axis.fill_between(
                _ranks(mean), stacked.min(0), stacked.max(0), color=color, alpha=0.13, linewidth=0
            )
        axis.plot(_ranks(mean), mean, **styles[seed], label=f"seed {seed}", **markers(mean))


def _mean_head(heads: Sequence[np.ndarray]) -> np.ndarray:
    shortest = min(len(head) for head in heads)
    mean: np.ndarray = np.mean([head[:shortest] for head in heads], axis=0)
    return mean


def _ranks(head: np.ndarray) -> np.ndarray:
    return np.arange(1, len(head) + 1)


def _map_spectra(layers: Spectra, function: Callable[[np.ndarray], np.ndarray]) -> Spectra:
    return {
        layer: {seed: [function(head) for head in heads] for seed, heads in by_seed.items()}
        for layer, by_seed in layers.items()
    }


def _all_heads(layers: Spectra) -> Iterator[np.ndarray]:
    for by_seed in layers.values():
        for heads in by_seed.values():
            yield from heads
