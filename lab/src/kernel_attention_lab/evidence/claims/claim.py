"""A claim of a paper as data, with the source of its evidence. No verdict is written down."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kernel_attention.errors import InputError
from kernel_attention.fields import check_fields, field_names
from kernel_attention_lab.evidence.suite import read_suite
from kernel_attention_lab.plain_yaml import read_yaml

Kind = Literal["theorem", "equation", "definition", "table", "figure", "cost", "sentence"]
Direction = Literal["better", "worse", "larger", "smaller", "alike"]

EVIDENCE = ("tests", "compare", "depth", "bench", "course", "printed", "untested")
"""The sources of evidence; a claim has one of them."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Args:
        id: its name, unique in the ledger.
        where: the place in the document.
        kind: what it is there.
        says: the claim in our words.
        tests: node ids of the tests that hold it, ``FILE::NAME``.
        corrected: the change with which the claim is true, or what the tests show in its place.
        compare: comparisons of trained models: ``suite`` (and ``protocol``), ``rows`` with the baseline of
            each, ``columns`` (all that have records) and ``metric`` (the suite's), of which ``train_seconds``
            is one. With ``robustness: true`` the columns are attacks. ``among`` names the columns whose p
            values are adjusted together; with ``relative: true`` differences are in per cent of the baseline.
            ``beside`` is the suite of the baselines, where it is another one.
        depth: figures by layer: the last layer of a row's models beside the mean of the layers before it:
            ``suite``, ``figure`` and ``rows``.
        expects: how the rows differ from their baselines by the claim.
        margin: of ``alike``: the largest difference that the claim allows.
        bench: ratios of two contenders: ``bench`` (the record), ``contender``, ``beside``, ``at`` (the
            setting), ``value`` (an expression), ``claimed`` and ``allows`` (near, at least, at most).
            ``script`` writes the record where no suite does.
        course: figures over training, by layer: ``course`` (the folder), ``figure``, ``rows``, and ``since``,
            the first epoch, or ``limit``, a number that the last epoch is compared with.
        printed: figures that the document prints and that follow from others it prints: a list of mappings
            with ``printed`` and ``values`` (or ``suite`` and ``row``), whose mean it is; or ``ours`` and
            ``baseline``, which are larger in every place by the claim (smaller with ``smaller: true``).
        untested: why there is no evidence.
        suite: of an untested claim: the suite that would test it.
        page: the page of the documentation that says more.
        note: what a reader must know of the test.
        others: what others found, by the key of their work.
    """

    id: str
    where: str
    kind: Kind
    says: str
    tests: list[str] = field(default_factory=list)
    corrected: str = ""
    compare: list[dict[str, Any]] = field(default_factory=list)
    depth: list[dict[str, Any]] = field(default_factory=list)
    expects: Direction = "better"
    margin: float = 0.0
    bench: list[dict[str, Any]] = field(default_factory=list)
    course: dict[str, Any] = field(default_factory=dict)
    printed: list[dict[str, Any]] = field(default_factory=list)
    untested: str = ""
    suite: str = ""
    page: str = ""
    note: str = ""
    others: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        found = [name for name in EVIDENCE if getattr(self, name)]
        if len(found) != 1:
            raise InputError(f"claim {self.id}: one source of {', '.join(EVIDENCE)} is needed, not {found}")

    @property
    def evidence(self) -> str:
        """The source that it has."""
        return next(name for name in EVIDENCE if getattr(self, name))

    def suites(self) -> list[str]:
        """The suites whose records it is judged by, or would be."""
        names = [_protocol_name(entry) for entry in (*self.compare, *self.depth)]
        names += [entry["beside"] for entry in self.compare if "beside" in entry]
        return list(dict.fromkeys(names + ([self.suite] if self.suite else [])))


@dataclass(frozen=True, kw_only=True)
class Document:
    """A document with its claims.

    Args:
        name: the file's name without its suffix.
        title: of the document.
        cite: authors, place and year.
        summary: what stands, what does not and what is open, in sentences its authors would find fair.
        claims: in the order of the document.
    """

    name: str
    title: str
    cite: str
    summary: list[str]
    claims: list[Claim]


def read_documents(folder: Path) -> list[Document]:
    """The documents of a folder of YAML files.

    Raises:
        InputError: for an unknown key, a claim without a source or with several, and an id of two claims.
    """
    found = []
    for path in sorted(folder.glob("*.yaml")):
        content = read_yaml(path)
        for entry in content["claims"]:
            if strange := entry.keys() - set(field_names(Claim)):
                raise InputError(f"{path.name}: {entry.get('id')}: unknown keys {sorted(strange)}")
        claims = [Claim(**entry) for entry in content.pop("claims")]
        found.append(Document(name=path.stem.partition("-")[2], claims=claims, **content))
    counts = Counter(claim.id for document in found for claim in document.claims)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InputError(f"claims that share an id: {', '.join(twice)}")
    return found


def dead_sources(claim: Claim, root: Path) -> list[str]:
    """The tests, suites, rows, records and pages that a claim names and that do not exist below ``root``."""
    dead = [each for each in claim.tests if not _has_test(root, each)]
    dead += [claim.page] if claim.page and not _has_page(root, claim.page) else []
    for entry in claim.compare:
        suite, beside = read_suite(entry["suite"]), read_suite(entry.get("beside", entry["suite"]))
        dead += [f"{suite.name}: {name}" for name in entry["rows"].keys() - suite.rows.keys()]
        dead += [f"{beside.name}: {name}" for name in set(entry["rows"].values()) - beside.rows.keys()]
        if not entry.get("robustness"):
            dead += [f"{suite.name}: {name}" for name in set(entry.get("columns", ())) - suite.columns.keys()]
    for entry in claim.depth:
        suite = read_suite(entry["suite"])
        dead += [f"{suite.name}: {name}" for name in set(entry["rows"]) - suite.rows.keys()]
    if claim.suite:
        read_suite(claim.suite)
    for entry in claim.bench:
        script = entry.get("script", "").partition(" ")[0]
        dead += [script] if script and not (root / script).is_file() else []
        path = root / "results" / "benchmarks" / f"{entry['bench']}.json"
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else []
        named = {row["contender"] for cell in cells for row in cell["rows"]}
        wanted = {entry["contender"], entry.get("beside", entry["contender"])}
        dead += [f"{entry['bench']}: {name}" for name in wanted - named]
    if claim.course:
        folder = root / "results" / claim.course["course"]
        names = [f"{row}-0.json" for row in claim.course["rows"]]
        dead += [f"{claim.course['course']}/{name}" for name in names if not (folder / name).is_file()]
    return dead


def _has_test(root: Path, node: str) -> bool:
    path, _, name = node.partition("::")
    if not (root / path).is_file():
        return False
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in ast.walk(tree))


def _has_page(root: Path, link: str) -> bool:
    return (root / "docs" / link.partition("#")[0]).is_file()


def _protocol_name(entry: Mapping[str, Any]) -> str:
    return f"{entry['suite']}-{entry['protocol']}" if "protocol" in entry else str(entry["suite"])
