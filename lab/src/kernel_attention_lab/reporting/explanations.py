"""The picture of an explained prediction: every channel, with the steps that the answer rests on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from kernel_attention.errors import writing
from kernel_attention_lab.reporting.figures import INK, report_style

_SHOWN = 12  # channels at most, those with the largest shares


@report_style()
def plot_explanation(
    series: np.ndarray, shares: np.ndarray, channels: Sequence[str], title: str, path: Path
) -> Path:
    """Write a panel for every channel: its values, on bars coloured by their share in the answer.

    Args:
        series: (N, c).
        shares: (N, c), what speaks for the answer above 0 and against it below.
        channels: c names.
        title: above the panels.
        path: the picture, of any kind that matplotlib writes.

    Raises:
        InputError: where the file cannot be written.
    """
    order = np.argsort(-np.abs(shares).sum(axis=0), kind="stable")[:_SHOWN]
    shown = sorted(order.tolist())
    figure = Figure(figsize=(8, 0.9 + 1.3 * len(shown)))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    largest = float(np.abs(shares[:, shown]).max()) or 1.0
    image = None
    for axis, channel in zip(axes, shown, strict=True):
        values = series[:, channel]
        low, high = float(values.min()), float(values.max())
        room = 0.08 * (high - low) or 1.0
        extent = (-0.5, len(values) - 0.5, low - room, high + room)
        image = axis.imshow(
            shares[None, :, channel], aspect="auto", cmap="RdBu_r", vmin=-largest, vmax=largest, extent=extent
        )
        axis.plot(values, color=INK, linewidth=1.2)
        axis.set_ylabel(channels[channel][:20])
        axis.grid(visible=False)
    axes[0].set_title(title)
    axes[-1].set_xlabel("step")
    if image is not None:
        figure.colorbar(image, ax=list(axes), label="for (red) or against (blue) the answer")
    with writing(f"output {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path
