"""The tables of docs/performance.md that were measured on a CPU, from the records of ``make performance``.

A region whose record is not there keeps its lines.
"""

from __future__ import annotations

import io
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from generated import ROOT, table

from kernel_attention_lab.reporting.benchmark_tables import CASES, number, number_of_cases

PAGE = Path("docs/performance.md")
RECORDS = Path("results/benchmarks")
POSTER = Path("results/reported/lra_encoder.json")
FIGURE = Path("docs/figures/time-against-length.svg")
DRAWN = {
    "sdpa": "softmax (PyTorch's)",
    "primal (rank 30, eta 0.1)": "primal with objective",
    "multilinear (eta 0.1)": "multilinear with objective",
}
_PARTS = ("step", "adamw", "radam")
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions whose records are there, and the README's picture."""
    records = {name: read(root, name) for name in REGIONS}
    regions = {name: ["", *REGIONS[name](record), ""] for name, record in records.items() if record}
    drawn = records["multilinear"]
    return regions, {FIGURE: picture(drawn)} if drawn else {}


def read(root: Path, name: str) -> dict[str, Any] | None:
    """A record by its name, or None."""
    path = root / RECORDS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def said_of(machine: dict[str, Any]) -> str:
    """Processor, software, date, code and how busy the machine was."""
    busy = [str(machine[key][0]) for key in ("load_before", "load_after") if machine.get(key)]
    load = f", load {' before and '.join(busy)} after" if busy else ""
    code = f", revision {machine['revision'][:7]}" if machine.get("revision") else ""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['instructions']}, torch "
        f"{machine['torch']}, {machine['date'][:10]}{code}{load}"
    )


def heading(record: dict[str, Any]) -> list[str]:
    """The machine, the threads and the number of rounds."""
    rounds: dict[int, list[str]] = {}
    for cell in record["cells"]:
        lengths = rounds.setdefault(cell["rounds"], [])
        lengths += [] if str(cell["setting"]["length"]) in lengths else [str(cell["setting"]["length"])]
    if len(rounds) == 1:
        counted = f"{next(iter(rounds))} rounds"
    else:
        counted = ", ".join(f"{count} rounds at N {' and '.join(at)}" for count, at in rounds.items())
    threads = " and ".join(str(n) for n in sorted({cell["setting"]["threads"] for cell in record["cells"]}))
    absent = ", ".join(entry["contender"] for entry in record.get("absent", ()))
    missing = f" Not installed there: {absent}." if absent else ""
    return [f"{said_of(record['machine'])}; threads {threads}; {counted}.{missing}", ""]


def measured(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a cell that have times, by contender."""
    return {row["contender"]: row for row in cell["rows"] if "time" in row}


def step_lines(record: dict[str, Any]) -> list[str]:
    """A row for each contender and length: both passes, the step over the baseline's, and its peak."""
    base = record["plan"]["baseline"]
    rows = []
    for cell in record["cells"]:
        for name, row in measured(cell).items():
            forward, step = row["time"]["forward"], row["time"]["step"]
            quartiles = f"{number(1e3 * step['lower'])}–{number(1e3 * step['upper'])}"
            ratio, peak = step["ratio_median"], row["memory"]["step"] / 1e6
            times = [number(1e3 * forward["median"]), number(1e3 * step["median"]), quartiles]
            rows.append(
                [
                    name,
                    str(cell["setting"]["length"]),
                    *times,
                    f"{ratio:.3f}",
                    number(1 / ratio),
                    number(peak),
                ]
            )
    head = ["contender", "N", "forward, ms", "step, ms", "quartiles", f"step / {base}", f"{base} / step",
            "step's peak, MB"]  # fmt: skip
    return [*heading(record), *table(head, rows)]


def by_size(record: dict[str, Any], titles: Sequence[str], cells_of: Callable[..., list[str]]) -> list[str]:
    """A row for each contender, with the columns of every pass at every length.

    Each number of heads has a table of its own.
    """
    heads = dict.fromkeys(cell["setting"]["num_heads"] for cell in record["cells"])
    lines = heading(record)
    for num_heads in heads:
        cells = [cell for cell in record["cells"] if cell["setting"]["num_heads"] == num_heads]
        lengths = [cell["setting"]["length"] for cell in cells]
        found = [measured(cell) for cell in cells]
        names = dict.fromkeys(name for rows in found for name in rows)
        rows = [[name, *cells_of([each.get(name) for each in found], lengths)] for name in names]
        head = ["layer", *(f"{title}, N {length}" for title in titles for length in lengths)]
        said = [f"{num_heads} heads:", ""] if len(heads) > 1 else []
        lines += [*said, *table(head, rows), ""]
    return lines[:-1]


def ratios(rows: Sequence[dict[str, Any] | None], _: Sequence[int]) -> list[str]:
    """Forward passes at every length and then training steps, over the baseline's."""
    return [
        f"{row['time'][kind]['ratio_median']:.2f}" if row else ""
        for kind in ("forward", "step")
        for row in rows
    ]


def ratios_with_quartiles(rows: Sequence[dict[str, Any] | None], _: Sequence[int]) -> list[str]:
    """The same with quartiles."""
    return [spread(row["time"][kind]) if row else "" for kind in ("forward", "step") for row in rows]


def per_token(rows: Sequence[dict[str, Any] | None], lengths: Sequence[int]) -> list[str]:
    """Microseconds of a training step per token, batch 1."""
    return [
        number(1e6 * row["time"]["step"]["median"] / length) if row else ""
        for row, length in zip(rows, lengths, strict=True)
    ]


def model_lines(
    record: dict[str, Any], further: Sequence[tuple[str, Mapping[str, Mapping[str, str]]]] = ()
) -> list[str]:
    """Whole models: a row for each contender and length, with what it reads in a second.

    ``further`` are columns after these: a title, and a text for contenders and lengths.
    """
    base = record["plan"]["baseline"]
    case = CASES[record["cells"][0]["setting"]["body"]]
    head = ["attention", "N", f"{case}/s, inference", f"{case}/s, training", f"step / {base}"]
    head += ["GFLOP per case"] if _has(record, "operations") else []
    head += ["million parameters"]
    head += ["peak of inference, MB", "of a step, MB"] if _has(record, "memory") else []
    rows = []
    for cell in record["cells"]:
        cases, length = number_of_cases(cell["setting"]), str(cell["setting"]["length"])
        for name, row in measured(cell).items():
            step = row["time"]["step"]
            speeds = [number(cases / row["time"][kind]["median"]) for kind in ("forward", "step")]
            texts = [name, length, *speeds, spread(step)]
            texts += [number(row["operations"]["forward"] / cases / 1e9)] if "operations" in row else []
            texts += [number(row["parameters"] / 1e6)]
            peaks = row.get("memory", {})
            texts += [number(peaks[kind] / 1e6) for kind in ("forward", "step") if kind in peaks]
            rows.append([*texts, *(found.get(name, {}).get(length, "") for _, found in further)])
    return [*heading(record), *table([*head, *(title for title, _ in further)], rows)]


def lra_lines(record: dict[str, Any]) -> list[str]:
    """The classifiers of Long Range Arena, beside the factors that the Primal-Attention poster reports."""
    reported = json.loads((ROOT / POSTER).read_text(encoding="utf-8"))
    return model_lines(record, [(reported["title"], reported["rows"])])


def ratio_text(ratio: float) -> str:
    """Two digits or more."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def _has(record: dict[str, Any], key: str) -> bool:
    return any(key in row for cell in record["cells"] for row in cell["rows"])


def rpc_lines(record: dict[str, Any]) -> list[str]:
    """RPC over as many symmetric layers as it has iterations, in time, and over one in memory."""
    rows = []
    for cell in record["cells"]:
        found = measured(cell)
        own_peak = found["symmetric"]["memory"]["step"]
        for name, row in found.items():
            times = [number(1e3 * row["time"][kind]["median"]) for kind in ("forward", "step")]
            peak = row["memory"]["step"]
            texts = [
                name,
                str(cell["setting"]["threads"]),
                *times,
                spread(row["time"]["step"], iterations(name)),
            ]
            rows.append([*texts, number(peak / 1e6), f"{peak / own_peak:.2f}"])
    head = ["contender", "threads", "forward, ms", "step, ms", "step / (n × symmetric)", "step's peak, MB",
            "peak / symmetric's"]  # fmt: skip
    return [*heading(record), *table(head, rows)]


def iterations(name: str) -> int:
    """The products of attention in a layer of RPC, by its contender's name; 1 for other layers."""
    return int((re.findall(r"iterations (\d+)", name) or ["1"])[0])


def primal_dual_lines(record: dict[str, Any]) -> list[str]:
    """Pooled heads over the layer that they were made from: operations, peaks and time."""
    rows = []
    for cell in record["cells"]:
        setting, found = cell["setting"], measured(cell)
        for name, row in found.items():
            if "scaled_heads" not in name:
                continue
            over = "sparse (stride 64)" if "'sparse'" in name else "eager"
            base = found[over]
            ratios = [
                f"{row[what][kind] / base[what][kind]:.{digits}f}"
                for what, digits in (("operations", 3), ("memory", 2))
                for kind in ("forward", "step")
            ]
            pairs = zip(row["time"]["step"]["seconds"], base["time"]["step"]["seconds"], strict=True)
            time = statistics.median(own / others for own, others in pairs)
            rows.append([name, over, str(setting["embed_dim"]), *ratios, ratio_text(time)])
    length = record["cells"][0]["setting"]["length"]
    head = ["contender", "over", "d", "operations, inference", "training", "peak, inference", "training",
            "step's time"]  # fmt: skip
    return [*heading(record), f"N {length}, batch 1:", "", *table(head, rows)]


def spread(figures: Mapping[str, float], divisor: float = 1.0) -> str:
    """A ratio's median with its quartiles."""
    median, *bounds = (ratio_text(figures[f"ratio_{key}"] / divisor) for key in ("median", "lower", "upper"))
    return f"{median} ({'–'.join(bounds)})"


def form_lines(record: dict[str, Any]) -> list[str]:
    """A row for each pair of forms of primal attention and each length."""
    settings = record["settings"]
    said = (
        f"{said_of(record['machine'])}; one thread, {settings['rounds']} rounds, and "
        f"{settings['causal_rounds']} of causal layers."
    )
    rows = [[row["form"], row["other"], str(row["length"]), spread(row)] for row in record["rows"]]
    return [said, "", *table(["step of", "over that of", "N", "ratio"], rows)]


def precision_lines(record: dict[str, Any]) -> list[str]:
    """A row for each layer and width: steps in bfloat16, and under autocast to it, over those in float32."""
    settings = record["settings"]
    said = (
        f"{said_of(record['machine'])}; one thread, {settings['rounds']} rounds, N {settings['length']}, "
        f"{settings['num_heads']} heads, batch {settings['batch']}."
    )
    cells: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        cell = cells.setdefault((row["layer"], str(row["embed_dim"])), [number(1e3 * row["other_seconds"])])
        cell.append(spread(row))
    rows = [[*layer, *cell] for layer, cell in cells.items()]
    return [said, "", *table(["layer", "d", "float32, ms", "bfloat16 / float32", "autocast / float32"], rows)]


def compiled_lines(record: dict[str, Any]) -> list[str]:
    """Forms, eager or compiled, over the eager formulas: training steps, then forward passes."""
    settings = record["settings"]
    threads = settings["threads"]
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    forms = {}
    for row in record["rows"]:
        layer = row["layer"], str(row["embed_dim"]), str(row["length"])
        form = f"{row['pass']}, {row['how']} {row['form']}"
        cells.setdefault(layer, {})[form] = spread(row)
        forms[form] = row["pass"]
    head = sorted(forms, key=lambda form: forms[form] != "step")
    said = (
        f"{said_of(record['machine'])}; {threads} thread{'s'[: threads > 1]}, {settings['rounds']} rounds, "
        f"{settings['num_heads']} heads, batch {settings['batch_size']}."
    )
    rows = [[*layer, *(found[form] for form in head)] for layer, found in cells.items()]
    return [said, "", *table(["layer", "d", "N", *head], rows)]


def roofline_lines(record: dict[str, Any]) -> list[str]:
    """The layers whose work is counted against the measured ceilings."""
    rows, ceilings = [], []
    for cell in record["cells"]:
        threads, found = cell["setting"]["threads"], cell["ceilings"]
        ceilings.append(
            f"{threads} {'thread' if threads == 1 else 'threads'}: a product of slices reaches "
            f"{found['slice_product'] / 1e9:.0f} GFLOP/s, a copy {found['copy'] / 1e9:.1f} GB/s"
        )
        for line in cell["roofline"]:
            scaled = [line["operations"] / 1e9, line["bytes"] / 1e6]
            scaled += [1e3 * line[f"seconds_{key}"] for key in ("arithmetic", "memory", "measured")]
            where = [line["contender"], str(threads), line["pass"]]
            rows.append([*where, *map(number, scaled), f"{100 * line['share']:.0f} %"])
    head = ["layer", "threads", "pass", "GFLOP", "MB", "arithmetic allows, ms", "copying allows, ms",
            "measured (first quartile), ms", "share reached"]  # fmt: skip
    return [*heading(record), *table(head, rows), "", f"{'; '.join(ceilings)}."]


def million_lines(record: dict[str, Any]) -> list[str]:
    """One step over a million tokens in a sentence."""
    (cell,) = record["cells"]
    ((name, row),) = measured(cell).items()
    seconds, peak = row["time"]["step"]["median"], row["memory"]["step"] / 1e6
    said = f"A training step of `{name}` over {cell['setting']['length']:,} tokens (batch 1) takes"
    return [
        f"{said} {seconds:.1f} s, with a peak of {peak:.0f} MB above its input. {said_of(record['machine'])}."
    ]


def decoding_lines(record: dict[str, Any]) -> list[str]:
    """Tokens per second and bytes of the state after every context."""
    lengths = record["settings"]["lengths"]
    cells = {(row["attention"], row["length"]): row for row in record["rows"]}
    rows = []
    for name in dict.fromkeys(row["attention"] for row in record["rows"]):
        own = [cells[name, length] for length in lengths]
        speeds = [f"{row['tokens_per_second']:.0f}" for row in own]
        rows.append([name, *speeds, *(size(row["state_bytes"]) for row in own)])
    head = [f"{title}, N {length}" for title in ("tokens/s", "state") for length in lengths]
    setting = record["settings"]
    sizes = f"Width {setting['embed_dim']}, {setting['num_heads']} heads, batch {setting['batch_size']}"
    return [f"{sizes}. {said_of(record['machine'])}.", "", *table(["layer", *head], rows)]


def around_lines(record: dict[str, Any]) -> list[str]:
    """Training steps by the two kinds of masks, and steps of the optimizers by the two kinds of passes."""
    rows = []
    for row in record["rows"]:
        pairs = [
            [number(1e3 * row[f"{part}, {whose}"]) for whose in ("PyTorch's", "ours")] for part in _PARTS
        ]
        rows.append([row["model"], " → ".join(pairs[0]), spread(row), *map(" → ".join, pairs[1:])])
    head = ["model", "step, ms", "ratio", "AdamW, ms", "RAdam, ms"]
    said = f"{said_of(record['machine'])}; one thread, {record['settings']['rounds']} rounds."
    return [said, "", *table(head, rows)]


def size(number_of_bytes: int) -> str:
    """Bytes in their largest unit; nothing for no state."""
    for factor, unit in UNITS:
        if number_of_bytes >= factor:
            return f"{number_of_bytes / factor:.3g} {unit}"
    return ""


def picture(record: dict[str, Any]) -> str:
    """Milliseconds of a training step against the number of tokens, as SVG."""
    from kernel_attention_lab.reporting.figures import legend_below, panel_grid, report_style

    cells = {cell["setting"]["length"]: measured(cell) for cell in record["cells"]}
    buffer = io.StringIO()
    with report_style():
        figure, (axis,) = panel_grid(1, 3.6)
        for (name, label), marker in zip(DRAWN.items(), "os^", strict=True):
            steps = [1e3 * rows[name]["time"]["step"]["median"] for rows in cells.values()]
            axis.plot(list(cells), steps, marker=marker, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(list(cells), [f"{length:,}" for length in cells])
        axis.set(xlabel="tokens in a sequence", ylabel="ms of a training step")
        axis.set_title("One layer: width 64, 2 heads, 4 sequences, two CPU cores", fontsize="medium")
        legend_below(figure, axis)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


REGIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "primal": step_lines,
    "multilinear": step_lines,
    "support-vector": step_lines,
    "primal-dual": primal_dual_lines,
    "rpc": rpc_lines,
    "vision": model_lines,
    "rpc-vision": model_lines,
    "series": model_lines,
    "language": model_lines,
    "lra": lra_lines,
    "timm": partial(by_size, titles=("inference", "training step"), cells_of=ratios_with_quartiles),
    "all": partial(by_size, titles=("forward / sdpa", "step / sdpa"), cells_of=ratios),
    "short": partial(by_size, titles=("forward", "step"), cells_of=ratios),
    "causal": partial(by_size, titles=("µs per token",), cells_of=per_token),
    "roofline": roofline_lines,
    "million": million_lines,
    "around": around_lines,
    "primal-forms": form_lines,
    "precisions": precision_lines,
    "compiled-forms": compiled_lines,
    "compiled-forms-wide": compiled_lines,
    "native-forms": compiled_lines,
    "decoding": decoding_lines,
    "decoding-small": decoding_lines,
}
