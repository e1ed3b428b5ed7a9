"""The record of ``kernel_attention.experiments.benchmarking.revisions`` as a table and a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import InputError
from kernel_attention.experiments.reporting.benchmark_tables import machine_line

if TYPE_CHECKING:
    from rich.table import Table

_HEAD = ["contender", "sizes", "pass", "then, ms", "now, ms", "now / then", "quartiles", "verdict"]
_SHOWN = {"embed_dim": "d", "num_heads": "heads", "batch_size": "batch", "threads": "threads"}


def write_revisions(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``against.json`` and ``against.md``. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (_HEAD, ["---"] * len(_HEAD), *_rows(record))]
    page = "\n\n".join(["\n".join(lines), *verdict_lines(record), machine_line(record["machine"])])
    files = {"against.json": json.dumps(record, indent=1, allow_nan=False), "against.md": page}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text_atomically(folder / name, text + "\n")
    except OSError as error:
        raise InputError(f"output {folder}: cannot be written ({error.strerror or error})") from None
    return [folder / name for name in files]


def revision_table(record: Mapping[str, Any]) -> Table:
    """A row for every contender, size and pass."""
    from rich.table import Table
    from rich.text import Text

    title = f"Now against {record['reference']} ({record['commit'][:10]}), {record['rounds']} rounds"
    table = Table(title=Text(title))
    for index, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if 3 <= index <= 6 else "left")
    for row in _rows(record):
        table.add_row(*map(Text, row))
    return table


def verdict_lines(record: Mapping[str, Any]) -> list[str]:
    """What got slower and faster in a line each, and the contenders that one revision lacks."""
    change = 100 * (record["least_change"] - 1)
    lines = []
    for verdict in ("slower", "faster"):
        named = [
            f"{row['contender']}, {row['pass']}, {_sizes(row['setting'])}: {row['ratio']:.3f}"
            for row in record["rows"]
            if row["verdict"] == verdict
        ]
        nothing = (
            f"nothing beyond the noise ({change:.0f} % or more, chance of any false alarm {record['level']})"
        )
        lines.append(f"{verdict}: {'; '.join(named) or nothing}")
    for name, where in (("old", record["reference"]), ("new", "the working tree")):
        if record["lacking"][name]:
            lines.append(f"not measured with {where}: {', '.join(record['lacking'][name])}")
    return lines


def _rows(record: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            row["contender"], _sizes(row["setting"]), row["pass"], f"{1e3 * row['old']:.3g}",
            f"{1e3 * row['new']:.3g}", f"{row['ratio']:.3f}",
            f"{row['ratio_lower']:.3f}–{row['ratio_upper']:.3f}", row["verdict"],
        ]
        for row in record["rows"]
    ]  # fmt: skip


def _sizes(setting: Mapping[str, Any]) -> str:
    """The sizes in short, N first."""
    named = [f"{short} {setting[name]}" for name, short in _SHOWN.items() if name in setting]
    usual = {"dtype": "float32", "device": "cpu"}
    rest = [setting[name] for name, value in usual.items() if setting.get(name, value) != value]
    causal = ["causal"] if setting.get("is_causal") else []
    return ", ".join([f"N {setting['length']}", *named, *rest, *causal])
