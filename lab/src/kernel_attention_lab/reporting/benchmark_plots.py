"""The records of ``kernel_attention_lab.benchmarking`` as pictures over the sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_attention_lab.reporting.figures import DASHES, PALETTE, report_style

Line = tuple[list[int], list[float]]  # lengths and values

# The ratios in the figures of the primal-dual paper: (figure, numerator, denominator).
_SPARSE = "kernel {'sparse': {'stride': 64}}, factors [1, 2]"
_PAPER = (
    ("figure 1: BN+SH over softmax", "eager batch_norm_scaled_heads", "eager"),
    ("figure 2: SH over softmax", "eager scaled_heads", "eager"),
    ("figure 3: BN+SH over sparse", f"batch_norm_scaled_heads ({_SPARSE})", "sparse (stride 64)"),
    ("figure 4: SH over sparse", f"scaled_heads ({_SPARSE})", "sparse (stride 64)"),
)


@report_style()
def benchmark_plot(record: Mapping[str, Any]) -> Figure:
    """Time per token and peak memory over N, one line per contender and setting."""
    kinds = [(kind, "time") for kind in record["plan"]["passes"]]
    if any("memory" in row for cell in record["cells"] for row in cell["rows"]):
        kinds += [(kind, "memory") for kind in record["plan"]["passes"]]
    figure = Figure(figsize=(5.2 * len(kinds), 4.6))
    axes = list(figure.subplots(1, len(kinds), squeeze=False)[0])
    for axis, (kind, what) in zip(axes, kinds, strict=True):
        lines = _lines(record["cells"], lambda cell, row, kind=kind, what=what: _value(cell, row, kind, what))
        _draw(axis, lines)
        axis.set_yscale("log")
        axis.set_title(f"{kind}: {'µs per token' if what == 'time' else 'peak, MB'}")
    _legend(figure, axes)
    return figure


@report_style()
def paper_ratio_plot(record: Mapping[str, Any]) -> Figure:
    """Figures 1 to 4 of the primal-dual paper: ratios of operations and memory over N, one line per width."""
    quantities = [("operations", "step"), ("memory", "step"), ("memory", "forward")]
    figure = Figure(figsize=(3.6 * len(quantities), 2.6 * len(_PAPER)))
    axes = figure.subplots(len(_PAPER), len(quantities), squeeze=False)
    for row_of_axes, (title, over, under) in zip(axes, _PAPER, strict=True):
        for axis, (what, kind) in zip(row_of_axes, quantities, strict=True):
            _draw(axis, paper_ratios(record, over, under, what, kind))
            phase = "" if what == "operations" else ", training" if kind == "step" else ", inference"
            axis.set_title(f"{title}\n{what}{phase}")
    _legend(figure, list(axes.ravel()))
    return figure


def paper_ratios(record: Mapping[str, Any], over: str, under: str, what: str, kind: str) -> dict[str, Line]:
    """Lengths and ratios between the figures of two contenders, by width ("d 64")."""
    lines: dict[str, Line] = {}
    for cell in record["cells"]:
        values = {row["contender"]: row.get(what, {}).get(kind) for row in cell["rows"]}
        if values.get(over) is None or not values.get(under):
            continue
        lengths, ratios = lines.setdefault(f"d {cell['setting']['embed_dim']}", ([], []))
        lengths.append(cell["setting"]["length"])
        ratios.append(values[over] / values[under])
    return lines


def is_paper_record(record: Mapping[str, Any]) -> bool:
    """Return whether the contenders of figures 1 to 4 are in a record."""
    return all({over, under} <= set(record["plan"]["contenders"]) for _, over, under in _PAPER)


def _value(cell: Mapping[str, Any], row: Mapping[str, Any], kind: str, what: str) -> float | None:
    if what == "memory":
        peak = row.get("memory", {}).get(kind)
        return None if peak is None else peak / 1e6
    if "time" not in row:
        return None
    return 1e6 * row["time"][kind]["median"] / (cell["setting"]["length"] * cell["setting"]["batch_size"])


def _lines(cells: Sequence[Mapping[str, Any]], value: Any) -> dict[str, Line]:
    settings = [{key: cell["setting"][key] for key in cell["setting"] if key != "length"} for cell in cells]
    varying = [key for key in settings[0] if len({setting[key] for setting in settings}) > 1]
    lines: dict[str, Line] = {}
    for cell, setting in zip(cells, settings, strict=True):
        for row in cell["rows"]:
            number = value(cell, row)
            if number is None:
                continue
            name = ", ".join([row["contender"], *(f"{key} {setting[key]}" for key in varying)])
            lengths, values = lines.setdefault(name, ([], []))
            lengths.append(cell["setting"]["length"])
            values.append(number)
    return lines


def _draw(axis: Axes, lines: Mapping[str, Line]) -> None:
    styles = cycle((color, dashes) for dashes in DASHES for color in PALETTE)
    for (name, (lengths, values)), (color, dashes) in zip(lines.items(), styles, strict=False):
        axis.plot(
            np.array(lengths), np.array(values), label=name, color=color, linestyle=dashes, marker="o",
            markersize=3.5,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xlabel("N")


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    named: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    if named:
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=3)
