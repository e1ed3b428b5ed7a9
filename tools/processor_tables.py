"""Training steps on two makes of processor.

The first records are those of ``make performance``. Those of the second machine, ``NAME_epyc.json``, are
written by ``python benchmarks/performance.py NAME --machine epyc``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generated import NOTHING, table
from performance_tables import iterations, measured, read, said_of, spread

PAGE = Path("docs/performance.md")
SECOND = "epyc"
SUITES = ("primal", "rpc", "short", "multilinear")
FORMS = "primal-forms"


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of a region for everything that both machines have measured."""
    regions = {}
    for name in (*SUITES, FORMS):
        first, second = read(root, name), read(root, f"{name}_{SECOND}")
        if first is None or second is None:
            regions[f"processors-{name}"] = NOTHING
            continue
        records = first, second
        rows = form_rows(records) if name == FORMS else step_rows(records)
        machines = [f"{said_of(record['machine'])}." for record in records]
        regions[f"processors-{name}"] = ["", *machines, "", *rows, ""]
    return regions, {}


def step_rows(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each contender, with a column for each setting on each machine.

    The step of RPC is divided by the number of its products.
    """
    first, second = found = [_steps(record) for record in records]
    settings = [where for where in first if where in second]
    rows = [
        [name, *(spread(steps[where][name], iterations(name)) for where in settings for steps in found)]
        for name in first[settings[0]]
        if name != records[0]["plan"]["baseline"]
        and all(name in steps[where] for where in settings for steps in found)
    ]
    return table(["layer", *(f"{where}, {_make(record)}" for where in settings for record in records)], rows)


def form_rows(records: Sequence[dict[str, Any]]) -> list[str]:
    """A row for each pair of forms of primal attention and each length, with a column for each machine."""
    first, second = (
        {(row["form"], row["other"], str(row["length"])): spread(row) for row in record["rows"]}
        for record in records
    )
    rows = [[*pair, first[pair], second[pair]] for pair in first if pair in second]
    return table(["step of", "over that of", "N", *map(_make, records)], rows)


def _steps(record: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """What is known of training steps, by what the settings differ in and by contender.

    Of several numbers of heads, the first is taken: the columns would be too many.
    """
    settings = [cell["setting"] for cell in record["cells"]]
    several = len({setting["threads"] for setting in settings}) > 1
    found = {}
    for cell in record["cells"]:
        setting = cell["setting"]
        if setting["num_heads"] == settings[0]["num_heads"]:
            threads = f", threads {setting['threads']}" if several else ""
            steps = {name: row["time"]["step"] for name, row in measured(cell).items()}
            found[f"N {setting['length']}{threads}"] = steps
    return found


def _make(record: dict[str, Any]) -> str:
    return re.sub(r"\(R\)| Processor", "", record["machine"]["processor"])
