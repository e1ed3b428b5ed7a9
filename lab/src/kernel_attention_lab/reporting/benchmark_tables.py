"""The records of ``kernel_attention_lab.benchmarking``: tables on the screen, files in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import writing
from kernel_attention_lab.reporting.tables import text_table

if TYPE_CHECKING:
    from rich.table import Table

_SIZES = {
    "length": "N", "embed_dim": "d", "num_heads": "heads", "batch_size": "batch", "dtype": "dtype",
    "threads": "threads", "device": "device", "is_causal": "causal",
}  # fmt: skip
CASES = {"vit": "images", "series": "series", "tokens": "sequences", "language": "tokens"}
"""The units of the speed of a whole model, by ``Setting.body``."""

_PASSES = {"forward": "forward (inference)", "step": "training step"}
_REVISION_HEAD = ["contender", "sizes", "pass", "then, ms", "now, ms", "now / then", "quartiles", "verdict"]
_OF_A_REVISION = ("embed_dim", "num_heads", "batch_size", "threads")


def benchmark_tables(record: Mapping[str, Any]) -> list[Table]:
    """A table for the times, and one for the roofline where there is one."""
    return [
        text_table(title, head, rows, right=range(1, len(head)), whole_first=True)
        for title, head, rows in _all(record)
    ]


def benchmark_markdown(record: Mapping[str, Any]) -> str:
    """The same tables as Markdown for a page of results, with the machine below."""
    parts = [f"**{title}**\n\n{_markdown(head, rows)}" for title, head, rows in _all(record)]
    parts += [f"{entry['contender']}: absent ({entry['reason']})" for entry in record["absent"]]
    parts.append(machine_line(record["machine"]))
    return "\n\n".join(parts) + "\n"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line, with how busy it was."""
    loads = [" ".join(map(str, machine[key])) for key in ("load_before", "load_after")]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores{gpu}; torch {machine['torch']}, "
        f"{machine['date']}; load before {loads[0] or 'unknown'}, after {loads[1] or 'unknown'}"
    )


def _all(record: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    plan, cells = record["plan"], record["cells"]
    common, varying = _sizes(cells)
    title = " · ".join(part for part in (plan["title"], common) if part)
    for kind in plan["passes"]:
        yield f"{title} · {_PASSES[kind]}", *_times(plan, cells, varying, kind)
    if any("roofline" in cell for cell in cells):
        yield "Roofline", *_roofline(cells, varying)
        yield "Ceilings", *_ceilings(cells, varying)


def _sizes(cells: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The sizes that all cells share, as a text, and the names of the others."""
    values = {name: {cell["setting"][name] for cell in cells} for name in _SIZES}
    varying = [name for name in _SIZES if len(values[name]) > 1 or name == "length"]
    shared = [
        f"{_SIZES[name]} {next(iter(values[name]))}"
        for name in _SIZES
        if name not in varying
        if name != "is_causal"
    ]
    causal = ["causal"] if values["is_causal"] == {True} else []
    return ", ".join([*shared, *causal]), varying


def _times(
    plan: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], varying: list[str], kind: str
) -> tuple[list[str], list[list[str]]]:
    rows_of_all = [row for cell in cells for row in cell["rows"]]
    has = {key: any(key in row for row in rows_of_all) for key in ("memory", "operations")}
    over = plan["baseline"] if any(_has_baseline(cell, plan["baseline"]) for cell in cells) else ""
    named = {CASES.get(cell["setting"].get("body"), "") for cell in cells}
    case = named.pop() if len(named) == 1 else ""
    head = ["contender", *(_SIZES[name] for name in varying), "ms", "quartiles"]
    head += [f"{case}/s" if case else "µs per token"]
    head += [f"time / {over}", f"{over} / time"] if over else []
    head += ["peak, MB"] if has["memory"] else []
    head += ["GFLOP"] if has["operations"] else []
    head += ["parameters, M"] if case else []
    rows = []
    for cell in cells:
        for row in cell["rows"]:
            texts = [row["contender"], *(str(cell["setting"][name]) for name in varying)]
            if "failed" in row:
                rows.append([*texts, f"failed: {row['failed']}", *[""] * (len(head) - len(texts) - 1)])
                continue
            texts += _time_cells(row["time"][kind], cell["setting"], bool(case), bool(over))
            texts += [_scaled(row.get("memory", {}).get(kind), 1e6)] if has["memory"] else []
            texts += [_scaled(row.get("operations", {}).get(kind), 1e9)] if has["operations"] else []
            texts += [_scaled(row.get("parameters"), 1e6)] if case else []
            rows.append(texts)
    return head, rows


def _has_baseline(cell: Mapping[str, Any], baseline: str) -> bool:
    return any(row["contender"] == baseline and "time" in row for row in cell["rows"])


def _time_cells(
    figures: Mapping[str, float], setting: Mapping[str, Any], in_cases: bool, with_ratio: bool
) -> list[str]:
    quartiles = f"{number(1e3 * figures['lower'])}–{number(1e3 * figures['upper'])}"
    median = figures["median"]
    tokens = setting["batch_size"] * setting["length"]
    speed = number_of_cases(setting) / median if in_cases else 1e6 * median / tokens
    texts = [number(1e3 * median), quartiles, number(speed)]
    if with_ratio:
        ratio = figures.get("ratio_median")
        texts += ["–", "–"] if ratio is None else [number(ratio), number(1 / ratio)]
    return texts


def number_of_cases(setting: Mapping[str, Any]) -> int:
    """How many of ``CASES`` a whole model reads in a pass."""
    per_batch = setting["length"] if CASES[setting["body"]] == "tokens" else 1
    return setting["batch_size"] * per_batch


def _roofline(cells: Sequence[Mapping[str, Any]], varying: list[str]) -> tuple[list[str], list[list[str]]]:
    head = [
        "contender", *(_SIZES[name] for name in varying), "pass", "GFLOP", "MB", "arithmetic allows, ms",
        "copying allows, ms", "measured, ms", "share reached", "share of copying",
    ]  # fmt: skip
    rows = []
    for cell in cells:
        for line in cell.get("roofline", ()):
            scaled = [line["operations"] / 1e9, line["bytes"] / 1e6]
            scaled += [1e3 * line[f"seconds_{key}"] for key in ("arithmetic", "memory", "measured")]
            sizes = [str(cell["setting"][name]) for name in varying]
            shares = [f"{100 * line[key]:.0f} %" for key in ("share", "copy_share")]
            rows.append([line["contender"], *sizes, line["pass"], *map(number, scaled), *shares])
    return head, rows


def _ceilings(cells: Sequence[Mapping[str, Any]], varying: list[str]) -> tuple[list[str], list[list[str]]]:
    head = ["ceiling", *(_SIZES[name] for name in varying), "per second"]
    names = {
        "large_product": ("product of large squares", "GFLOP"),
        "slice_product": ("product of the layer's slices", "GFLOP"),
        "copy": ("copy, bytes read and written", "GB"),
    }
    rows = [
        [text, *(str(cell["setting"][name]) for name in varying), f"{cell['ceilings'][key] / 1e9:.1f} {unit}"]
        for cell in cells
        for key, (text, unit) in names.items()
    ]
    return head, rows


def _scaled(value: Any, unit: float) -> str:
    return "–" if value is None else number(value / unit)


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value == 0:
        return "0"
    digits = 2 - len(str(int(abs(value)))) + 1 if abs(value) >= 1 else 3
    return f"{value:.{max(digits, 0)}f}"


def write_benchmark(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``benchmark.json``, ``tables.md`` and pictures. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    from kernel_attention_lab.reporting.benchmark_plots import (
        benchmark_plot,
        is_paper_record,
        paper_ratio_plot,
    )

    with writing(f"output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "benchmark.json", folder / "tables.md"]
        # A run writes these again after every setting, and a kill must not destroy the earlier results.
        texts = (json.dumps(record, indent=1, allow_nan=False) + "\n", benchmark_markdown(record))
        for path, text in zip(files, texts, strict=True):
            write_text_atomically(path, text)
        plots = {"benchmark.svg": benchmark_plot}
        if is_paper_record(record):
            plots["primal-dual-figures.svg"] = paper_ratio_plot
        for name, plot in plots.items():
            plot(record).savefig(folder / name, metadata={"Date": None})
            files.append(folder / name)
    return files


def write_revisions(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``against.json`` and ``against.md``. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    table = _markdown(_REVISION_HEAD, _rows(record))
    page = "\n\n".join([table, *verdict_lines(record), machine_line(record["machine"])])
    files = {"against.json": json.dumps(record, indent=1, allow_nan=False), "against.md": page}
    with writing(f"output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text_atomically(folder / name, text + "\n")
    return [folder / name for name in files]


def revision_table(record: Mapping[str, Any]) -> Table:
    """A row for every contender, size and pass."""
    title = f"Now against {record['reference']} ({record['commit'][:10]}), {record['rounds']} rounds"
    return text_table(title, _REVISION_HEAD, _rows(record), right=range(3, 7))


def verdict_lines(record: Mapping[str, Any]) -> list[str]:
    """The slower and the faster contenders in a line each, and the contenders that one revision lacks."""
    change = 100 * (record["least_change"] - 1)
    lines = []
    for verdict in ("slower", "faster"):
        named = [
            f"{row['contender']}, {row['pass']}, {_setting_text(row['setting'])}: {row['ratio']:.3f}"
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
            row["contender"], _setting_text(row["setting"]), row["pass"], f"{1e3 * row['old']:.3g}",
            f"{1e3 * row['new']:.3g}", f"{row['ratio']:.3f}",
            f"{row['ratio_lower']:.3f}–{row['ratio_upper']:.3f}", row["verdict"],
        ]
        for row in record["rows"]
    ]  # fmt: skip


def _setting_text(setting: Mapping[str, Any]) -> str:
    """The sizes in short, N first."""
    named = [f"{_SIZES[name]} {setting[name]}" for name in _OF_A_REVISION if name in setting]
    usual = {"dtype": "float32", "device": "cpu"}
    rest = [setting[name] for name, value in usual.items() if setting.get(name, value) != value]
    causal = ["causal"] if setting.get("is_causal") else []
    return ", ".join([f"N {setting['length']}", *named, *rest, *causal])
