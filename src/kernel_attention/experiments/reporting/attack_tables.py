"""The table of the attacks on a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_attention.experiments.reporting.formats import MISSING, format_metric, format_number
from kernel_attention.experiments.robustness.attack_plan import eps_text
from kernel_attention.experiments.robustness.attacks import ATTACKS
from kernel_attention.experiments.robustness.masking import attack_title

if TYPE_CHECKING:
    from rich.table import Table

_NORMS = {"linf": "L∞", "l2": "L2", "l1": "L1"}
_UNITS = {"pixel": "pixels in [0, 1]", "paper": "deviations of a channel"}


def attack_table(record: Mapping[str, Any], title: str) -> Table:
    """The content of ``robustness.json`` as a table, one row per attack; no text is read as rich markup.

    The distance is the median shift of the images that the attack breaks, in the attack's norm.
    """
    from rich.table import Table
    from rich.text import Text

    units = "; ".join(f"{name}: {unit}" for name, unit in _UNITS.items())
    table = Table(title=Text(title), caption=Text(f"eps and distance in units of the protocol ({units})"))
    for name in ("attack", "protocol", "eps", "images", "accuracy", "distance", "seconds"):
        table.add_column(name, justify="left" if name in ("attack", "protocol") else "right")
    for entry in record["attacks"]:
        norm = ATTACKS[entry["attack"]].norm
        distance = entry["distances"][norm]
        table.add_row(
            Text(attack_title(entry)),
            Text(entry["protocol"]),
            Text(eps_text(entry["eps"]) or MISSING),
            Text(str(entry["cases"])),
            Text(format_metric("accuracy", entry["accuracy"])),
            Text(MISSING if distance is None else f"{format_number(distance, 3)} ({_NORMS[norm]})"),
            Text(f"{entry['seconds']:.1f}"),
        )
    return table


def shift_lines(record: Mapping[str, Any]) -> list[str]:
    """The figures of ``robustness.json`` on corrupted and on unseen images, a line each."""
    lines = []
    if (corrupted := record.get("corruptions")) is not None:
        lines.append(
            f"corruptions: accuracy {format_metric('accuracy', corrupted['accuracy'])} on average over "
            f"{len(corrupted['accuracies'])} corruptions, {len(corrupted['severities'])} severities and "
            f"{corrupted['cases']} images"
        )
    if (unseen := record.get("out_of_distribution")) is not None:
        lines.append(
            f"out of distribution: AUPR {100 * unseen['aupr']:.2f} %, AUROC {100 * unseen['auroc']:.2f} %, "
            f"{unseen['out_cases']} images of {unseen['unseen']} among {unseen['in_cases']} of the test split"
        )
    return lines
