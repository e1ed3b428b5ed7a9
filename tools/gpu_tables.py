"""The tables of docs/performance.md that were measured on a GPU, from ``results/benchmarks/gpu*.json``.

The records are those of ``kernel-attention bench --suite gpu`` (``gpu_*.json``) and ``--suite gpu-long``
(``gpu-long_*.json``), without the orders of the rounds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generated import NOTHING, table

PAGE = Path("docs/performance.md")
RECORDS = Path("results/benchmarks")
LENGTH = 4096
DTYPES = ("float32", "bfloat16")


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's regions, and no figures."""
    folder = root / RECORDS
    return {
        "gpu": _all_lines(folder, "gpu_*.json", record_lines),
        "gpu-long": _all_lines(folder, "gpu-long_*.json", long_lines),
    }, {}


def _all_lines(folder: Path, names: str, make: Callable[[dict[str, Any]], list[str]]) -> list[str]:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(names))]
    return [line for record in records for line in make(record)] or NOTHING


def record_lines(record: dict[str, Any]) -> list[str]:
    """Training steps at ``LENGTH`` tokens, then RPC beside symmetric attention in time and peak memory."""
    heading = f"{_where(record)} A training step at N {LENGTH}:"
    steps = [
        row
        for is_causal in (False, True)
        for row in step_rows([cell for cell in record["cells"] if _is(cell, is_causal)], is_causal)
    ]
    head = ["layer", *(f"{dtype}, {what}" for dtype in DTYPES for what in ("ms", "SDPA / time", "peak, MB"))]
    ratios = ["RPC", "dtype", "N", "forward", "step", "peak of a step"]
    said = "RPC-Attention of n steps: time over n times that of `symmetric`, and peak memory over its own:"
    return ["", heading, "", *table(head, steps), "", said, "", *table(ratios, ratio_rows(record)), ""]


def long_lines(record: dict[str, Any]) -> list[str]:
    """Training steps over the length: time, memory, and at the greatest length the ratio to SDPA's time."""
    cells = record["cells"]
    setting = cells[0]["setting"]
    lengths = [f"{cell['setting']['length']:,}" for cell in cells]
    head = ["layer", *(f"N {length}, {what}" for length in lengths for what in ("ms", "peak, MB"))]
    rows = []
    for name in _measured(cells[0]):
        entries = [_measured(cell)[name] for cell in cells]
        times = [f"{entry['time']['step']['median'] * 1e3:.3g}" for entry in entries]
        cut = [figure for entry, time in zip(entries, times, strict=True) for figure in (time, _peak(entry))]
        rows.append([name, *cut, f"{1 / entries[-1]['time']['step']['ratio_median']:.3g}"])
    heading = f"{_where(record)} Training steps in {setting['dtype']}:"
    return ["", heading, "", *table([*head, f"SDPA / time, N {lengths[-1]}"], rows), ""]


def _where(record: dict[str, Any]) -> str:
    machine, setting = record["machine"], record["cells"][0]["setting"]
    return (
        f"{machine['gpu']}, torch {machine['torch']}, {machine['date'][:10]}: d {setting['embed_dim']}, "
        f"{setting['num_heads']} heads, batch {setting['batch_size']}."
    )


def _is(cell: dict[str, Any], is_causal: bool) -> bool:
    return cell["setting"]["is_causal"] == is_causal and cell["setting"]["length"] == LENGTH


def step_rows(cells: list[dict[str, Any]], is_causal: bool) -> list[list[str]]:
    """A row for each contender; a dtype that was not measured leaves its columns empty."""
    by_dtype = {cell["setting"]["dtype"]: _measured(cell) for cell in cells}
    names = list(dict.fromkeys(name for rows in by_dtype.values() for name in rows))
    found = []
    for name in names:
        row = [f"{name}, causal" if is_causal else name]
        for dtype in DTYPES:
            entry = by_dtype.get(dtype, {}).get(name)
            if entry is None:
                row += ["", "", ""]
                continue
            step = entry["time"]["step"]
            row += [f"{step['median'] * 1e3:.3g}", f"{1 / step['ratio_median']:.2f}", _peak(entry)]
        found.append(row)
    return found


def ratio_rows(record: dict[str, Any]) -> list[list[str]]:
    """A row for each of RPC's forms and sizes."""
    found = []
    for cell in record["cells"]:
        rows = _measured(cell)
        theirs = rows.get("symmetric")
        for name, own in rows.items():
            if theirs is None or not name.startswith("rpc"):
                continue
            ratios = [_time_ratio(name, own, theirs, kind) for kind in ("forward", "step")]
            peak = own["memory"]["step"] / theirs["memory"]["step"]
            setting = cell["setting"]
            sizes = [setting["dtype"], str(setting["length"])]
            found.append([name, *sizes, *(f"{ratio:.2f}" for ratio in ratios), f"{peak:.2f}"])
    return found


def _time_ratio(name: str, own: dict[str, Any], theirs: dict[str, Any], kind: str) -> float:
    """The median over the rounds of the time over n times the other's."""
    steps = int(name.split("iterations ")[1].split(",")[0].rstrip(")"))
    rounds = zip(own["time"][kind]["seconds"], theirs["time"][kind]["seconds"], strict=True)
    return statistics.median(mine / other for mine, other in rounds) / steps


def _measured(cell: dict[str, Any]) -> dict[str, Any]:
    return {row["contender"]: row for row in cell["rows"] if "time" in row}


def _peak(entry: dict[str, Any]) -> str:
    return f"{entry['memory']['step'] / 1e6:.3g}" if entry.get("memory", {}).get("step") else ""
