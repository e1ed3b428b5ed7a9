"""The tables and the figure of docs/robustness-results.md, from the records in results/vision."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated import table

from kernel_attention_lab.reporting.formats import format_seeds
from kernel_attention_lab.results import (
    Comparison,
    Measurement,
    ResultRecord,
    attack_curves,
    compare_rows,
    corruption_figures,
    corruptions_of,
    read_records,
    relative_corruption_errors,
    require_same_config,
    robustness_columns,
    spread,
    variant_columns,
)

RECORDS = Path("results/vision/cifar10_robustness")
REPORTED = Path("results/reported/kernel_pca_robustness.json")
PAGE = Path("docs/robustness-results.md")
FIGURE = Path("docs/figures/robustness-curves.svg")

# The rows in their order, each with its baseline: symmetric attention for what changes symmetric attention,
# softmax for the rest.
ROWS = {
    "softmax": ("softmax", None),
    "symmetric": ("symmetric", "softmax"),
    "rpc_first_layer": ("rpc, 4 iterations, first layer", "symmetric"),
    "rpc_all_layers": ("rpc, 2 iterations, all layers", "symmetric"),
    "scaled": ("scaled", "softmax"),
    "batch_norm_scaled_heads": ("batch_norm_scaled_heads", "softmax"),
    "primal_last_layer": ("primal, last layer", "softmax"),
}
BASELINES = {label: baseline for label, (_, baseline) in ROWS.items() if baseline}
COLUMNS = {
    "test": "test split", "clean": "clean", "fgsm": "FGSM", "pgd": "PGD-20", "sld": "SLD", "noise": "noise",
    "square": "Square", "spsa": "SPSA", "cw": "CW", "autoattack": "AutoAttack", "corruptions": "corrupted",
    "mce": "mCE / baseline", "aupr": "AUPR",
}  # fmt: skip
ATTACKS = ("fgsm", "pgd", "sld", "noise", "square", "spsa", "cw", "autoattack")
SMALLER_IS_BETTER = ("mce",)
SIGNIFICANT = 0.05
NOTHING = ["", "No run has been recorded yet.", ""]

Table = dict[str, dict[str, dict[int, Measurement]]]

_last: list[Any] = []  # records and their comparisons


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of every region of the page by its mark, and the files of the figures.

    Raises:
        SystemExit: for a record of a row that is not in ``ROWS``.
    """
    records = read_records(root / RECORDS)
    strange = sorted({record.label for record in records} - ROWS.keys())
    if strange:
        raise SystemExit(
            f"{RECORDS}: no row for {', '.join(strange)}; add it to ROWS in {Path(__file__).name}"
        )
    require_same_config(records, apart_from=("attention",))
    for label in ROWS:
        require_same_config([record for record in records if record.label == label])
    reported = json.loads((root / REPORTED).read_text(encoding="utf-8"))
    if not records:
        empty = ("robustness", "comparisons", "masking", "paper-protocol", "corruptions", "curves")
        return {mark: NOTHING for mark in empty} | {"reported": reported_table(reported)}, {}
    measured = measurements(records)
    comparisons = comparisons_of(records)
    regions = {
        "robustness": [*setting(records, measured), *robustness_table(measured, comparisons)],
        "comparisons": comparison_table(comparisons, compared(records, measured)),
        "masking": masking_lines(records),
        "reported": reported_table(reported),
        "paper-protocol": protocol_table(records),
        "corruptions": corruption_table(records),
        "curves": curve_lines(records),
    }
    svg = curves_figure(records)
    return regions, {} if svg is None else {FIGURE: svg}


def measurements(records: Sequence[ResultRecord]) -> Table:
    """By row, column and seed, rows and columns in the order of the table."""
    found = robustness_columns(records)
    for label, cells in relative_corruption_errors(records, BASELINES).items():
        found[label]["mce"] = cells
    return {
        label: {column: found[label][column] for column in COLUMNS if column in found[label]}
        for label in ROWS
        if label in found
    }


def comparisons_of(records: Sequence[ResultRecord]) -> list[Comparison]:
    """Every paired comparison of the page; the last ones are kept, because the README says them too."""
    if not _last or _last[0] != records:
        _last[:] = [records, compare_rows(compared(records, measurements(records)), BASELINES)]
    return _last[1]


def compared(records: Sequence[ResultRecord], measured: Table) -> Table:
    """The figures to compare with those of the baselines: the mean corruption errors against AlexNet."""
    errors = corruption_figures(records)
    return {
        label: row | ({"mce": errors[label]} if label in errors else {}) for label, row in measured.items()
    }


def setting(records: Sequence[ResultRecord], measured: Table) -> list[str]:
    """What was trained, and on how many images each column was measured."""
    seconds = [record.budget["seconds"] for record in records]
    machines = " and ".join(sorted({record.machine for record in records}))
    codes = ", ".join(sorted({f"`{record.revision[:12]}`" for record in records if record.revision}))
    cases: dict[int, list[str]] = {}
    for column, title in COLUMNS.items():
        numbers = {each.cases for row in measured.values() for each in row.get(column, {}).values()} - {0}
        for number in numbers:
            cases.setdefault(number, []).append(title)
    images = "; ".join(f"{number} for {', '.join(titles)}" for number, titles in sorted(cases.items()))
    dates = sorted({record.date[:10] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return [
        "",
        f"{len(records)} models, {min(seconds):.0f} to {max(seconds):.0f} s of training each, {machines}; "
        f"{when}{f'; code {codes}' if codes else ''}. Test images: {images}.",
        "",
    ]


def robustness_table(measured: Table, comparisons: Sequence[Comparison]) -> list[str]:
    """Mean and deviation over the seeds; an arrow where the row differs from its baseline."""
    verdicts = {(each.row, each.column): each for each in comparisons}
    columns = [column for column in COLUMNS if any(column in row for row in measured.values())]
    rows = []
    for label, row in measured.items():
        seeds = sorted({seed for cells in row.values() for seed in cells})
        cells = [
            cell(
                row.get(column, {}),
                len(seeds),
                verdicts.get((label, column)),
                smaller_is_better=column in SMALLER_IS_BETTER,
            )
            for column in columns
        ]
        rows.append([ROWS[label][0], str(len(seeds)), *cells])
    return [*table(["attention", "seeds", *(COLUMNS[column] for column in columns)], rows), ""]


def cell(
    measured: Mapping[int, Measurement],
    seeds: int,
    verdict: Comparison | None = None,
    *,
    smaller_is_better: bool = False,
) -> str:
    """``60.1 ± 0.4`` in per cent; the number of seeds where it is not that of the row."""
    if not measured:
        return ""
    mean, deviation, found = spread(measured)
    text = f"{100 * mean:.1f}" if deviation is None else f"{100 * mean:.1f} ± {100 * deviation:.1f}"
    if len(found) != seeds:
        text += f" ({format_seeds(found)})"
    if verdict is not None and verdict.adjusted <= SIGNIFICANT:
        text += " ↑" if (verdict.interval.difference > 0) != smaller_is_better else " ↓"
    return text


def comparison_table(comparisons: Iterable[Comparison], measured: Table) -> list[str]:
    """Every difference with its interval and its tests; the difference alone where records lack the rest."""
    head = ["attention", "baseline", "column", "seeds", "difference (points)", "95 % interval"]
    head += ["p", "p (Holm)", "McNemar, by seed"]
    tested = {(each.row, each.column): each for each in comparisons}
    rows = []
    for label, column in ((label, column) for label in measured for column in COLUMNS):
        each = tested.get((label, column))
        if each is not None:
            difference, low, high = (signed(100 * value) for value in each.interval)
            tests = [f"{low} to {high}", chance(each.p_value), chance(each.adjusted)]
            tests += [", ".join(chance(value) for value in each.by_seed.values())]
            seeds: Sequence[int] = each.seeds
        else:
            ours = measured[label].get(column, {})
            theirs = measured.get(BASELINES.get(label, ""), {}).get(column, {})
            seeds = sorted(ours.keys() & theirs.keys())
            if not seeds:
                continue
            mean = sum(ours[seed].value - theirs[seed].value for seed in seeds) / len(seeds)
            difference, tests = signed(100 * mean), ["no paired test", "", "", ""]
        names = [ROWS[label][0], ROWS[BASELINES[label]][0], COLUMNS[column]]
        rows.append([*names, ", ".join(map(str, seeds)), difference, *tests])
    return ["", *table(head, rows), ""] if rows else NOTHING


def masking_lines(records: Sequence[ResultRecord]) -> list[str]:
    """Accuracies under the attacks that show a masked gradient, and the warnings of ``attack``."""
    found = variant_columns(records)
    columns = sorted({column for row in found.values() for column in row})
    if not columns:
        return NOTHING
    rows = []
    for label in (label for label in ROWS if label in found):
        seeds = len({seed for cells in found[label].values() for seed in cells})
        cells = [cell(found[label].get(column, {}), seeds) for column in columns]
        rows.append([ROWS[label][0], str(seeds), *cells])
    warnings = [
        f"* {ROWS[record.label][0]}, seed {record.seed}: {warning}."
        for record in records
        for warning in record.figures.get("robustness", {}).get("warnings", [])
    ]
    said = warnings or ["No attack that knows less broke more images than PGD."]
    return ["", *table(["attention", "seeds", *columns], rows), "", *said, ""]


def reported_table(reported: Mapping[str, object]) -> list[str]:
    """The paper's figures in the columns of ours; nothing was measured here."""
    rows = reported["rows"]
    assert isinstance(rows, dict)
    columns = [column for column in COLUMNS if any(column in row for row in rows.values())]
    titles = ["mCE" if column == "mce" else COLUMNS[column] for column in columns]
    lines = table(
        ["model", *titles],
        [
            [row["title"], *(f"{row[column]:.2f}" if column in row else "" for column in columns)]
            for row in rows.values()
        ],
    )
    return ["", f"{reported['source']}. {reported['setting']}.", "", *lines, ""]


def protocol_table(records: Sequence[ResultRecord]) -> list[str]:
    """Accuracies under FGSM and PGD by eps, under protocol ``paper``."""
    curves = {attack: attack_curves(records, "paper", attack) for attack in ("fgsm", "pgd")}
    points = [
        (attack, eps)
        for attack, rows in curves.items()
        for eps in sorted({eps for row in rows.values() for eps in row})
    ]
    if not points:
        return NOTHING
    labels = [label for label in ROWS if any(label in rows for rows in curves.values())]
    lines = []
    for label in labels:
        cells = [curves[attack].get(label, {}).get(eps, {}) for attack, eps in points]
        seeds = len({seed for each in cells for seed in each})
        lines.append([ROWS[label][0], str(seeds), *(cell(each, seeds) for each in cells)])
    titles = [f"{COLUMNS[attack].partition('-')[0]} {255 * eps:.0f}/255" for attack, eps in points]
    return ["", *table(["attention", "seeds", *titles], lines), ""]


def corruption_table(records: Sequence[ResultRecord]) -> list[str]:
    """Mean accuracy over the severities: a line for each corruption, a column for each mechanism."""
    accuracies: dict[str, dict[str, dict[int, Measurement]]] = {}
    for record in records:
        for name, values in (corruptions_of(record) or {"accuracies": {}})["accuracies"].items():
            cells = accuracies.setdefault(name, {}).setdefault(record.label, {})
            cells[record.seed] = Measurement(sum(values) / len(values))
    labels = [label for label in ROWS if any(label in row for row in accuracies.values())]
    if not labels:
        return NOTHING
    seeds = {label: max(len(row.get(label, {})) for row in accuracies.values()) for label in labels}
    lines = [
        [name.replace("_", " "), *(cell(row.get(label, {}), seeds[label]) for label in labels)]
        for name, row in accuracies.items()
    ]
    heads = [f"{ROWS[label][0]} ({seeds[label]})" for label in labels]
    return ["", *table(["corruption", *heads], lines), ""]


def curve_lines(records: Sequence[ResultRecord]) -> list[str]:
    """The figure's line in the page."""
    if not panels(records):
        return NOTHING
    name = FIGURE.relative_to(PAGE.parent)
    return ["", f"![Accuracy against eps, under FGSM and PGD and both protocols]({name})", ""]


def panels(records: Sequence[ResultRecord]) -> dict[str, dict[str, dict[float, dict[int, Measurement]]]]:
    """The curves of every panel by its title; a curve has two points at least."""
    found = {}
    for protocol in ("pixel", "paper"):
        for attack in ("fgsm", "pgd"):
            curves = attack_curves(records, protocol, attack)
            kept = {label: curves[label] for label in ROWS if len(curves.get(label, {})) > 1}
            if kept:
                found[f"{COLUMNS[attack]}, protocol {protocol}"] = kept
    return found


def curves_figure(records: Sequence[ResultRecord]) -> str | None:
    """Means over the seeds against eps as SVG, with their range; None without curves."""
    from kernel_attention_lab.reporting.figures import (
        PALETTE,
        legend_below,
        panel_grid,
        report_style,
        whole_numbers,
    )

    drawn = panels(records)
    if not drawn:
        return None
    colors = dict(zip(ROWS, PALETTE, strict=True))
    buffer = io.StringIO()
    with report_style():
        figure, axes = panel_grid(len(drawn), 2.9)
        for axis, (title, curves) in zip(axes, drawn.items(), strict=True):
            for label, points in curves.items():
                steps = sorted(points)
                each = [[100 * seed.value for seed in points[eps].values()] for eps in steps]
                at, means = [255 * eps for eps in steps], [sum(values) / len(values) for values in each]
                axis.plot(at, means, "o-", markersize=3.5, color=colors[label], label=ROWS[label][0])
                axis.fill_between(
                    at, list(map(min, each)), list(map(max, each)), color=colors[label], alpha=0.15
                )
            axis.xaxis.set_major_locator(whole_numbers())
            axis.set(title=title, xlabel="eps (1/255)", ylabel="accuracy (%)")
        legend_below(figure, max(axes, key=lambda axis: len(axis.get_lines())))
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def signed(points: float) -> str:
    """Percentage points with their sign and one decimal."""
    return f"{points:+.1f}".replace("-", "−")


def chance(p_value: float) -> str:
    """A p value with two digits."""
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.2g}" if p_value < 0.995 else "1"
