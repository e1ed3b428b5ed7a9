"""``write_report`` makes one self-contained page from a run folder."""

from __future__ import annotations

from pathlib import Path

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import InputError
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import attention_title, format_value
from kernel_attention_lab.reporting.records import RunRecord, read_run

REPORT_NAME = "report.html"
TASKS = {
    "language": "language model",
    "segmentation": "semantic segmentation",
    "sequence_labels": "classes of positions",
    "decisions": "decisions in an environment",
}


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page needs no other file and no network. It is written to a temporary file and moved into place, so an
    older report survives a failure. The page says what is missing (after an interruption, or for a mechanism
    without objective or spectra) and names unreadable files.

    Raises:
        InputError: ``run_dir`` is not a run folder, or cannot be written to.
    """
    run = read_run(Path(run_dir))
    text = render(run)
    target = run.folder.path / REPORT_NAME
    try:
        write_text_atomically(target, text)
    except OSError as error:
        raise InputError(f"report {str(target)!r} cannot be written: {error.strerror or error}") from error
    return target


def render(run: RunRecord) -> str:
    """The page of a run as text."""
    # Imported here, because matplotlib takes half a second and some commands draw nothing.
    from kernel_attention_lab.reporting.control_sections import control_sections
    from kernel_attention_lab.reporting.curve_sections import curves_section, objective_section
    from kernel_attention_lab.reporting.diagnostic_sections import diagnostics_section
    from kernel_attention_lab.reporting.image_sections import examples_section
    from kernel_attention_lab.reporting.model_sections import confusion_section, spectrum_section
    from kernel_attention_lab.reporting.segmentation_sections import segmentation_sections
    from kernel_attention_lab.reporting.text_sections import (
        configuration_section,
        data_section,
        opening,
        perplexity_section,
        reproduce_section,
        seeds_section,
    )

    recipe = run.summary.get("recipe") or run.versions.get("recipe")
    origin = f"Recipe {format_value(recipe)}" if recipe else f"Run folder {run.folder.path.resolve().name}"
    dataset = str(run.data.get("dataset") or run.fact("dataset") or "unknown data set")
    mechanism = run.config.get("attention") or run.summary.get("attention")
    sections = [
        seeds_section(run),
        perplexity_section(run),
        curves_section(run),
        objective_section(run),
        examples_section(run),
        *control_sections(run),
        *segmentation_sections(run),
        confusion_section(run),
        spectrum_section(run),
        diagnostics_section(run),
        data_section(run),
        configuration_section(run),
        reproduce_section(run),
    ]
    return html.page(
        title=f"{_policy_name(mechanism)} on {dataset}",
        lead=f"{origin} · {TASKS.get(run.task, run.task)}",
        opening=opening(run),
        sections=[section for section in sections if section is not None],
        footer="Written by kernel-attention from the files of the run folder. This page needs no network.",
    )


def _policy_name(mechanism: object) -> str:
    return "Behaviour cloning" if mechanism == "none" else f"{attention_title(mechanism)} attention"
