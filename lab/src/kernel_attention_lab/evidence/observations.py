"""Where the observations of a table come from: records of suites, of benchmarks, of series, the registry.

An observation is a flat set of named fields: one trained model's figure, one contender in one setting. A
source is a mapping whose first key is its kind, and its value names the records.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.evidence.claims import claim_observations
from kernel_attention_lab.evidence.comparison import columns_needed, compare_over_columns, compare_rows
from kernel_attention_lab.evidence.expressions import Observation, evaluate, machine_words
from kernel_attention_lab.evidence.findings import SIGNIFICANT, Findings, figures_of, find, suite_records
from kernel_attention_lab.evidence.records import ResultRecord, read_records, require_same_config
from kernel_attention_lab.evidence.registry import mechanism_observations
from kernel_attention_lab.evidence.robustness import (
    attack_curves,
    corruption_figures,
    corruptions_of,
    relative_corruption_errors,
    robustness_columns,
    variant_columns,
)
from kernel_attention_lab.evidence.run import Places
from kernel_attention_lab.evidence.suite import Cell, Suite, list_suites, read_suite
from kernel_attention_lab.evidence.uncertainty import (
    training_costs,
    uncertainty_columns,
    uncertainty_curves,
    uncertainty_differences,
)
from kernel_attention_lab.reporting.diagnostic_plots import COURSES
from kernel_attention_lab.reporting.formats import is_share
from kernel_attention_lab.tasks.recipe import PROTOCOLS

SMALLER_IS_BETTER = ("mce",)
Source = Mapping[str, Any]


class Evidence:
    """The records below a folder. What several tables read is read once.

    Args:
        root: the folder with ``results`` and ``docs``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.places = Places(root / "runs", root / "results")
        self._kept: dict[Any, Any] = {}

    def observations(self, source: Source) -> list[Observation]:
        """The observations of a source, with the fields of its ``with`` added to each.

        Every source may have ``where``, an expression that its observations fulfil, and a list ``reshape``:
        ``{unpivot: FIELD, matching: PATTERN}`` makes an observation of each key of a field that matches, with
        the match as ``point`` and the entry as ``value``; ``{unroll: FIELD}`` one of each item of a list,
        with its place as ``FIELD_at``.

        Raises:
            InputError: for an unknown kind, and for records that do not belong together.
        """
        kind = next(iter(source))
        if kind not in _KINDS:
            raise unknown("source", kind, _KINDS)
        found = [each | source.get("with", {}) for each in _KINDS[kind](self, source)]
        if where := source.get("where"):
            found = [each for each in found if evaluate(where, each)]
        for step in source.get("reshape", ()):
            reshape = _unrolled if "unroll" in step else _unpivoted
            found = [more for each in found for more in reshape(each, **step)]
        return found

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """The first result of ``make`` for this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def records(self, suite: Suite) -> dict[str, dict[str, dict[int, ResultRecord]]]:
        """The suite's records by row, column and seed."""
        return self.kept(("records", suite.name), lambda: suite_records(suite, self.places))

    def findings(self, suite: Suite) -> Findings:
        """Their content."""
        return self.kept(("findings", suite.name), lambda: find(suite, self.places))

    @cached_property
    def suites(self) -> list[Suite]:
        """Every shipped suite, and after it the same under another protocol where that has records."""
        found = []
        for suite in map(read_suite, list_suites()):
            others = (suite.with_protocol(protocol) for protocol in PROTOCOLS)
            measured = [each for each in others if (self.places.results / each.records).is_dir()]
            found += [suite, *(each for each in measured if each is not suite)]
        return found


def _unpivoted(each: Observation, unpivot: str, matching: str) -> Iterator[Observation]:
    for key, value in (evaluate(unpivot, each) or {}).items():
        if match := re.fullmatch(matching, key):
            yield each | {"point": match[1], "value": value}


def _unrolled(each: Observation, unroll: str) -> Iterator[Observation]:
    for at, item in enumerate(each[unroll]):
        yield each | {unroll: item, f"{unroll}_at": at}


# --- trained models -----------------------------------------------------------------------------------------


def _suite(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """The models of a suite, also those of its other protocols if ``protocols`` is true.

    Keys of the source: ``column``, the only one; ``apart_from``, the keys of recipes in which models may
    differ; ``complete``, columns with all rows and seeds alone; ``state``, with the size of a layer's state;
    ``figures``, an observation for every figure that the suite compares.
    """
    suite = read_suite(source["suite"])
    others = [suite.with_protocol(protocol) for protocol in PROTOCOLS] if source.get("protocols") else []
    for each in (suite, *(other for other in others if other is not suite)):
        yield from _models(evidence, each, source)


def _models(evidence: Evidence, suite: Suite, source: Source) -> Iterator[Observation]:
    columns = [source["column"]] if "column" in source else list(suite.columns)
    for column in columns:
        folder = evidence.places.record(suite, Cell(next(iter(suite.rows)), column, 0)).parent
        strange = sorted({path.stem.rpartition("-")[0] for path in folder.glob("*.json")} - suite.rows.keys())
        if strange:
            raise InputError(f"{folder}: suite {suite.name} has no row {', '.join(strange)}")
    records = {row: {column: cells.get(column, {}) for column in columns}
               for row, cells in evidence.records(suite).items()}  # fmt: skip
    if source.get("complete"):
        whole = [column for column in columns
                 if all(len(cells[column]) == len(suite.seeds) for cells in records.values())]  # fmt: skip
        records = {row: {column: cells[column] for column in whole} for row, cells in records.items()}
    alike = [list(seeds.values()) for cells in records.values() for seeds in cells.values()]
    if "apart_from" in source:
        require_same_config([each for seeds in alike for each in seeds], apart_from=source["apart_from"])
        for models in alike:
            require_same_config(models)
    shared: Observation = {"suite": suite, "smaller_is_better": not suite.larger_is_better}
    if "figures" in source:
        measured = {metric: figures_of(records, metric) for metric in suite.figures()}
        pairs = {
            (metric, column) for metric, rows in measured.items() for row in rows.values() for column in row
        }
        shared["one"] = 1 in (len({pair[place] for pair in pairs}) for place in (0, 1))
        shared["found"] = evidence.findings(suite) if pairs else None
    for order, (row, cells) in enumerate(records.items()):
        for place, (column, seeds) in enumerate(cells.items()):
            here = {"row": row, "column": column, "order": order, "place": place, "columns": len(cells)}
            if source.get("state") and seeds:
                here["state"] = evidence.kept(("state", suite.name, row), partial(state_size, suite, row))
            for record in seeds.values():
                for more in _figures(suite, record) if "figures" in source else [{}]:
                    yield _model(record) | shared | here | more


def _figures(suite: Suite, record: ResultRecord) -> Iterator[Observation]:
    for order, metric in enumerate(suite.figures()):
        cells = figures_of({"": {"": {record.seed: record}}}, metric)[""].get("", {})
        for cell in cells.values():
            value = cell.value * (100 if is_share(metric) else 1)
            yield {"metric": metric, "metric_order": order, "value": value}


def _model(record: ResultRecord) -> Observation:
    """The fields of a record, its figures by their group."""
    fields = {name: getattr(record, name) for name in ("seed", "recipe", "config", "machine", "figures")}
    fields |= {"row": record.label, "name": f"{record.recipe}, {record.file_name}", "date": record.date[:10]}
    fields |= {"revision": record.revision, "seconds": record.budget.get("seconds")}
    return fields | record.figures


def _records(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """The models in a folder that is no suite's."""
    records = read_records(evidence.places.results / source["records"])
    require_same_config(records, apart_from=source.get("apart_from", ()))
    return map(_model, records)


def state_size(suite: Suite, row: str) -> int | None:
    """The numbers that a layer of a row keeps for decoding after a whole sequence; None without decoding."""
    import torch

    from kernel_attention.core.decoding import state_bytes
    from kernel_attention.core.layer import AttentionLayer
    from kernel_attention_lab.tasks.registry import experiment_class

    _, recipe = suite.recipe(Cell(row, next(iter(suite.columns)), suite.seeds[0]))
    experiment = experiment_class(recipe.task_name)(recipe, None)
    facts = experiment.facts()
    model = experiment.build_model(recipe, facts)
    layer = next(module for module in model.modules() if isinstance(module, AttentionLayer))
    if not layer.supports(decoding=True):
        return None
    prompt = torch.zeros(1, facts["max_len"], layer.embed_dim)
    return state_bytes(layer.read_prompt(prompt, None)) // prompt.element_size()


def _findings(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """Observations of the records of suites: ``all``, or one under every protocol that has records."""
    wanted = source["findings"]
    named = [each for each in evidence.suites if wanted in ("all", each.name, each.name.rpartition("-")[0])]
    return [{"suite": suite, "found": evidence.findings(suite)} for suite in named]


def _families(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """Suites that compare the same rows in the same way, on different data sets, and the comparisons."""
    groups: dict[str, list[Suite]] = {}
    for suite in evidence.suites:
        alike = (suite.rows, suite.keys, suite.baselines, suite.metric, suite.protocol)
        groups.setdefault(repr((alike, suite.larger_is_better)), []).append(suite)
    for group in groups.values():
        measured: dict[str, Any] = {row: {} for row in group[0].rows}
        present = []  # a suite without a record has no place on the page of reproductions
        for suite in group:
            by_row = figures_of(evidence.records(suite), suite.metric)
            present += [suite] if any(by_row.values()) else []
            for row, cells in by_row.items():
                measured[row] |= cells
        if comparisons := compare_over_columns(measured, group[0].compared_with(), columns=2):
            unit = 100.0 if is_share(group[0].metric) else 1.0
            sets = sorted({column for each in comparisons for column in each.differences})
            said = {"suite": group[0], "suites": present, "comparisons": comparisons}
            yield said | {"sets": sets, "unit": unit}


def _needed(evidence: Evidence, source: Source) -> Iterable[Observation]:
    return [{"count": count, "needed": columns_needed(count)} for count in source["sets_needed"]]


def _claims(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """The claims of a folder of documents, with their verdicts."""
    folder = evidence.root / source["claims"]
    return evidence.kept(
        ("claims", folder), lambda: list(claim_observations(folder, evidence.records, evidence.root))
    )


# --- robustness ---------------------------------------------------------------------------------------------


def _robustness(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """A ``part`` of the robustness of a suite's models.

    ``columns``: accuracies by attack, with the verdict on the difference from the row's baseline;
    ``comparisons``: these differences with their tests; ``variants``, ``curves``, ``corruptions``: figures
    of the attacks that show a masked gradient, by eps, and by corruption; ``models``: the records.
    """
    suite = read_suite(source["robustness"])
    records = evidence.kept(
        ("robustness", suite.name), lambda: read_records(evidence.places.results / suite.records)
    )
    strange = sorted({record.label for record in records} - suite.rows.keys())
    if strange:
        raise InputError(f"{suite.records}: suite {suite.name} has no row {', '.join(strange)}")
    require_same_config(records, apart_from=("attention",))
    for row in suite.rows:
        require_same_config([record for record in records if record.label == row])
    titles = source.get("titles", {})
    for each in _PARTS[source.get("part", "columns")](evidence, suite, records):
        order = list(suite.rows).index(each["row"])
        yield each | {"title": titles.get(each["row"], each["row"]), "order": order, "titles": titles}


def _in_order(suite: Suite, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((row, found[row]) for row in suite.rows if row in found)


def _baselines(suite: Suite) -> dict[str, str]:
    return {row: names[0] for row, names in suite.compared_with().items() if names}


def _columns(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    found = robustness_columns(records)
    for row, cells in relative_corruption_errors(records, _baselines(suite)).items():
        found[row]["mce"] = cells
    verdicts = {(each["row"], each["column"]): each for each in _compared(evidence, suite, records)}
    models = {(record.label, record.seed): _model(record) for record in records}
    for row, columns in _in_order(suite, found):
        for column, cells in columns.items():
            arrow = verdicts.get((row, column), {}).get("arrow", "")
            for seed, measured in cells.items():
                fields = {"column": column, "value": measured.value, "cases": measured.cases, "arrow": arrow}
                yield models[row, seed] | fields


def _compared(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> list[Observation]:
    """Every difference from a baseline; without tests where the records lack the cases."""
    return evidence.kept(("compared", suite.name), lambda: list(_differences(suite, records)))


def _differences(suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    baselines = _baselines(suite)
    found = robustness_columns(records)
    for row, cells in corruption_figures(records).items():
        found[row]["mce"] = cells
    tested = {(each.row, each.column): each for each in compare_rows(found, baselines)}
    for row, columns in _in_order(suite, found):
        for column, ours in columns.items():
            theirs = found.get(baselines.get(row, ""), {}).get(column, {})
            seeds = sorted(ours.keys() & theirs.keys())
            if not seeds:
                continue
            names = {"row": row, "baseline": baselines[row], "column": column, "seeds": seeds, "arrow": ""}
            if (each := tested.get((row, column))) is None:
                value = sum(ours[seed].value - theirs[seed].value for seed in seeds) / len(seeds)
                yield names | {"difference": value, "is_tested": False, "is_better": None}
                continue
            larger = each.interval.difference > 0
            is_better = larger != (column in SMALLER_IS_BETTER)
            if differs := each.adjusted <= SIGNIFICANT:
                names["arrow"] = " ↑" if is_better else " ↓"
            yield names | {"seeds": list(each.seeds), "by_seed": list(each.by_seed.values())} | {
                "difference": each.interval.difference, "low": each.interval.low, "high": each.interval.high,
                "p_value": each.p_value, "adjusted": each.adjusted, "is_tested": True,
                "is_better": is_better if differs else None,
            }  # fmt: skip


def _variants(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    for row, columns in _in_order(suite, variant_columns(records)):
        for column in sorted(columns):
            for seed, measured in columns[column].items():
                yield {"row": row, "column": column, "seed": seed, "value": measured.value}


def _curves(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    for protocol in ("pixel", "paper"):
        for attack in ("fgsm", "pgd"):
            for row, points in _in_order(suite, attack_curves(records, protocol, attack)):
                for eps in sorted(points):
                    for seed, measured in points[eps].items():
                        where = {"protocol": protocol, "attack": attack, "eps": 255 * eps}
                        yield {"row": row, "seed": seed, "value": measured.value} | where


def _corruptions(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    order = list(suite.rows)
    for record in sorted(records, key=lambda each: (order.index(each.label), each.seed)):
        for name, values in (corruptions_of(record) or {"accuracies": {}})["accuracies"].items():
            fields = {"corruption": name, "value": sum(values) / len(values)}
            yield {"row": record.label, "seed": record.seed} | fields


def _attacked(evidence: Evidence, suite: Suite, records: list[ResultRecord]) -> Iterator[Observation]:
    return (_model(record) for record in records)


_PARTS: dict[str, Callable[..., Iterable[Observation]]] = {
    "columns": _columns,
    "comparisons": _compared,
    "variants": _variants,
    "curves": _curves,
    "corruptions": _corruptions,
    "models": _attacked,
}


def _uncertainty(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """A ``part`` of the uncertainty of a suite's models; rows that ``titles`` does not name are left out.

    ``columns``: figures by set of images; ``comparisons``: differences from ``baselines``, with their tests;
    ``curves``: reliability and risk against coverage; ``models``: the records. Each has the ``costs``.
    """
    suite = read_suite(source["uncertainty"])
    records = read_records(evidence.places.results / suite.records)
    require_same_config(records, apart_from=("attention",))
    titles, part = source.get("titles", {}), source.get("part", "columns")
    found: Iterable[Observation]
    if part == "models":
        found = (_model(record) for record in records)
    elif part == "comparisons":
        key = ("uncertainty", suite.name)
        found = evidence.kept(key, lambda: list(uncertainty_differences(records, source["baselines"])))
    else:
        found = (uncertainty_curves if part == "curves" else uncertainty_columns)(records)
    shared = {"titles": titles, "costs": training_costs(records)}
    order = list(titles)
    for each in found:
        if part == "models":
            yield each | shared
        elif (row := each["row"]) in titles:
            yield each | shared | {"title": titles[row], "order": order.index(row)}


# --- benchmarks ---------------------------------------------------------------------------------------------


def _named(evidence: Evidence, names: str | list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in [names] if isinstance(names, str) else names:
        path = evidence.places.results / "benchmarks" / f"{name}.json"
        if path.is_file():
            yield name, json.loads(path.read_text(encoding="utf-8"))


def _bench(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """Contenders in settings, from records of ``kernel-attention bench``.

    ``beside`` is an expression for the name of another contender of the same setting, whose fields are
    ``theirs``; ``reported`` a file of figures that others report. ``part: roofline`` gives the lines of the
    roofline.
    """
    for name, record in _named(evidence, source["bench"]):
        machine = record["machine"]
        shared = {"record": name, "baseline": record["plan"]["baseline"], "machine": machine}
        shared |= {"heading": _heading(record), "make": _make(machine)}
        reported: dict[str, Any] = {"rows": {}}
        if "reported" in source:
            path = evidence.places.results / "reported" / f"{source['reported']}.json"
            reported = json.loads(path.read_text(encoding="utf-8"))
            shared["reported_title"] = reported["title"]
        for cell in record["cells"]:
            rows = {row["contender"]: row for row in cell["rows"] if "time" in row}
            here = shared | cell["setting"] | {"rounds": cell["rounds"], "ceilings": cell.get("ceilings")}
            for row in cell["roofline"] if source.get("part") == "roofline" else rows.values():
                each = here | row
                length = str(cell["setting"]["length"])
                each["reported"] = reported["rows"].get(row["contender"], {}).get(length, "")
                if beside := source.get("beside"):
                    each["theirs"] = rows.get(evaluate(beside, each) or "")
                    if each["theirs"] is None:
                        continue
                    each["paired"] = _paired(row, each["theirs"])
                yield each


def _paired(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """The median over the rounds of the time over the other's, by pass."""
    import statistics

    found = {}
    for kind, figures in own["time"].items():
        pairs = zip(figures["seconds"], theirs["time"][kind]["seconds"], strict=True)
        found[kind] = statistics.median(mine / other for mine, other in pairs)
    return found


def _heading(record: Mapping[str, Any]) -> str:
    """The machine, the threads and the number of rounds."""
    machine = record["machine"]
    if "gpu" in machine:
        return ", torch ".join((machine["gpu"], machine["torch"])) + f", {machine['date'][:10]}"
    rounds: dict[int, dict[str, None]] = {}
    for cell in record["cells"]:
        rounds.setdefault(cell["rounds"], {})[str(cell["setting"]["length"])] = None
    counted = ", ".join(f"{count} rounds at N {' and '.join(at)}" for count, at in rounds.items())
    if len(rounds) == 1:
        counted = f"{next(iter(rounds))} rounds"
    threads = " and ".join(str(n) for n in sorted({cell["setting"]["threads"] for cell in record["cells"]}))
    absent = ", ".join(entry["contender"] for entry in record.get("absent", ()))
    missing = f" Not installed there: {absent}." if absent else ""
    return f"{machine_words(machine)}; threads {threads}; {counted}.{missing}"


def _make(machine: Mapping[str, Any]) -> str:
    return re.sub(r"\(R\)| Processor", "", machine["processor"])


def _rows(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """The rows of records of comparisons."""
    for name, content in _named(evidence, source["rows"]):
        record = {"rows": content} if isinstance(content, list) else content
        machine = record.get("machine")
        shared = {"record": name, "settings": record.get("settings", {}), "machine": machine}
        shared["episodes"] = record.get("episodes")
        if machine is not None:
            shared |= {"heading": machine_words(machine), "make": _make(machine)}
        for row in record["rows"]:
            yield shared | row | {"this": row}


# --- series, courses, reports of others, the registry -------------------------------------------------------


def _series(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """Fits of classifiers of series, the last of several for one fit; then what ``published`` reports."""
    path = evidence.places.results / "series" / f"{source['series']}.jsonl"
    found: dict[str, dict[str, dict[int, Observation]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        record = json.loads(line)
        found[record["classifier"]][record["dataset"]][record["number"]] = record
    for sets in found.values():
        for fits in sets.values():
            yield from (each | {"seed": number, "published": False} for number, each in fits.items())
    path = evidence.places.results / "reported" / f"{source.get('published')}.json"
    if found and path.is_file():
        for name, report in json.loads(path.read_text(encoding="utf-8")).items():
            for data, accuracy in report["accuracy"].items():
                each = {"classifier": f"{name} \\*", "dataset": data, "accuracy": accuracy, "seed": 0}
                yield each | {"published": True, "report": f"{name}: {report['source']}"}


def _courses(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """Figures of every layer and epoch, from files ``LABEL-SEED.json``."""
    folder = evidence.places.results / source["courses"]
    records = [(path.stem, json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("*.json"))]
    for key, title in COURSES.items():
        for stem, record in records:
            label, _, seed = stem.rpartition("-")
            for epoch, layers in zip(record["epochs"], record["figures"].get(key, ()), strict=False):
                for layer, value in enumerate(layers):
                    number = float("nan") if value is None else value
                    yield {"row": label, "seed": int(seed), "figure": title, "epoch": epoch} | {
                        "layer": layer, "layers": len(layers), "value": number, "epochs": record["epochs"],
                    }  # fmt: skip


def _reported(evidence: Evidence, source: Source) -> Iterator[Observation]:
    """The rows that a file of ``results/reported`` has."""
    path = evidence.places.results / "reported" / f"{source['reported']}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    shared = {"source": content["source"], "setting": content["setting"]}
    for row in content["rows"].values():
        for column, value in row.items():
            if column != "title":
                yield shared | {"row": row["title"], "column": column, "value": value, "seed": 0}


def _mechanisms(evidence: Evidence, source: Source) -> Iterable[Observation]:
    return mechanism_observations(evidence.root)


def _predicted(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """Times of training steps on an H100 as they follow from counted work."""
    from kernel_attention_lab.benchmarking.predictions import predictions

    yield from evidence.kept("predictions", lambda: list(predictions()))


def _far(evidence: Evidence, source: Source) -> Iterable[Observation]:
    """Softmax attention and two Gaussian processes, near to their training inputs and far from them."""
    from kernel_attention_lab.evidence.uncertainty.far_from_data import far_from_data

    titles = source["titles"]
    for each in evidence.kept("far_from_data", lambda: list(far_from_data())):
        yield each | {"order": list(titles).index(each["row"]), "title": titles[each["row"]]}


_KINDS: dict[str, Callable[[Evidence, Source], Iterable[Observation]]] = {
    "suite": _suite,
    "records": _records,
    "findings": _findings,
    "families": _families,
    "sets_needed": _needed,
    "claims": _claims,
    "robustness": _robustness,
    "uncertainty": _uncertainty,
    "bench": _bench,
    "rows": _rows,
    "series": _series,
    "courses": _courses,
    "reported": _reported,
    "mechanisms": _mechanisms,
    "predicted": _predicted,
    "far_from_data": _far,
}
