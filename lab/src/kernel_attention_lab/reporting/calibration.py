"""How well a model knows what it knows: a reliability diagram, a risk-coverage curve, figures by method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import (
    MUTED,
    data_uri,
    free_panels,
    legend_below,
    report_style,
    seed_styles,
)
from kernel_attention_lab.reporting.formats import MISSING, format_number, format_seeds
from kernel_attention_lab.reporting.records import RunRecord

Figures = dict[str, list[Mapping[str, Any]]]
"""By method, the figures of each seed that has it."""

COLUMNS = {
    "accuracy": "accuracy, %", "nll": "NLL", "ece": "ECE, %", "adaptive_ece": "adaptive ECE, %",
    "brier": "Brier", "aurc": "AURC, %", "error_auroc": "AUROC of errors, %",
    "error_fpr95": "FPR95 of errors, %", "auroc": "AUROC of unseen, %", "fpr95": "FPR95 of unseen, %",
}  # fmt: skip
SETS = {"known": "test", "corrupted": "corrupted", "unseen": "unseen"}
METHODS = {
    "plain": "one pass", "temperature": "temperature", "samples": "samples", "dropout": "MC dropout",
    "ensemble": "ensemble",
}  # fmt: skip
_PLAIN_NUMBERS = ("nll", "brier")


def uncertainty_section(run: RunRecord) -> html.Section | None:
    """The figures and curves of ``attack --plan uncertainty``; None where they were not measured."""
    methods: Figures = {}
    seeds = []
    for record in run.seeds:
        measured = record.robustness or {}
        seeds += [record.seed] if "uncertainty" in measured else []
        for part in ("uncertainty", "ensemble"):
            for name, figures in measured.get(part, {}).get("methods", {}).items():
                methods.setdefault(name, []).append(figures)
    if not methods:
        return None
    said = [
        f"{METHODS[name]}: ECE {_percent(_mean(figures, 'known', 'ece'))}"
        for name, figures in methods.items()
    ]
    picture = html.Picture(
        data_uri(calibration_figure(methods)),
        f"Reliability diagram and risk-coverage curve of {len(methods)} methods. {'; '.join(said)}.",
        "Left: the share of right test images by confidence, in 15 bins; a calibrated model is on the "
        "diagonal, an over-confident one below it. Right: the share of wrong images among the most certain "
        "ones. The first seed of each method.",
        wide=True,
    )
    rows = [
        [SETS[kind], METHODS[name], *(_cell(figures, kind, column) for column in COLUMNS)]
        for kind in SETS
        for name, figures in methods.items()
        if kind in figures[0]
    ]
    caption = f"Means over {format_seeds(seeds)}; an ensemble has all of them as its members."
    table = html.Table(["images", "method", *COLUMNS.values()], rows, caption, numbers=True)
    return html.Section("uncertainty", "Uncertainty", [html.Pictures([picture]), table])


def calibration_figure(methods: Figures) -> Figure:
    """The reliability diagram and the risk-coverage curve of the first seed of each method."""
    with report_style():
        figure, (diagram, curve) = free_panels(2)
        diagram.plot([0, 1], [0, 1], color=MUTED, linewidth=1)
        styles = seed_styles(range(len(methods)))
        for place, (name, figures) in enumerate(methods.items()):
            known, style = figures[0]["known"], styles[place]
            bins, risk = known["reliability"], known["risk"]
            diagram.plot(
                bins["confidence"], bins["accuracy"], marker="o", markersize=3, label=METHODS[name], **style
            )
            curve.plot(np.arange(1, len(risk) + 1) / len(risk), risk, **style)
        diagram.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        curve.set(xlabel="coverage", ylabel="risk", xlim=(0, 1), ylim=(0, None))
        for axis in (diagram, curve):
            axis.xaxis.set_major_formatter(PercentFormatter(1))
            axis.yaxis.set_major_formatter(PercentFormatter(1))
        legend_below(figure, diagram)
    return figure


def _mean(figures: list[Mapping[str, Any]], kind: str, name: str) -> float | None:
    values = [each[kind][name] for each in figures if name in each.get(kind, {})]
    return float(np.mean(values)) if values else None


def _cell(figures: list[Mapping[str, Any]], kind: str, name: str) -> str:
    value = _mean(figures, kind, name)
    return format_number(value) if name in _PLAIN_NUMBERS and value is not None else _percent(value)


def _percent(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.1f}"
