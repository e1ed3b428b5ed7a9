"""A declared table: rows and columns of observations, and the statistic in each cell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernel_attention.errors import unknown
from kernel_attention_lab.evidence.expressions import (
    Observation,
    Observations,
    evaluate,
    fill,
    grouped,
    show,
)
from kernel_attention_lab.evidence.statistics import holm, signed_rank_test
from kernel_attention_lab.reporting.formats import format_seeds

NEAR = 0.01  # rows this near to the best are named with it: points of a share, or the share of an error


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown's table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["|" + "|".join(cell if cell == "---" else f" {cell} " for cell in line) + "|" for line in lines]


def draw_table(spec: Mapping[str, Any], observations: Observations) -> list[str]:
    """The lines of a table; of several with captions, where ``split`` has more than one value.

    Keys of ``spec``:
        rows: the expression, or expressions, whose values are the rows.
        columns: see ``_columns``.
        where, only: which observations: an expression, and the values of expressions that are accepted.
        sort, descending: the order of rows.
        filled: ``any``: rows without a value are left out; ``all``: rows that lack one.
        split, caption: the expression whose values have a table each, and the text above each.
        also: further rows, a list of texts each, filled with the first observation.
    """
    if where := spec.get("where"):
        observations = [each for each in observations if evaluate(where, each)]
    for name, known in spec.get("only", {}).items():
        observations = [each for each in observations if str(evaluate(name, each)) in known]
    parts = grouped(observations, spec["split"]) if "split" in spec else {(): list(observations)}
    lines: list[str] = []
    for part in parts.values():
        caption = [fill(spec["caption"], part[0]), ""] if len(parts) > 1 else []
        lines += [*caption, *markdown(*table_cells(spec, part)), ""]
    return lines[:-1]


def text_cells(
    columns: Mapping[str, str], observations: Iterable[Observation]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table with a row for each observation, whose fields fill texts by title.

    Columns without any text are left out.
    """
    spec = [{"title": title, "text": text, "optional": True} for title, text in columns.items()]
    numbered = [each | {"at": at} for at, each in enumerate(observations)]
    return table_cells({"rows": "at", "columns": spec}, numbered)


@dataclass(frozen=True)
class _Column:
    title: str
    spec: Mapping[str, Any]
    chosen: tuple[tuple[str, str], ...] = ()  # of an observation: expression and value

    def of(self, row: Observations) -> list[Observation]:
        return [
            each for each in row if all(str(evaluate(name, each)) == value for name, value in self.chosen)
        ]


def table_cells(
    spec: Mapping[str, Any], observations: list[Observation]
) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of one table; keys of ``spec`` as in ``draw_table``."""
    columns = list(_columns(spec["columns"], observations))
    rows = list(grouped(observations, spec["rows"]).values())
    if sort := spec.get("sort"):
        sign = -1 if spec.get("descending") else 1
        ranks = [math.inf if (value := _number(sort, row)) is None else sign * value for row in rows]
        rows = [rows[at] for at in sorted(range(len(rows)), key=ranks.__getitem__)]  # the unranked last
    drawn = [(column, _cells(column, rows)) for column in columns]
    drawn = [(column, cells) for column, cells in drawn if any(cells) or not column.spec.get("optional")]
    columns = [column for column, _ in drawn]
    lines = [list(line) for line in zip(*(cells for _, cells in drawn), strict=True)]
    if check := {"any": any, "all": all}.get(spec.get("filled", "")):
        places = [at for at, column in enumerate(columns) if column.chosen or "value" in column.spec]
        lines = [line for line in lines if check(line[at] for at in places)]
    if "bold" in spec:
        lines = [_with_bold(line, columns, spec["bold"]) for line in lines]
    lines += [[fill(text, observations[0]) for text in line] for line in spec.get("also", ())]
    return [column.title for column in columns], lines


def _columns(
    specs: Sequence[Mapping[str, Any]],
    observations: Observations,
    chosen: tuple[tuple[str, str], ...] = (),
) -> Iterable[_Column]:
    """The columns of a table.

    A column has a ``title`` and either a ``text`` that the row's first observation fills, or a ``value``, an
    expression for each observation, and a statistic over them (``as``, with the format after its name).
    ``each`` repeats a column, or the ``columns`` below it, for every value of an expression, in the order
    ``by``; ``of`` names the values with their titles (``it``). ``before`` and ``after`` stand around a value,
    and ``if_empty`` where there is none. An ``optional`` column without any value is left out.
    """
    for spec in specs:
        if "each" not in spec:
            yield _Column(fill(spec["title"], {**dict(*observations[:1]), "all": observations}), spec, chosen)
            continue
        found = {
            key: members for (key,), members in grouped(observations, spec["each"]).items() if key != "None"
        }
        if by := spec.get("by"):
            found = dict(sorted(found.items(), key=lambda pair: evaluate(by, pair[1][0])))
        named = spec.get("of") or dict(zip(found, found, strict=True))
        for key, title in named.items():
            if key not in found and "if_empty" not in spec:
                continue
            members = [dict(each, it=title) for each in found.get(key, [])] or [{"it": title}]
            inner = spec.get("columns") or [{"title": "{{ it }}", **spec, "each": None}]
            inner = [{name: value for name, value in each.items() if value is not None} for each in inner]
            yield from _columns(inner, members, (*chosen, (spec["each"], key)))


def _cells(column: _Column, rows: Sequence[Observations]) -> list[str]:
    """The column's cell of every row."""
    spec = column.spec
    if spec.get("as", "").startswith("test"):
        return _tests(spec, rows)
    return [_cell(spec, column.of(row), row) or fill(spec.get("if_empty", ""), row[0]) for row in rows]


def _cell(spec: Mapping[str, Any], chosen: list[Observation], row: Observations) -> str:
    if not chosen:
        return ""
    if "text" in spec:
        return fill(spec["text"], {**chosen[0], "all": chosen, "the_row": row})
    name, _, form = spec.get("as", "first").partition(" ")
    if name not in STATISTICS:
        raise unknown("statistic", name, STATISTICS)
    found = [(each, value) for each in chosen if (value := evaluate(spec["value"], each)) is not None]
    if not found or not _has_all(spec, found):
        return ""
    text = STATISTICS[name](found, form or "text", spec, row)
    fields = {**chosen[0], "all": chosen}
    return fill(spec.get("before", ""), fields) + text + fill(spec.get("after", ""), fields)


def _has_all(spec: Mapping[str, Any], found: Sequence[tuple[Observation, Any]]) -> bool:
    """Return whether the groups of ``over`` are all of those that ``complete`` names."""
    names = {str(evaluate(spec["over"], each)) for each, _ in found} if "complete" in spec else set()
    return names >= set(spec.get("complete", ()))


def _number(spec: Mapping[str, Any], row: Observations) -> float | None:
    """The mean of a column's values, by which rows are ordered."""
    found = [(each, value) for each in row if (value := evaluate(spec["value"], each)) is not None]
    if not found or not _has_all(spec, found):
        return None
    return statistics.fmean(_by_seed(found, spec).values())


# --- statistics ---------------------------------------------------------------------------------------------

Found = list[tuple[Observation, Any]]
"""Observations and their values of the column's expression."""


def _by_seed(found: Found, spec: Mapping[str, Any]) -> dict[Any, float]:
    """The value of every seed; with ``over`` the mean over its groups, one in all if their seeds differ."""
    if "over" not in spec:
        return {each.get("seed", at): float(value) for at, (each, value) in enumerate(found)}
    groups: dict[Any, dict[Any, float]] = {}
    wanted = spec.get("complete")
    for each, value in found:
        key = str(evaluate(spec["over"], each))
        if wanted is None or key in wanted:
            groups.setdefault(key, {})[each["seed"]] = float(value)
    seeds = next(iter(groups.values())).keys()
    if any(group.keys() != seeds for group in groups.values()):
        return {None: statistics.fmean(statistics.fmean(group.values()) for group in groups.values())}
    return {seed: statistics.fmean(group[seed] for group in groups.values()) for seed in seeds}


def _spread(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    """Mean ± sample deviation over the seeds; the seeds where they are not as many as those of the row."""
    by_seed = _by_seed(found, spec)
    text = show(statistics.fmean(by_seed.values()), form)
    if len(by_seed) > 1:
        text += f" ± {show(statistics.stdev(by_seed.values()), form)}"
    shown = spec.get("seeds", "differing")  # always, never, or where they differ from those of the row
    if shown == "never" or "over" in spec:
        return text
    if shown == "differing" and len(by_seed) == len({each["seed"] for each in row}):
        return text
    return f"{text} ({format_seeds(sorted(by_seed))})"


def _mean(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    return show(statistics.fmean(_by_seed(found, spec).values()), form)


def _first(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    return show(found[0][1], form)


def _seeds(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    return str(len({each["seed"] for each, _ in found}))


def _range(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    ends = [show(end(value for _, value in found), form) for end in (min, max)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _course(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    """Means at the steps of ``along``: the first, the second and the last, with arrows between them.

    Of ``ends`` the first and the last alone.
    """
    steps: dict[Any, list[float]] = {}
    for each, value in found:
        steps.setdefault(each[spec["along"]], []).append(value)
    means = [float(np.nanmean(values)) if not np.isnan(values).all() else None for values in steps.values()]
    chosen = [means[0], *([] if spec["as"].startswith("ends") else means[1:2]), means[-1]]
    return " → ".join("–" if value is None else show(value, form) for value in chosen)


def _means(found: Found, spec: Mapping[str, Any]) -> dict[str, dict[Any, float]]:
    """Values by the value of ``among`` and by seed."""
    alike: dict[str, Found] = {}
    for each, value in found:
        alike.setdefault(str(evaluate(spec["among"], each)), []).append((each, value))
    return {name: _by_seed(members, spec) for name, members in alike.items()}


def _best(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    """The names within ``NEAR`` of the best; nothing to choose where there are fewer than two."""
    alike = _means(found, spec)
    means = {name: statistics.fmean(values.values()) for name, values in alike.items()}
    if len(means) < 2:
        return ""
    is_error = found[0][0].get("smaller_is_better")
    best = min(means.values()) if is_error else max(means.values())
    near = NEAR * best if is_error else 100 * NEAR
    taken = ", ".join(f"`{name}`" for name, mean in means.items() if abs(mean - best) <= near)
    return taken if all(len(values) > 1 for values in alike.values()) else f"{taken} (by one seed)"


def _ranking(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    """The mean of every name, best first, with the number of seeds."""
    alike = _means(found, spec)
    means = {name: statistics.fmean(values.values()) for name, values in alike.items()}
    is_error = bool(found[0][0].get("smaller_is_better"))
    ordered = sorted(means, key=lambda name: means[name], reverse=not is_error)
    counts = sorted({len(values) for values in alike.values()})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    said = ", ".join(f"{name} {show(means[name], form)}" for name in ordered)
    return f"{said}{'' if is_error else ' %'}, {seeds} seed{'' if counts == [1] else 's'}"


def _listing(found: Found, form: str, spec: Mapping[str, Any], row: Observations) -> str:
    """The spread of every name, in their order."""
    alike: dict[str, Found] = {}
    for each, value in found:
        alike.setdefault(str(evaluate(spec["among"], each)), []).append((each, value))
    return ", ".join(
        f"`{name}` {_spread(members, form, {**spec, 'seeds': 'always'}, row)}"
        for name, members in alike.items()
    )


STATISTICS: dict[str, Callable[[Found, str, Mapping[str, Any], Observations], str]] = {
    "first": _first,
    "mean": _mean,
    "spread": _spread,
    "seeds": _seeds,
    "range": _range,
    "course": _course,
    "ends": _course,
    "best": _best,
    "ranking": _ranking,
    "listing": _listing,
}


def _tests(spec: Mapping[str, Any], rows: Sequence[Observations]) -> list[str]:
    """p values of the differences from the row ``against``: Wilcoxon's signed-rank test, Holm's adjustment.

    The differences are those of the means over the seeds in every group of ``over``.
    """
    means: dict[int, dict[str, float]] = {}
    for at, row in enumerate(rows):
        found = [(each, value) for each in row if (value := evaluate(spec["value"], each)) is not None]
        if not found or not _has_all(spec, found):
            continue
        groups = grouped([each for each, _ in found], spec["over"])
        means[at] = {
            key: statistics.fmean(evaluate(spec["value"], each) for each in members)
            for (key,), members in groups.items()
            if key in spec.get("complete", [key])
        }
    name = spec["against"]
    base = next((at for at, row in enumerate(rows) if name == str(evaluate(spec["name"], row[0]))), None)
    if base not in means:
        return [""] * len(rows)
    others = [at for at in means if at != base]
    chances = holm(
        [signed_rank_test([means[at][key] - value for key, value in means[base].items()]) for at in others]
    )
    by_row = dict(zip(others, chances, strict=True))
    return [f"{by_row[at]:.2g}" if at in by_row else "" for at in range(len(rows))]


def statistic(observations: Observations, expression: str, name: str) -> str:
    """A statistic of an expression, for templates."""
    spec = {"value": expression, "as": name, "seeds": "always"}
    return _cell(spec, list(observations), observations)


def _with_bold(line: list[str], columns: Sequence[_Column], group: str) -> list[str]:
    """The largest numbers among the cells of the columns of one ``each`` bold, where all of them have one."""
    cells = [line[at] for at, column in enumerate(columns) if any(name == group for name, _ in column.chosen)]
    if not all(cells):
        return line
    best = max(cells, key=float)
    return [f"**{cell}**" if cell == best else cell for cell in line]
