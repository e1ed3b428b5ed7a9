"""Diagnostics of a finished run: figures next to its weights and in its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_attention.analysis import DiagnosticsReport, diagnose
from kernel_attention.analysis.layer_measures import QUANTITIES
from kernel_attention.errors import InputError, require_positive, writing
from kernel_attention.files import write_atomically
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.runs.files import write_arrays, write_json
from kernel_attention_lab.runs.saved import SavedRun
from kernel_attention_lab.tasks.experiment import Experiment

_OVER_TRAINING = ("spectrum", "distance", "projection", "objective")


def analyze_run(
    run: SavedRun,
    experiment: Experiment,
    layers: str = "all",
    cases: int = 16,
    output: Path | None = None,
    over_training: bool = False,
    quantities: Sequence[str] = QUANTITIES,
) -> dict[int, DiagnosticsReport]:
    """Diagnose every trained seed on evenly spaced cases of a split.

    Write ``seed-K/diagnostics.npz`` (all arrays) and ``seed-K/diagnostics.json`` (the figures of the report)
    into the run, the examples of an image run too, which earlier versions did not leave, and renew its
    report. With ``output``, write to that folder, with pictures, and do not change the run.

    Args:
        run: a run folder with at least one trained seed.
        experiment: the experiment of the run, whose test split is used.
        layers: choices of ``kernel_attention.analysis.capture``, separated by commas.
        cases: number of cases.
        output: a folder, created if missing.
        over_training: also measure every kept copy of the weights, on the same cases, and write
            ``seed-K/diagnostics_over_training.json``.
        quantities: what is measured; see ``kernel_attention.analysis.diagnose``.

    Returns:
        The report of every seed.

    Raises:
        InputError: for a run without seeds or without the weights to measure, a layer that does not exist,
            cases below 1 or a folder that cannot be written.
    """
    if not run.seeds:
        raise InputError(f"run {run.folder}: no trained seed in it yet")
    require_positive(cases=cases)
    if over_training:
        _require_kept(run)
    batches = experiment.batches(cases)
    note = experiment.cases_text(sum(len(batch[0]) for batch in batches))
    reports = {
        seed: diagnose(run.model(seed), batches, layers, cases=cases, quantities=tuple(quantities))
        for seed in run.seeds
    }
    courses = {seed: _course(run, seed, batches, layers, cases) for seed in run.seeds if over_training}
    with writing(f"output {output or run.folder}"):
        for seed, report in reports.items():
            folder = (output or run.folder) / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "diagnostics.npz", report.write)
            content = {"note": note, "quantities": list(quantities), "layers": report.records()}
            write_json(folder / "diagnostics.json", content)
            if over_training:
                course = {"note": note, "epochs": courses[seed]}
                write_json(folder / "diagnostics_over_training.json", course)
            examples = experiment.examples(run.model(seed))
            if examples:
                write_arrays(folder / "examples.npz", examples)
            if output is not None:
                _draw(report, folder, courses.get(seed))
    if output is None:
        write_report(run.folder)
    return reports


def _require_kept(run: SavedRun) -> None:
    for seed in run.seeds:
        if not run.kept_epochs(seed):
            raise InputError(
                f"run {run.folder}: no weights of seed {seed} were kept during training; train with "
                "--keep_weights_every 1"
            )


def _course(
    run: SavedRun, seed: int, batches: Iterable[Any], layers: str, cases: int
) -> list[dict[str, Any]]:
    """The records of every kept copy of a seed's weights; ``epoch`` 0 is the untrained model."""
    return [
        {
            "epoch": epoch,
            "layers": diagnose(
                run.model(seed, epoch), batches, layers, cases=cases, quantities=_OVER_TRAINING
            ).records(),
        }
        for epoch in run.kept_epochs(seed)
    ]


def _draw(report: DiagnosticsReport, folder: Path, course: list[dict[str, Any]] | None) -> None:
    from kernel_attention_lab.reporting import plot_diagnostics, plot_over_training  # bring matplotlib

    if course is not None:
        plot_over_training(course, folder / "over_training.svg")
    plot_diagnostics(report, folder / "diagnostics.svg")
    if any("attention_map" in layer.values for layer in report.layers):
        plot_diagnostics(report, folder / "attention.png", "maps")
