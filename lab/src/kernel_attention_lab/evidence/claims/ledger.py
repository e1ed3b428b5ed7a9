"""Verdicts on claims, by stated rules, from the records that they name.

A difference between two rows is tested on the same cases where the records keep them (the sign flip test);
over the columns where a figure has no cases and there are ``FEWEST_COLUMNS`` of them (Wilcoxon's signed-rank
test); else over the seeds (Student's t of the paired differences). Of a course the layers are what Wilcoxon's
test ranks. The p values of one claim are adjusted by Holm's method. A difference is *found* where the
adjusted value is at most 0.05 and the 95 % interval excludes zero; on cases that interval draws cases and
seeds again, so that neither is likely to undo it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.claims.claim import Claim, Document, read_documents
from kernel_attention_lab.evidence.comparison import Measurement, compare_rows
from kernel_attention_lab.evidence.expressions import Observation, evaluate, show
from kernel_attention_lab.evidence.findings import SIGNIFICANT, figures_of
from kernel_attention_lab.evidence.records import ResultRecord
from kernel_attention_lab.evidence.robustness import robustness_columns
from kernel_attention_lab.evidence.statistics import holm, signed_rank_test
from kernel_attention_lab.evidence.suite import Suite, read_suite
from kernel_attention_lab.reporting.formats import is_share

EXACT, CORRECTED, CONFIRMED = "exact", "corrected", "confirmed"
SAME, NONE, AGAINST, UNTESTED = "same direction", "no difference found", "contradicted", "not tested"
VERDICTS = (EXACT, CORRECTED, CONFIRMED, SAME, NONE, AGAINST, UNTESTED)
FEWEST_COLUMNS = 6
POWER = 0.8
NEAR = 0.05  # of a factor that a document states, relative

Records = dict[str, dict[str, dict[int, ResultRecord]]]
ReadRecords = Callable[[Suite], Records]
_Pairs = dict[str, dict[int, float]]
"""Differences by column and seed."""


class Difference(NamedTuple):
    """A row minus its baseline, in the figure's unit.

    Attributes:
        name: what is compared.
        mean: the difference.
        low, high: its 95 % interval.
        p_value: after Holm's adjustment over the claim's comparisons.
        detectable: the smallest difference that the test would have found with a probability of ``POWER``.
        repeats: how many seeds, columns or layers it is the mean of, with the word for them.
    """

    name: str
    mean: float
    low: float
    high: float
    p_value: float
    detectable: float
    repeats: tuple[int, str]

    @property
    def is_found(self) -> bool:
        """Return whether the test found it, by the rule of this module."""
        return self.p_value <= SIGNIFICANT and not self.low <= 0 <= self.high


class Judgement(NamedTuple):
    """A verdict with the figures that it follows from.

    Attributes:
        verdict: one of ``VERDICTS``.
        figure: the figures in words, with their spread.
        detectable: what the test would have found; "" where it is not asked.
        differences: those behind it.
    """

    verdict: str
    figure: str
    detectable: str = ""
    differences: tuple[Difference, ...] = ()


def judge(claim: Claim, records: ReadRecords, results: Path) -> Judgement:
    """The verdict on a claim.

    Args:
        claim: the claim.
        records: reads a suite's records.
        results: the folder of the records.

    Raises:
        InputError: where a measured claim has no record.
    """
    match claim.evidence:
        case "untested":
            return Judgement(UNTESTED, "")
        case "tests":
            return Judgement(CORRECTED if claim.corrected else EXACT, "")
        case "printed":
            return _judge_printed(claim)
        case "bench":
            return _judge_costs(claim, results)
        case "course":
            return _judge_differences(claim, list(_courses(claim, results)), "")
        case "depth":
            return _judge_differences(claim, _required(claim, _depths(claim, records)), "")
    differences = _required(claim, _comparisons(claim, records))
    is_relative = all(entry.get("relative") for entry in claim.compare)
    shares = all(_is_in_points(entry) for entry in claim.compare)
    return _judge_differences(claim, differences, " %" if is_relative else " points" if shares else "")


def _required(claim: Claim, differences: Iterable[Difference]) -> list[Difference]:
    found = list(differences)
    if not found:
        raise InputError(f"claim {claim.id}: no record of {', '.join(claim.suites())} compares its rows")
    return found


def verdict_of(differences: Sequence[Difference], sign: int, margin: float = 0.0) -> str:
    """The verdict that differences give on a claim.

    * All alike (sign 0): *confirmed* where every interval lies within the margin, *contradicted* where a
      difference beyond it is found, else *no difference found*.
    * Otherwise *no difference found* where none is; *confirmed* where more than half are found in the
      claim's direction and none against it; *same direction* where more are found for it than against, or
      as many and the mean is; else *contradicted*.

    Args:
        differences: of the comparisons.
        sign: +1 where the rows are larger by the claim, -1 where they are smaller, 0 where they are alike.
        margin: the largest difference that counts as alike.
    """
    found = [each for each in differences if each.is_found]
    if sign == 0:
        if any(abs(each.mean) > margin for each in found):
            return AGAINST
        return CONFIRMED if all(-margin <= each.low and each.high <= margin for each in differences) else NONE
    if not found:
        return NONE
    for_it = sum(each.mean * sign > 0 for each in found)
    if 2 * for_it > len(differences) and for_it == len(found):
        return CONFIRMED
    lead = 2 * for_it - len(found) or sign * statistics.fmean(each.mean for each in differences)
    return SAME if lead > 0 else AGAINST


def _judge_differences(claim: Claim, differences: list[Difference], unit: str) -> Judgement:
    sign = {"larger": 1, "smaller": -1, "alike": 0}.get(claim.expects)
    if sign is None:
        is_larger = read_suite(claim.compare[0]["suite"]).larger_is_better
        sign = 1 if (claim.expects == "better") == is_larger else -1
    said = verdict_of(differences, sign, claim.margin)
    limits = [each.detectable for each in differences]
    ends = dict.fromkeys(_short(end) for end in (min(limits), max(limits)))
    detectable = f"{' to '.join(ends)}{unit}" if said == NONE else ""
    return Judgement(said, _figure(differences, unit, sign), detectable, tuple(differences))


def _figure(differences: Sequence[Difference], unit: str, sign: int) -> str:
    counts = {word: len({each.repeats for each in differences if each.repeats[1] == word})
              for word in dict.fromkeys(each.repeats[1] for each in differences)}  # fmt: skip
    spans = []
    for word in counts:
        numbers = sorted({each.repeats[0] for each in differences if each.repeats[1] == word})
        ends = dict.fromkeys((numbers[0], numbers[-1]))
        spans.append(f"{' to '.join(map(str, ends))} {word if ends != {1: None} else word[:-1]}")
    repeats = ", ".join(spans)
    if len(differences) == 1:
        each = differences[0]
        return f"{_signed(each.mean)} ({_signed(each.low)} to {_signed(each.high)}){unit}, {repeats}"
    means = [each.mean for each in differences]
    found = [each for each in differences if each.is_found]
    text = f"mean {_signed(statistics.fmean(means))}, {_signed(min(means))} to {_signed(max(means))}{unit}"
    text += f", {len(differences)} comparisons of {repeats}"
    if sign == 0 or not found:
        return f"{text}; found: {len(found)}"
    for_it = sum(each.mean * sign > 0 for each in found)
    return f"{text}; found for it: {for_it}, against it: {len(found) - for_it}"


# --- trained models -----------------------------------------------------------------------------------------


def _comparisons(claim: Claim, records: ReadRecords) -> Iterator[Difference]:
    """The claim's differences; the p values are adjusted over all of them."""
    by_cases, others = [], []
    for entry in claim.compare:
        suite = read_suite(entry["suite"]).with_protocol(entry.get("protocol"))
        measured, rows = _measured(suite, entry, records)
        unit = 100.0 if _is_in_points(entry) else 1.0
        found = compare_rows(measured, rows)
        own = entry.get("columns") if "among" in entry else None
        for each in found:
            cases = measured[each.row][each.column][each.seeds[0]].cases
            by_cases.append((each, unit, cases, own is None or each.column in own))
        tested = {(each.row, each.column) for each in found}
        for row, baseline in rows.items():
            theirs = measured.get(baseline, {})
            pairs = {
                column: _paired(cells, theirs.get(column, {}), entry, unit)
                for column, cells in measured.get(row, {}).items()
                if (row, column) not in tested
            }
            found_pairs = {column: pair for column, pair in pairs.items() if pair}
            others.append((f"{row} − {baseline}", suite.name, found_pairs))
    made = len(by_cases) + sum(_tests_of(pairs) for pairs in _merged(others).values())
    differences = [
        Difference(
            f"{each.row} − {each.baseline}, {each.column}",
            unit * each.interval[0],
            unit * each.interval[1],
            unit * each.interval[2],
            each.p_value,
            unit * _detectable_on_cases(each.interval, cases, made),
            (len(each.seeds), "seeds"),
        )
        for each, unit, cases, _ in by_cases
    ]
    for name, pairs in _merged(others).items():
        if len(pairs) >= FEWEST_COLUMNS:
            means = [statistics.fmean(by_seed.values()) for by_seed in pairs.values()]
            differences.append(_ranked(name, means, "columns", made))
        else:
            differences += [
                _over_seeds(f"{name}, {column.partition(':')[2]}", list(by_seed.values()), made)
                for column, by_seed in pairs.items()
                if len(by_seed) > 1
            ]
    is_own = [own for *_, own in by_cases] + [True] * (len(differences) - len(by_cases))
    yield from (each for each, own in zip(_adjusted(differences), is_own, strict=True) if own)


def _merged(others: Iterable[tuple[str, str, _Pairs]]) -> dict[str, _Pairs]:
    """The pairs of a row and its baseline in all suites together, by name and by ``suite:column``."""
    merged: dict[str, _Pairs] = {}
    for name, suite, pairs in others:
        named = {f"{suite}:{column}": by_seed for column, by_seed in pairs.items()}
        if named:
            merged.setdefault(name, {}).update(named)
    return merged


def _tests_of(pairs: _Pairs) -> int:
    return 1 if len(pairs) >= FEWEST_COLUMNS else sum(len(by_seed) > 1 for by_seed in pairs.values())


def _measured(
    suite: Suite, entry: Mapping[str, Any], records: ReadRecords
) -> tuple[dict[str, dict[str, dict[int, Measurement]]], dict[str, str]]:
    """The figures by row, column and seed, and the baseline of each row, which may be another suite's."""
    rows = dict(entry["rows"])
    own = records(suite)
    models = {row: own[row] for row in dict.fromkeys([*rows, *(() if "beside" in entry else rows.values())])}
    if "beside" in entry:
        theirs = records(read_suite(entry["beside"]))
        models |= {f"{row} of {entry['beside']}": theirs[row] for row in rows.values()}
        rows = {row: f"{baseline} of {entry['beside']}" for row, baseline in rows.items()}
    if entry.get("robustness"):
        attacked = [each for row in models.values() for cells in row.values() for each in cells.values()]
        found: Any = robustness_columns(attacked)
    else:
        found = figures_of(models, entry.get("metric", suite.metric))
    wanted = entry.get("among", entry.get("columns"))
    measured = {
        row: {column: cells for column, cells in columns.items() if wanted is None or column in wanted}
        for row, columns in found.items()
    }
    return measured, rows


def _is_in_points(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("robustness")) or is_share(entry.get("metric", read_suite(entry["suite"]).metric))


def _paired(
    ours: Mapping[int, Measurement], theirs: Mapping[int, Measurement], entry: Mapping[str, Any], unit: float
) -> dict[int, float]:
    """Differences by seed; of a ``relative`` entry in per cent of the baseline."""
    values = {seed: (ours[seed].value, theirs[seed].value) for seed in sorted(ours.keys() & theirs.keys())}
    if entry.get("relative"):
        return {seed: 100 * (own / other - 1) for seed, (own, other) in values.items()}
    return {seed: unit * (own - other) for seed, (own, other) in values.items()}


def _detectable_on_cases(interval: Sequence[float], cases: int, made: int) -> float:
    """From the interval's length; at least what so many cases, all of one sign, need to reach the level."""
    normal = statistics.NormalDist()
    error = (interval[2] - interval[1]) / (2 * normal.inv_cdf(0.975))
    needed = math.ceil(1 + math.log2(made / SIGNIFICANT)) / cases if cases else 0.0
    return max(needed, error * (normal.inv_cdf(1 - SIGNIFICANT / (2 * made)) + normal.inv_cdf(POWER)))


def _over_seeds(name: str, values: Sequence[float], made: int, word: str = "seeds") -> Difference:
    """Student's t of paired differences."""
    from scipy.special import stdtr, stdtrit  # type: ignore[import-untyped]

    count, mean = len(values), statistics.fmean(values)
    error = max(statistics.stdev(values) / math.sqrt(count), 1e-12)
    half = float(stdtrit(count - 1, 0.975)) * error
    p_value = 2 * float(stdtr(count - 1, -abs(mean) / error))
    quantiles = stdtrit(count - 1, 1 - SIGNIFICANT / (2 * made)) + stdtrit(count - 1, POWER)
    return Difference(name, mean, mean - half, mean + half, p_value, float(quantiles) * error, (count, word))


def _ranked(name: str, values: Sequence[float], word: str, made: int) -> Difference:
    """Wilcoxon's test, with the interval and the power of Student's t."""
    return _over_seeds(name, values, made, word)._replace(p_value=signed_rank_test(values))


def _adjusted(found: Sequence[Difference]) -> list[Difference]:
    adjusted = holm([each.p_value for each in found])
    return [each._replace(p_value=value) for each, value in zip(found, adjusted, strict=True)]


def _depths(claim: Claim, records: ReadRecords) -> Iterator[Difference]:
    """The figure in the last layer minus its mean over the layers before, over the seeds."""
    found = []
    for entry in claim.depth:
        own = records(read_suite(entry["suite"]))
        for row in entry["rows"]:
            for column, by_seed in own[row].items():
                layers = [record.by_layer.get(entry["figure"], []) for record in by_seed.values()]
                values = [last - statistics.fmean(before) for *before, last in layers if before]
                if len(values) > 1:
                    found.append((f"{row}, {column}", values))
    yield from _adjusted([_over_seeds(name, values, len(found)) for name, values in found])


def _courses(claim: Claim, results: Path) -> Iterator[Difference]:
    """The last epoch minus the first, or minus a limit, over the layers of each row's model."""
    course = claim.course
    found = []
    for row in course["rows"]:
        record = json.loads((results / course["course"] / f"{row}-0.json").read_text(encoding="utf-8"))
        figures = record["figures"][course["figure"]]
        first = figures[record["epochs"].index(course["since"])] if "since" in course else None
        values = [
            last - (course["limit"] if first is None else first[layer])
            for layer, last in enumerate(figures[-1])
            if last is not None and (first is None or first[layer] is not None)
        ]
        found.append(_ranked(row, values, "layers", len(course["rows"])))
    yield from _adjusted(found)


# --- costs and printed figures ------------------------------------------------------------------------------


def _judge_costs(claim: Claim, results: Path) -> Judgement:
    """Confirmed where every ratio is as claimed, contradicted where one lies on the other side of 1."""
    said, texts = [], []
    for entry in claim.bench:
        record = json.loads((results / "benchmarks" / f"{entry['bench']}.json").read_text(encoding="utf-8"))
        at = entry.get("at", {})
        cell = next(each for each in record["cells"] if at.items() <= each["setting"].items())
        rows = {row["contender"]: row for row in cell["rows"]}
        fields = {
            **rows[entry["contender"]],
            "setting": cell["setting"],
            "theirs": rows[entry.get("beside", entry["contender"])],
        }
        value = float(evaluate(entry["value"], fields))
        said.append(_ratio_verdict(value, entry["claimed"], entry.get("allows", "near")))
        low, high = (evaluate(entry[end], fields) if end in entry else None for end in ("low", "high"))
        spread = f" ({_short(low)} to {_short(high)})" if low is not None and high is not None else ""
        texts.append(f"{entry['name']} {_short(value)}{spread}, stated {entry['claimed']:g}")
    if claim.corrected:
        return Judgement(CORRECTED, "; ".join(texts))
    if AGAINST in said:
        return Judgement(AGAINST, "; ".join(texts))
    return Judgement(CONFIRMED if set(said) == {CONFIRMED} else SAME, "; ".join(texts))


def _ratio_verdict(value: float, claimed: float, allows: str) -> str:
    near = abs(value / claimed - 1) <= NEAR
    if near or (allows == "at least" and value >= claimed) or (allows == "at most" and value <= claimed):
        return CONFIRMED
    return SAME if (value - 1) * (claimed - 1) > 0 else AGAINST


def _judge_printed(claim: Claim) -> Judgement:
    """Exact where all that is printed follows from the rest, corrected elsewhere."""
    texts, wrong = [], False
    for entry in claim.printed:
        if "ours" in entry:
            sign = -1 if entry.get("smaller") else 1
            pairs = list(zip(entry["ours"], entry["baseline"], strict=True))
            holds = sum(sign * (ours - theirs) > 0 for ours, theirs in pairs)
            texts.append(f"{entry.get('name', '')} holds in {holds} of {len(pairs)}".strip())
            wrong |= holds < len(pairs)
            continue
        values = entry.get("values") or [
            value[0] if isinstance(value, list) else value
            for value in read_suite(entry["suite"]).reported[entry["row"]].values()
        ]
        mean, printed = statistics.fmean(values), str(entry["printed"])
        is_right = abs(mean - float(printed)) <= 0.5001 * 10.0 ** -len(printed.partition(".")[2])
        wrong |= not is_right
        said = f"{entry.get('name', entry.get('row', ''))} {printed}".strip()
        texts.append(f"{said}, by the figures {mean:.2f}")
    return Judgement(CORRECTED if wrong else EXACT, "; ".join(texts))


def _short(value: float) -> str:
    return show(value, "three")


def _signed(value: float) -> str:
    text = _short(abs(value))
    return text if float(text) == 0 else f"{'−' if value < 0 else '+'}{text}"


# --- the page -----------------------------------------------------------------------------------------------


def claim_observations(folder: Path, records: ReadRecords, root: Path) -> Iterator[Observation]:
    """The claims with their verdicts, in the order of the documents.

    Args:
        folder: of the documents' files.
        records: reads a suite's records.
        root: the checkout.
    """
    for document in read_documents(folder):
        for claim in document.claims:
            yield _observation(document, claim, judge(claim, records, root / "results"))


def _observation(document: Document, claim: Claim, outcome: Judgement) -> Observation:
    named = {
        name: getattr(claim, name)
        for name in (
            "id",
            "where",
            "kind",
            "says",
            "corrected",
            "untested",
            "page",
            "note",
            "others",
            "tests",
        )
    }
    about = {
        "document": document.name,
        "title": document.title,
        "cite": document.cite,
        "summary": document.summary,
    }
    found = {"verdict": outcome.verdict, "figure": outcome.figure, "detectable": outcome.detectable}
    differences = [
        {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in each._asdict().items()
        }
        | {"is_found": each.is_found}
        for each in outcome.differences
    ]  # another processor rounds the last digits otherwise
    return named | about | found | {
        "differences": differences, "records": _record_names(claim), "commands": _commands(claim),
        "suites": claim.suites(),
    }  # fmt: skip


def _record_names(claim: Claim) -> list[str]:
    names = [
        f"results/{read_suite(name).with_protocol(protocol or None).records}"
        for name, _, protocol in (each.partition("-") for each in claim.suites())
        if not claim.untested
    ]
    names += [f"results/benchmarks/{entry['bench']}.json" for entry in claim.bench]
    names += [f"results/{claim.course['course']}"] if claim.course else []
    return list(dict.fromkeys(names))


def _commands(claim: Claim) -> list[str]:
    if claim.tests:
        return [f"python -m pytest {' '.join(claim.tests)}"]
    found = [
        f"python {entry['script']} --out results/benchmarks/{entry['bench']}.json"
        if "script" in entry
        else f"kernel-attention bench --suite {entry['bench']}"
        for entry in claim.bench
    ]
    for name in claim.suites():
        suite, _, protocol = name.partition("-")
        found.append(
            f"kernel-attention reproduce {suite} --data_root DATA"
            + (f" --protocol {protocol}" if protocol else "")
        )
    found += ["kernel-attention analyze RUN --over_training"] if claim.course else []
    return list(dict.fromkeys(found))
