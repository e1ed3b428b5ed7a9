"""The table of docs/segmentation.md, from records of segmentation/camvid_tiny in results/vision/camvid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from generated import NOTHING, table
from robustness_tables import cell

from kernel_attention_lab.results import Measurement, ResultRecord, read_records, require_same_config

PAGE = Path("docs/segmentation.md")
RECORDS = Path("results/vision/camvid")
COLUMNS = {"mean_iou": "mean IoU", "mean_accuracy": "mean accuracy", "pixel_accuracy": "pixel accuracy"}
BASELINES = {"majority": "most frequent class at every place", "constant": "most frequent class everywhere"}


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's region by its mark; there are no figures."""
    records = read_records(root / RECORDS)
    require_same_config(records, apart_from=("attention", "start_from"))
    by_label: dict[str, list[ResultRecord]] = defaultdict(list)
    for record in records:
        by_label[record.label].append(record)
    return {"camvid": model_lines(by_label) if records else NOTHING}, {}


def model_lines(by_label: dict[str, list[ResultRecord]]) -> list[str]:
    """The models, clean and corrupted, and the baselines of the test split."""
    rows = []
    for label, records in by_label.items():
        clean, corrupted = (
            [cell(measured(records, f"{prefix}{key}"), len(records)) for key in COLUMNS]
            for prefix in ("", "corrupted_")
        )
        rows.append([f"`{label}`", str(len(records)), *clean, *corrupted])
    first = next(iter(by_label.values()))[0]
    for name, title in BASELINES.items():
        cells = [cell(measured([first], f"{name}_{key}"), 1) for key in COLUMNS]
        rows.append([title, "", *cells, *[""] * len(COLUMNS)])
    titles = [*COLUMNS.values(), *(f"{title}, corrupted" for title in COLUMNS.values())]
    every = [record for records in by_label.values() for record in records]
    minutes = [record.budget["seconds"] / 60 for record in every]
    machines = " and ".join(sorted({record.machine for record in every}))
    took = f"{min(minutes):.0f}" if len(every) == 1 else f"{min(minutes):.0f} to {max(minutes):.0f}"
    return [
        "",
        *table(["model", "seeds", *titles], rows),
        "",
        f"Training took {took} minutes: {machines}.",
        "",
    ]


def measured(records: Sequence[ResultRecord], key: str) -> dict[int, Measurement]:
    """A figure of the test split by seed."""
    return {record.seed: Measurement(record.figures["evaluation"][key]) for record in records}
