"""The report's part on diagnosed attention, and the pictures of a diagnosis in Python."""

import shutil

import matplotlib.image
import numpy as np
import pytest
import torch
from torch import nn

import kernel_attention as ka
from kernel_attention.analysis import DiagnosticsReport, diagnose
from kernel_attention.models.sequence import SequenceEncoder
from kernel_attention_lab.reporting import html, plot_diagnostics
from kernel_attention_lab.reporting.diagnostic_plots import measures_figure, over_training_figure
from kernel_attention_lab.reporting.diagnostics import diagnostics_section
from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.reporting.tables import ATTENTION_HEADINGS, PROJECTION_HEADINGS, diagnostics_rows
from kernel_attention_lab.runs.files import write_json


@pytest.fixture(scope="module")
def report() -> DiagnosticsReport:
    torch.manual_seed(0)
    layers = [
        ka.SoftmaxAttention(8, 2),
        ka.PrimalAttention(8, 2, rank=3, eta=0.1),
        ka.DualMultilinearAttention(8, 2),
    ]
    return diagnose(nn.Sequential(*layers), torch.randn(3, 7, 8))


@pytest.fixture
def analysed(make_run, report):
    folder = make_run("regression, several seeds")
    for seed in (0, 1):
        write_json(folder / f"seed-{seed}/diagnostics.json", {"note": "3 cases", "layers": report.records()})
        report.save(folder / f"seed-{seed}/diagnostics.npz")
    return folder


def page_of(folder):
    return html.page("title", "lead", [], [diagnostics_section(read_run(folder))], "footer")


def test_the_section_has_the_numbers(analysed, report, undrawn):
    page = page_of(analysed)
    assert "What the attention does" in page
    for text in (
        "0: softmax",
        "1: primal",
        "2: dual_multilinear",
        "effective rank",
        "J_proj (median)",
        "seed 0. 3 cases.",
        "Seed 1",
    ):
        assert text in page
    assert f"{report[0].summary()['effective_rank']:.4g}" in page
    assert page.count("attention with a row per query") == 2, "a picture of the maps for each seed"


def test_a_run_that_was_not_analysed_has_no_section(make_run):
    assert diagnostics_section(read_run(make_run("one seed"))) is None


def test_a_damaged_array_file_costs_the_maps_only(analysed, undrawn):
    (analysed / "seed-0/diagnostics.npz").write_bytes(b"PK not an archive")
    (analysed / "seed-1/diagnostics.npz").unlink()
    page = page_of(analysed)
    assert "0: softmax" in page
    assert "attention with a row per query" not in page


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"layers": [{"name": "a"}]},
        {"layers": [{"name": "a", "mechanism": "b", "summary": {"x": "1"}, "by_head": {}, "notes": []}]},
        {"layers": [{"name": "a", "mechanism": "b", "summary": {}, "by_head": {"x": ["1"]}, "notes": []}]},
    ],
)
def test_damaged_numbers_are_named(analysed, undrawn, content):
    write_json(analysed / "seed-0/diagnostics.json", content)
    shutil.rmtree(analysed / "seed-1")
    run = read_run(analysed)
    assert [problem.partition(":")[0] for problem in run.problems] == ["seed-0/diagnostics.json"]
    assert diagnostics_section(run) is None


def test_the_last_row_has_the_means_of_the_layers(report):
    """Over those that have the figure: one of the three layers has a kernel-PCA reading, so no mean of it."""
    records = report.records()
    head, rows = diagnostics_rows(records, ATTENTION_HEADINGS)
    column = head.index("effective rank")
    ranks = [
        record["summary"]["effective_rank"] for record in records if "effective_rank" in record["summary"]
    ]
    assert rows[-1][0] == "mean of the layers"
    assert float(rows[-1][column]) == pytest.approx(np.mean(ranks), rel=1e-3)
    head, rows = diagnostics_rows(records, PROJECTION_HEADINGS)
    assert "log J_proj, released" in head
    assert set(rows[-1][1:]) == {"–"}
    assert diagnostics_rows(records[:1], PROJECTION_HEADINGS)[1][-1][0] == "0: softmax"


@pytest.fixture
def course(report):
    """Three copies of the weights; what the first layer's figures are at the second is 10 times as much."""
    entries = [{"epoch": epoch, "layers": report.records()} for epoch in (0, 2, 4)]
    for key in entries[1]["layers"][0]["summary"]:
        entries[1]["layers"][0]["summary"][key] *= 10
    return entries


def test_over_training_every_layer_has_a_line(course, report):
    figure = over_training_figure(course, "step", [0, 200, 400])
    axes = {axis.get_title(loc="left"): axis for axis in figure.axes}
    assert "log J_proj, released form" in axes
    rank = report[0].summary()["effective_rank"]
    line = axes["effective rank"].lines[0]
    np.testing.assert_allclose(line.get_xdata(), [0, 200, 400])
    np.testing.assert_allclose(line.get_ydata(), [rank, 10 * rank, rank])
    assert axes["effective rank"].get_xlabel() == "step"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["layer 0", "layer 1", "layer 2", "mean of the layers"]
    assert over_training_figure([]) is None


def test_the_report_shows_the_course(analysed, course, undrawn):
    assert "untrained model" not in page_of(analysed)
    write_json(analysed / "seed-0/diagnostics_over_training.json", {"note": "3 cases", "epochs": course})
    page = page_of(analysed)
    assert "one line per layer" in page
    assert "The first point is the untrained model." in page


@pytest.mark.parametrize(
    "content",
    [
        {"layers": []},
        {"epochs": [{"epoch": "first", "layers": []}]},
        {"epochs": [{"epoch": 1, "layers": [{"name": "a"}]}]},
    ],
)
def test_a_damaged_course_is_named(analysed, undrawn, content):
    write_json(analysed / "seed-0/diagnostics_over_training.json", content)
    run = read_run(analysed)
    assert [problem.partition(":")[0] for problem in run.problems] == [
        "seed-0/diagnostics_over_training.json"
    ]
    assert "one line per layer" not in page_of(analysed)


@pytest.mark.parametrize("what", ["measures", "maps"])
def test_plot_to_a_file(report, tmp_path, what):
    path = plot_diagnostics(report, tmp_path / "figure.png", what)
    assert matplotlib.image.imread(path).std() > 0.01


def test_plots_that_cannot_be(report, tmp_path):
    with pytest.raises(ka.InputError, match="unknown what 'map'; did you mean 'maps'"):
        plot_diagnostics(report, tmp_path / "figure.png", "map")
    with pytest.raises(ka.InputError, match="cannot be written"):
        plot_diagnostics(report, tmp_path / "missing/figure.png")
    with pytest.raises(ka.InputError, match="cannot be written"):
        plot_diagnostics(report, tmp_path / "figure.nonsense")
    with pytest.raises(ka.InputError, match="no data for this picture"):
        plot_diagnostics(DiagnosticsReport(()), tmp_path / "figure.png")


def test_layers_of_our_models_are_called_by_their_number_and_mechanism():
    """Also where a later layer alone was measured, and for every mechanism, preset or not."""
    names = [mechanism.name for mechanism in ka.list_attention()]
    options = {"conv2d": {"grid_size": [1, 7]}}
    model = SequenceEncoder(
        3, 7, attention=[{name: options.get(name, {})} for name in names], embed_dim=8, num_heads=2,
        num_layers=len(names), feedforward_dim=8,
    )  # fmt: skip
    found = diagnose(model, torch.randn(2, 7, 3), [2, 5], quantities=("spectrum", "objective", "maps"))
    _, rows = diagnostics_rows(found.records(), ATTENTION_HEADINGS)
    assert [row[0] for row in rows[:-1]] == [f"layer {place}: {names[place]}" for place in (2, 5)]
    kinds = [layer.mechanism for layer in diagnose(model, torch.randn(2, 7, 3), quantities=("maps",)).layers]
    assert kinds == names
    axis = next(a for a in measures_figure(found.records()).axes if a.get_xlabel() == "layer")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2", "5"]


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (ka.SoftmaxAttention(8, 2, symmetric=True), "symmetric"),
        (ka.LinearAttention(8, 2), "linear"),
        (ka.LinearAttention(8, 2, feature_map="cosine"), "cosine"),
        (ka.SupportVectorAttention(8, 2, factors=1), "batch_norm"),
        (ka.SupportVectorAttention(8, 2, beta=0.0), "scaled_heads"),
        (ka.SupportVectorAttention(8, 2, beta=0.0, factors=1, convolution="1d"), "conv1d"),
        (ka.SupportVectorAttention(8, 2, beta=0, factors=1, convolution="2d", grid_size=(1, 5)), "conv2d"),
        (ka.SupportVectorAttention(8, 2), "batch_norm_scaled_heads"),
        (nn.MultiheadAttention(8, 2, batch_first=True), "softmax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_layer_made_from_its_class_has_the_name_that_its_options_have(layer, name):
    batch = (torch.randn(2, 5, 8),) * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
    model = layer if len(batch) == 3 else nn.Sequential(layer)
    assert diagnose(model, batch, quantities=("maps",))[0].mechanism == name
