"""The pictures show the data they are given, and leave matplotlib as they found it."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from kernel_attention_lab.reporting import confusion, figures, spectra
from kernel_attention_lab.reporting.curves import curve_figure

EPOCHS = np.arange(1, 24)


def curve(scale: float):
    return EPOCHS, scale * np.exp(-EPOCHS / 7)


def singular_values(seeds=(0,), layers=(0, 1), heads=3, values=11):
    rng = np.random.default_rng(0)
    return {
        layer: {seed: [np.sort(rng.random(values))[::-1] for _ in range(heads)] for seed in seeds}
        for layer in layers
    }


def both(training, validation=None, **options):
    """The learning curves of a loss."""
    return curve_figure(
        {"training": training} | ({"validation": validation} if validation else {}), "loss", **options
    )


def all_figures():
    return [
        both({0: curve(1)}, {0: curve(2)}, selected=5),
        both({0: curve(1), 1: curve(3)}, percent=True),
        curve_figure({"layer 0": {0: curve(1)}, "layer 1": {0: curve(-2)}}, "J", signed=True),
        curve_figure({"layer 0": {0: curve(1), 1: curve(-1)}}, "J", signed=True),
        confusion.confusion_matrix(np.eye(3, dtype=int), ["a", "b", "c"]),
        spectra.singular_value_curves(singular_values()),
        spectra.explained_variance_curves(singular_values(seeds=(0, 1))),
    ]


def test_curves_show_the_values_of_one_seed():
    axis = both({0: curve(1)}, {0: curve(2)}, selected=5).axes[0]
    lines = {line.get_label(): line for line in axis.lines}
    np.testing.assert_array_equal(lines["training"].get_ydata(), curve(1)[1])
    np.testing.assert_array_equal(lines["validation"].get_ydata(), curve(2)[1])
    assert lines["selected epoch 5"].get_xdata()[0] == 5


def test_the_mean_of_seeds_covers_the_epochs_they_share():
    epochs, values = curve(3)
    axis = both({0: curve(1), 1: (epochs[:7], values[:7])}).axes[0]
    mean = next(line for line in axis.lines if line.get_label() == "mean")
    np.testing.assert_array_equal(mean.get_xdata(), epochs[:7])
    np.testing.assert_allclose(mean.get_ydata(), 2 * curve(1)[1][:7])


@pytest.mark.parametrize("values", [[0.0, 0.0], [np.nan, np.nan], [1e-30, -1e30], [2.0, 2.0]])
def test_degenerate_objectives_can_be_drawn(values):
    figure = curve_figure({"layer 0": {0: (np.array([1, 2]), np.array(values))}}, "J", signed=True)
    assert figures.data_uri(figure).startswith("data:image/")


def test_confusion_colours_are_shares_of_the_row_and_counts_are_written():
    counts = np.array([[8, 2, 0], [0, 0, 0], [1, 0, 3]])
    axis = confusion.confusion_matrix(counts, ["a", "b", "c"]).axes[0]
    expected = [[0.8, 0.2, 0], [0, 0, 0], [0.25, 0, 0.75]]
    np.testing.assert_allclose(axis.images[0].get_array(), expected)
    assert {text.get_position(): text.get_text() for text in axis.texts} == {
        (0, 0): "8",
        (1, 0): "2",
        (0, 2): "1",
        (2, 2): "3",
    }


@pytest.mark.parametrize("name", ["$x_1$", "$broken", "_hidden", "日本", "a" * 300, ""])
def test_any_class_name_can_be_drawn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert figures.data_uri(confusion.confusion_matrix(np.eye(2, dtype=int), [name, "b"]))


def test_spectra_are_relative_and_explained_variance_is_the_share_of_squares():
    sigma = np.array([4.0, 2.0, 1.0])
    layers = {0: {0: [sigma]}}
    line = spectra.singular_value_curves(layers).axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [1, 0.5, 0.25])
    np.testing.assert_allclose(spectra.cumulative_share(sigma), [16 / 21, 20 / 21, 1])
    line = spectra.explained_variance_curves(layers).axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), [16 / 21, 20 / 21, 1])


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_spectra_end_where_rounding_begins(precision):
    """Of a matrix of rank 5, 64 x 64, rounding leaves 59 values that no figure shows."""
    left, right = np.random.default_rng(0).standard_normal((2, 64, 5))
    sigma = np.linalg.svd((left @ right.T).astype(precision), compute_uv=False)
    assert spectra.singular_floor(sigma) == 64 * np.finfo(precision).eps * sigma[0]
    line = spectra.singular_value_curves({0: {0: [sigma]}}).axes[0].lines[0]
    assert len(line.get_ydata()) == 5


def test_no_figure_is_registered_with_pyplot():
    all_figures()
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
