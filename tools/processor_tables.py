"""Training steps on two makes of processor.

The first records are those of ``make performance``. Those of the second machine, ``NAME_epyc.json``, are
written by ``python benchmarks/performance.py NAME --machine epyc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generated import NOTHING, table
from performance_tables import measured, read, said_of, spread

PAGE = Path("docs/performance.md")
SECOND = "epyc"


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of a region for every suite that both machines have measured."""
    regions = {}
    for name, divisor in SUITES.items():
        records = [read(root, name), read(root, f"{name}_{SECOND}")]
        lines = _lines(*records, divisor) if all(records) else None
        regions[f"processors-{name}"] = ["", *lines, ""] if lines else NOTHING
    forms = [read(root, "primal-forms"), read(root, f"primal-forms_{SECOND}")]
    regions["processors-primal-forms"] = ["", *_form_lines(*forms), ""] if all(forms) else NOTHING
    return regions, {}


def _lines(first: dict[str, Any], second: dict[str, Any], divisor: Callable[[str], float]) -> list[str]:
    """Both machines, then a row for each contender, with a column for each setting on each machine."""
    makes = [_make(record) for record in (first, second)]
    found = [_steps(record) for record in (first, second)]
    settings = [where for where in found[0] if where in found[1]]
    names = [name for name in found[0][settings[0]] if name != first["plan"]["baseline"]]
    rows = [
        [name, *(spread(steps[where][name], divisor(name)) for where in settings for steps in found)]
        for name in names
        if all(name in steps[where] for where in settings for steps in found)
    ]
    head = ["layer", *(f"{where}, {make}" for where in settings for make in makes)]
    return [*(f"{said_of(record['machine'])}." for record in (first, second)), "", *table(head, rows)]


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


def _form_lines(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The same for the pairs of forms of primal attention."""
    records = (first, second)
    pairs = [(row["form"], row["other"], row["length"]) for row in first["rows"]]
    found = [
        {(row["form"], row["other"], row["length"]): spread(row) for row in record["rows"]}
        for record in records
    ]
    rows = [[form, other, str(length), *(ratio[form, other, length] for ratio in found)]
            for form, other, length in pairs if (form, other, length) in found[1]]  # fmt: skip
    head = ["step of", "over that of", "N", *map(_make, records)]
    return [*(f"{said_of(record['machine'])}." for record in records), "", *table(head, rows)]


def _make(record: dict[str, Any]) -> str:
    return re.sub(r"\(R\)| Processor", "", record["machine"]["processor"])


def _iterations(name: str) -> float:
    """The number of products of attention in a layer of RPC; 1 for other layers."""
    return float((re.findall(r"iterations (\d+)", name) or ["1"])[0])


SUITES: dict[str, Callable[[str], float]] = {
    "primal": lambda _: 1.0,
    "rpc": _iterations,
    "short": lambda _: 1.0,
    "multilinear": lambda _: 1.0,
}
