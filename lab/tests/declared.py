"""Pages drawn by this checkout's declarations from the records of another folder."""

from __future__ import annotations

from pathlib import Path

from checkout import ROOT

from kernel_attention_lab.evidence.observations import Evidence
from kernel_attention_lab.evidence.pages import declarations, region

NOT_YET = ["", "Not measured yet.", ""]


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows, its head among them."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def draw(page: str, root: Path, mark: str | None = None) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's regions by their marks, all or one, and the files of the figures."""
    evidence = Evidence(root)
    regions, figures = {}, {}
    for declared in declarations(ROOT):
        if declared["page"] == page and mark in (None, declared["mark"]):
            regions[declared["mark"]], files = region(declared, evidence)
            figures |= files
    return regions, figures
