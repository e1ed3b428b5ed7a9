"""The spectrum of the learnt kernel: singular values by layer and head, and the number that carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    data_uri,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    seed_styles,
    whole_numbers,
)
from kernel_attention_lab.reporting.formats import format_number, sentence
from kernel_attention_lab.reporting.records import RunRecord

Spectra = Mapping[int, Mapping[int, Sequence[np.ndarray]]]  # layer -> seed -> singular values of each head

SHARES = (0.9, 0.95, 0.99)
HEAD_LIMIT = 8  # the legend names each head up to this number
REACHED = 0.999  # curves of the explained variance end here


def spectrum_section(run: RunRecord) -> html.Section | None:
    """The singular values of the learnt kernel by layer and head, and the number that carries its energy.

    None for a run without recorded spectra, such as that of a language model.
    """
    recorded = [record.spectra for record in run.seeds if record.spectra]
    if not recorded:
        return None
    title, layers = "Spectrum of the learnt kernel", _spectra(run)
    texts = dict.fromkeys(str(spectra.get("note") or "") for spectra in recorded)
    notes = [html.Paragraph(sentence(text), muted=True) for text in texts if text]
    if not layers:
        text = "No layer of this run has a kernel whose spectrum could be computed."
        return html.Section("spectrum", title, [html.Paragraph(text), *notes])
    names = {layer: f"layer {layer}" for layer in layers} | {
        int(entry["layer"]): f"layer {entry['layer']}: {entry['mechanism']}"
        for spectra in recorded
        for entry in spectra.get("layers", [])
        if "mechanism" in entry
    }
    rows = [
        [names[layer], *(_needed(by_seed, share) for share in SHARES)] for layer, by_seed in layers.items()
    ]
    head = ["layer", *(f"{100 * share:.0f} %" for share in SHARES)]
    caption = "Singular values that explain a share of the variance: mean over heads and seeds, and range."
    table = html.Table(head, rows, caption, numbers=True)
    return html.Section("spectrum", title, [html.Pictures(_pictures(layers, names)), table, *notes])


def _pictures(layers: Spectra, names: Mapping[int, str]) -> list[html.Picture]:
    lines = "One line per head."
    if len(_seeds(layers)) > 1:
        lines = "A line is a seed's mean over its heads; the band around it spans the heads."
    needed = [f"{names[layer]}: {_needed(layers[layer], 0.9)}." for layer in layers]
    return [
        html.Picture(
            data_uri(singular_value_curves(layers, names)),
            f"Line chart of the singular values of the kernel, relative to the largest, on a logarithmic "
            f"axis, for {len(layers)} {'layer' if len(layers) == 1 else 'layers'}.",
            f"Singular values relative to the largest, down to rounding noise. {lines}",
            wide=len(layers) > 1,
        ),
        html.Picture(
            data_uri(explained_variance_curves(layers, names)),
            "Line chart of the cumulative explained variance of the same kernels. "
            f"Singular values needed for 90 %: {' '.join(needed)}",
            "Cumulative explained variance: the share of the first i values in the sum of all squares, up to "
            f"{100 * REACHED:.1f} %. The dashed line is 90 %. The earlier a curve is flat, the lower is the "
            "effective rank of the kernel.",
            wide=len(layers) > 1,
        ),
    ]


def _spectra(run: RunRecord) -> Spectra:
    """Without heads whose kernel is zero."""
    found = {
        layer: {
            record.seed: heads
            for record in run.seeds
            if (heads := [head for head in record.spectrum(layer) if head[0] > 0])
        }
        for layer in sorted({layer for record in run.seeds for layer in record.spectrum_layers})
    }
    return {layer: by_seed for layer, by_seed in found.items() if by_seed}


def _needed(by_seed: Mapping[int, Sequence[np.ndarray]], share: float) -> str:
    """The singular values needed for ``share`` of the variance: mean over heads and seeds, and range."""
    heads = [head for heads in by_seed.values() for head in heads]
    counts = [int(np.searchsorted(cumulative_share(head), share) + 1) for head in heads]
    low, high = min(counts), max(counts)
    return format_number(low) if low == high else f"{np.mean(counts):.1f} ({low} to {high})"


# --- the pictures -------------------------------------------------------------------------------------------


@report_style()
def singular_value_curves(layers: Spectra, names: Mapping[int, str] | None = None) -> Figure:
    """sigma_i / sigma_1 of each layer's kernel on a log axis, down to ``singular_floor``.

    One seed: one line per head, and their mean dashed. Several seeds: a line for each seed's mean over its
    heads, in a light band from the smallest head to the largest.

    Args:
        layers: layer -> seed -> descending singular values of each head, (values,) each, the first positive.
        names: layer -> the title of its panel.
    """
    scaled = _mapped(layers, lambda sigma: sigma[sigma > singular_floor(sigma)] / sigma[0])
    figure, axes = _panels(scaled, names or {})
    lowest = min(float(head.min()) for head in _all_heads(scaled))
    longest = max(len(head) for head in _all_heads(scaled))
    for axis in axes:
        axis.set(xlim=(0.5, max(longest, 5) + 0.5), yscale="log")
        axis.set_ylim(lowest * 0.6, 1.6)
    axes[0].set_ylabel("singular value σᵢ / σ₁")
    return figure


@report_style()
def explained_variance_curves(layers: Spectra, names: Mapping[int, str] | None = None) -> Figure:
    """The cumulative share of the squared singular values, up to where all lines pass ``REACHED``.

    Lines and arguments as in ``singular_value_curves``.
    """
    shares = _mapped(layers, cumulative_share)
    reached = max(5, *(int(np.searchsorted(head, REACHED)) + 1 for head in _all_heads(shares)))
    figure, axes = _panels(_mapped(shares, lambda head: head[:reached]), names or {})
    for axis in axes:
        axis.set(xlim=(0.5, reached + 0.5), ylim=(0, 1.03))
        axis.axhline(0.9, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes[0].set_ylabel("cumulative explained variance")
    return figure


def singular_floor(sigma: np.ndarray) -> float:
    """Rounding error of a zero among singular values (values,) of this precision, as in a rank."""
    return float(len(sigma) * np.finfo(sigma.dtype).eps * sigma[0])


def cumulative_share(sigma: np.ndarray) -> np.ndarray:
    """sum_{j <= i} sigma_j^2 / sum_j sigma_j^2 for singular values of shape (values,), not all 0."""
    energy: np.ndarray = np.cumsum(np.square(sigma, dtype=np.float64))
    share: np.ndarray = energy / energy[-1]
    return share


def _panels(layers: Spectra, names: Mapping[int, str]) -> tuple[Figure, list[Axes]]:
    seeds = _seeds(layers)
    figure, axes = panel_grid(len(layers), height=3.3)
    for axis, (layer, by_seed) in zip(axes, sorted(layers.items()), strict=True):
        axis.set_title(names.get(layer, f"layer {layer}"), parse_math=False)
        axis.set_xlabel("index i")
        axis.xaxis.set_major_locator(whole_numbers())
        if len(seeds) == 1:
            _line_by_head(axis, by_seed[seeds[0]])
            continue
        styles = seed_styles(seeds)
        for seed, heads in sorted(by_seed.items()):
            mean, low, high = _over_heads(heads)
            if len(heads) > 1:
                color = styles[seed]["color"]
                axis.fill_between(_ranks(mean), low, high, color=color, alpha=0.13, linewidth=0)
            axis.plot(_ranks(mean), mean, **styles[seed], label=f"seed {seed}", **markers(mean))
    legend_below(figure, axes[0])
    return figure, axes


def _line_by_head(axis: Axes, heads: Sequence[np.ndarray]) -> None:
    for index, (head, color) in enumerate(zip(heads, ordered_colors(len(heads)), strict=True)):
        label = f"head {index}" if len(heads) <= HEAD_LIMIT else ("heads" if index == 0 else None)
        axis.plot(_ranks(head), head, color=color, linewidth=1.2, label=label, **markers(head))
    if len(heads) > 1:
        mean, _, _ = _over_heads(heads)
        axis.plot(_ranks(mean), mean, color=INK, linewidth=2.2, linestyle=(0, (5, 2)), label="mean of heads")


def _over_heads(heads: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, least and largest value of the heads, as far as the shortest goes."""
    shortest = min(len(head) for head in heads)
    stacked = np.stack([head[:shortest] for head in heads])
    return stacked.mean(0), stacked.min(0), stacked.max(0)


def _ranks(head: np.ndarray) -> np.ndarray:
    return np.arange(1, len(head) + 1)


def _seeds(layers: Spectra) -> list[int]:
    return sorted({seed for by_seed in layers.values() for seed in by_seed})


def _mapped(layers: Spectra, function: Callable[[np.ndarray], np.ndarray]) -> Spectra:
    return {
        layer: {seed: [function(head) for head in heads] for seed, heads in by_seed.items()}
        for layer, by_seed in layers.items()
    }


def _all_heads(layers: Spectra) -> Iterator[np.ndarray]:
    return (head for by_seed in layers.values() for heads in by_seed.values() for head in heads)
