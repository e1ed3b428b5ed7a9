"""Records of ``kernel-attention bench``: tables on the screen, files in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.evidence.expressions import Observation
from kernel_attention_lab.evidence.plots import draw_figure
from kernel_attention_lab.evidence.tables import markdown, text_cells
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
_TIME = """\
{% if failed %}failed: {{ failed }}{% else %}{{ (1e3 * figures.median) | show("three") }}{% endif %}"""
_QUARTILES = """{{ (1e3 * figures.lower) | show("three") }}–{{ (1e3 * figures.upper) | show("three") }}"""
_ROOFLINE = {
    "pass": "{{ this.pass }}",
    "GFLOP": "{{ (this.operations / 1e9) | show('three') }}",
    "MB": "{{ (this.bytes / 1e6) | show('three') }}",
    "arithmetic allows, ms": "{{ (1e3 * this.seconds_arithmetic) | show('three') }}",
    "copying allows, ms": "{{ (1e3 * this.seconds_memory) | show('three') }}",
    "measured, ms": "{{ (1e3 * this.seconds_measured) | show('three') }}",
    "share reached": "{{ this.share | show('.0p') }} %",
    "share of copying": "{{ this.copy_share | show('.0p') }} %",
}
_CEILINGS = {
    "large_product": ("product of large squares", "GFLOP"),
    "slice_product": ("product of the layer's slices", "GFLOP"),
    "copy": ("copy, bytes read and written", "GB"),
}
_REVISIONS = {
    "contender": "{{ contender }}",
    "sizes": "{{ sizes }}",
    "pass": "{{ this.pass }}",
    "then, ms": "{{ (1e3 * old) | show('.3g') }}",
    "now, ms": "{{ (1e3 * new) | show('.3g') }}",
    "now / then": "{{ ratio | show('.3f') }}",
    "quartiles": "{{ ratio_lower | show('.3f') }}–{{ ratio_upper | show('.3f') }}",
    "verdict": "{{ verdict }}",
}
_OF_A_REVISION = ("embed_dim", "num_heads", "batch_size", "threads")

# The ratios in the figures of the primal-dual paper: (figure, numerator, denominator).
_SPARSE = "kernel {'sparse': {'stride': 64}}, factors [1, 2]"
_PAPER = (
    ("figure 1: BN+SH over softmax", "eager batch_norm_scaled_heads", "eager"),
    ("figure 2: SH over softmax", "eager scaled_heads", "eager"),
    ("figure 3: BN+SH over sparse", f"batch_norm_scaled_heads ({_SPARSE})", "sparse (stride 64)"),
    ("figure 4: SH over sparse", f"scaled_heads ({_SPARSE})", "sparse (stride 64)"),
)
_PAPER_QUANTITIES = {
    "operations": ("operations", "step"),
    "memory, training": ("memory", "step"),
    "memory, inference": ("memory", "forward"),
}
_OVER_N = {
    "line": "line", "label": "{{ line }}", "x": "length", "y": "value", "panel": "panel", "free": True,
    "marked": True, "axes": {"xlabel": "N"},
}  # fmt: skip

Cells = tuple[list[str], list[list[str]]]


def benchmark_tables(record: Mapping[str, Any]) -> list[Table]:
    """A table for the times, and one for the roofline where there is one."""
    return [
        text_table(title, head, rows, right=range(1, len(head)), whole_first=True)
        for title, (head, rows) in _tables(record)
    ]


def benchmark_markdown(record: Mapping[str, Any]) -> str:
    """The same tables as Markdown for a page of results, with the machine below."""
    parts = ["\n".join([f"**{title}**", "", *markdown(*cells)]) for title, cells in _tables(record)]
    parts += [f"{entry['contender']}: absent ({entry['reason']})" for entry in record["absent"]]
    parts.append(machine_line(record["machine"]))
    return "\n\n".join(parts) + "\n"


def machine_line(machine: Mapping[str, Any]) -> str:
    """The machine in one line, with how busy it was."""
    loads = [" ".join(map(str, machine[key])) for key in ("load_before", "load_after")]
    gpu = f", {machine['gpu']}" if "gpu" in machine else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores{gpu}; torch {machine['torch']}, "
        f"{machine['date']}; load before {loads[0] or 'unknown'}, after {loads[1] or 'unknown'}"
    )


def number_of_cases(setting: Mapping[str, Any]) -> int:
    """How many of ``CASES`` a whole model reads in a pass."""
    per_batch = setting["length"] if CASES[setting["body"]] == "tokens" else 1
    return int(setting["batch_size"] * per_batch)


def _tables(record: Mapping[str, Any]) -> Iterator[tuple[str, Cells]]:
    plan, cells = record["plan"], record["cells"]
    common, varying = _sizes(cells)
    sizes = {_SIZES[name]: f"{{{{ setting.{name} }}}}" for name in varying}
    title = " · ".join(part for part in (plan["title"], common) if part)
    units = {CASES.get(cell["setting"].get("body"), "") for cell in cells}
    unit = units.pop() if len(units) == 1 else ""
    over = plan["baseline"]
    for kind in plan["passes"]:
        columns = {
            "contender": "{{ contender }}",
            **sizes,
            "ms": _TIME,
            "quartiles": _QUARTILES,
            (f"{unit}/s" if unit else "µs per token"): "{{ speed | show('three') }}",
            f"time / {over}": "{{ figures.ratio_median | show('three') }}",
            f"{over} / time": "{{ (1 / figures.ratio_median) | show('three') }}",
            "peak, MB": f"{{{{ (memory.{kind} / 1e6) | show('three') }}}}",
            "GFLOP": f"{{{{ (operations.{kind} / 1e9) | show('three') }}}}",
            **({"parameters, M": "{{ (parameters / 1e6) | show('three') }}"} if unit else {}),
        }
        yield f"{title} · {_PASSES[kind]}", text_cells(columns, _times(cells, kind, bool(unit)))
    if any("roofline" in cell for cell in cells):
        lines = [
            {"setting": cell["setting"], "contender": line["contender"], "this": line}
            for cell in cells
            for line in cell.get("roofline", ())
        ]
        yield "Roofline", text_cells({"contender": "{{ contender }}", **sizes, **_ROOFLINE}, lines)
        ceilings = [
            {"setting": cell["setting"], "text": text, "rate": f"{cell['ceilings'][key] / 1e9:.1f} {scale}"}
            for cell in cells
            for key, (text, scale) in _CEILINGS.items()
        ]
        columns = {"ceiling": "{{ text }}", **sizes, "per second": "{{ rate }}"}
        yield "Ceilings", text_cells(columns, ceilings)


def _sizes(cells: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """The sizes that all cells share, as a text, and the names of the others."""
    values = {name: {cell["setting"][name] for cell in cells} for name in _SIZES}
    varying = [name for name in _SIZES if len(values[name]) > 1 or name == "length"]
    shared = [
        f"{_SIZES[name]} {next(iter(values[name]))}"
        for name in _SIZES
        if name not in varying and name != "is_causal"
    ]
    causal = ["causal"] if values["is_causal"] == {True} else []
    return ", ".join([*shared, *causal]), varying


def _times(cells: Sequence[Mapping[str, Any]], kind: str, in_cases: bool) -> Iterator[Observation]:
    """The contenders with their ``figures`` of a pass, and their speed: cases a second, or µs per token."""
    for cell in cells:
        setting = cell["setting"]
        for row in cell["rows"]:
            found = row | {"setting": setting}
            if "time" in row:
                found["figures"] = figures = row["time"][kind]
                tokens = setting["batch_size"] * setting["length"]
                found["speed"] = (
                    number_of_cases(setting) / figures["median"]
                    if in_cases
                    else 1e6 * figures["median"] / tokens
                )
            yield found


# --- pictures -----------------------------------------------------------------------------------------------


def benchmark_plot(record: Mapping[str, Any]) -> str | None:
    """Time per token and peak memory over N as SVG, one line per contender and setting."""
    cells = record["cells"]
    varying = [name for name in _sizes(cells)[1] if name != "length"]
    observations = []
    for kind in record["plan"]["passes"]:
        for setting, row in ((cell["setting"], row) for cell in cells for row in cell["rows"]):
            line = ", ".join([row["contender"], *(f"{name} {setting[name]}" for name in varying)])
            here = {"line": line, "length": setting["length"]}
            if "time" in row:
                microseconds = 1e6 * row["time"][kind]["median"] / (setting["length"] * setting["batch_size"])
                observations.append(here | {"panel": f"{kind}: µs per token", "value": microseconds})
            if (peak := row.get("memory", {}).get(kind)) is not None:
                observations.append(here | {"panel": f"{kind}: peak, MB", "value": peak / 1e6})
    return draw_figure({**_OVER_N, "log": "xy"}, observations)


def paper_ratio_plot(record: Mapping[str, Any]) -> str | None:
    """Figures 1 to 4 of the primal-dual paper as SVG: ratios over N of operations and memory, by width."""
    observations = [
        {"panel": f"{title}\n{quantity}", "line": f"d {embed_dim}", "length": length, "value": ratio}
        for title, over, under in _PAPER
        for quantity, (what, kind) in _PAPER_QUANTITIES.items()
        for embed_dim, length, ratio in paper_ratios(record, over, under, what, kind)
    ]
    return draw_figure({**_OVER_N, "log": "x"}, observations)


def paper_ratios(
    record: Mapping[str, Any], over: str, under: str, what: str, kind: str
) -> Iterator[tuple[int, int, float]]:
    """Width, length and ratio between the figures of two contenders."""
    for cell in record["cells"]:
        values = {row["contender"]: row.get(what, {}).get(kind) for row in cell["rows"]}
        if values.get(over) is not None and values.get(under):
            yield cell["setting"]["embed_dim"], cell["setting"]["length"], values[over] / values[under]


def is_paper_record(record: Mapping[str, Any]) -> bool:
    """Return whether the contenders of figures 1 to 4 are in a record."""
    return all({over, under} <= set(record["plan"]["contenders"]) for _, over, under in _PAPER)


# --- files --------------------------------------------------------------------------------------------------


def write_benchmark(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``benchmark.json``, ``tables.md`` and pictures. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    texts = {"benchmark.json": _json(record), "tables.md": benchmark_markdown(record)}
    texts["benchmark.svg"] = benchmark_plot(record) or ""
    if is_paper_record(record):
        texts["primal-dual-figures.svg"] = paper_ratio_plot(record) or ""
    return _write(folder, texts)


def write_revisions(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``against.json`` and ``against.md``. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    table = "\n".join(markdown(*_revision_cells(record)))
    page = "\n\n".join([table, *verdict_lines(record), machine_line(record["machine"])])
    return _write(folder, {"against.json": _json(record), "against.md": page + "\n"})


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def _write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write the files, as a run does after every setting: a kill must not destroy the earlier results."""
    with writing(f"output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text_atomically(folder / name, text)
    return [folder / name for name in texts]


def revision_table(record: Mapping[str, Any]) -> Table:
    """A row for every contender, size and pass."""
    title = f"Now against {record['reference']} ({record['commit'][:10]}), {record['rounds']} rounds"
    return text_table(title, *_revision_cells(record), right=range(3, 7))


def _revision_cells(record: Mapping[str, Any]) -> Cells:
    rows = [row | {"this": row, "sizes": _setting_text(row["setting"])} for row in record["rows"]]
    return text_cells(_REVISIONS, rows)


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


def _setting_text(setting: Mapping[str, Any]) -> str:
    """The sizes in short, N first."""
    named = [f"{_SIZES[name]} {setting[name]}" for name in _OF_A_REVISION if name in setting]
    usual = {"dtype": "float32", "device": "cpu"}
    rest = [setting[name] for name, value in usual.items() if setting.get(name, value) != value]
    causal = ["causal"] if setting.get("is_causal") else []
    return ", ".join([f"N {setting['length']}", *named, *rest, *causal])
