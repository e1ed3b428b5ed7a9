"""A suite: a table of a paper as data. Rows are mechanisms, columns are recipes; a cell has several seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import DIFFERENT, Count, check_fields, field_names
from kernel_attention_lab.families import (
    FILE_NAME,
    FileEntry,
    find_file,
    read_entries,
    read_entry,
    recipes_dir,
)
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.tasks.recipe import BaseRecipe, Protocol, Seed
from kernel_attention_lab.tasks.registry import make_recipe

TRANSFER = "transfer"
_MARK = "$"

Limits = dict[Literal["rows", "seeds"], list[str] | list[Seed]]
"""The rows and the seeds that a plan of attacks is run on."""
Place = dict[Literal["suite", "row", "column"], str]
"""A row and a column of a suite."""
Quantity = Literal["spectrum", "distance", "projection", "objective"]

Figures = dict[str, dict[str, float | list[float]]]
"""Values that a source reports, by row and column: a number, or [mean, deviation]."""


class Cell(NamedTuple):
    """One training of a suite."""

    row: str
    column: str
    seed: int

    def __str__(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}"


class Start(NamedTuple):
    """The cell of a suite whose trained model another training starts from."""

    suite: Suite
    cell: Cell


class _Plan(NamedTuple):
    """A plan of attacks with the rows and seeds that it is run on."""

    name: str
    rows: Sequence[Any]
    seeds: Sequence[Any] | None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The content of a suite's file.

    Args:
        name: the file's name without its suffix.
        title: of the page.
        source: paper and table whose figures are compared with.
        records: the folder of its records below ``results``.
        columns: the recipe of each column, by the column's name.
        rows: for each row, the recipe's keys that make it.
        values: what differs from column to column, by a name of its own and the column. ``$name`` in the keys
            of a row stands for the value of the cell's column.
        keys: the recipe's keys of every cell.
        column_keys: the keys of a column's cells, by its name.
        protocol: of every cell; without one, that of its recipe. ``with_protocol`` gives the suite another.
        reported_protocol: that of the source, as far as it is known.
        seeds: trained in every cell.
        metric: a figure of ``evaluation.json``, or ``val_accuracy``, the best validation accuracy of a
            training counted in steps; those named accuracy are printed in per cent.
        larger_is_better: whether the best figure of a column is the largest.
        diagnose: quantities of ``kernel_attention.analysis.diagnose`` that are measured on every trained
            model. Their figures, means over the layers, are named in ``further`` as other figures are.
        diagnosed_cases: the number of test cases that they are measured on.
        course: figures of the training whose course over the epochs the records keep.
        attack: plans of ``kernel-attention attack`` that are run on every cell after its training; a plan
            given as ``{plan: rows}`` is run on these rows alone, and one given as
            ``{plan: {rows: [..], seeds: [..]}}`` on these rows and seeds, all of them where a list is not
            given. ``transfer`` is FGSM and PGD against the model of ``transfer_from``.
        transfer_from: the row whose model, with the same seed, transferred attacks work against.
        starts: for a row whose recipes have the key ``start_from``, the row and the column of the suite whose
            trained model, with the same seed, it starts from. What is not trained yet is trained first.
        baselines: the row that a row is compared with, or a list of rows; ``default`` for the rows not named.
        reported: the source's figures of the metric, by row and column: a number, or [mean, deviation]. Those
            of accuracies are in per cent.
        further: other figures of ``evaluation.json`` that are shown, with what the source reports of them.
        remarks: what a reader must know to compare, a sentence each.
    """

    name: str
    title: str
    source: str
    records: str
    columns: dict[str, str]
    rows: dict[str, dict[str, Any]]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    column_keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    protocol: Protocol | None = None
    reported_protocol: Protocol | None = None
    seeds: Annotated[list[Seed], *DIFFERENT] = field(default_factory=lambda: [0, 1, 2])
    metric: str = "accuracy"
    larger_is_better: bool = True
    diagnose: list[Quantity] = field(default_factory=list)
    diagnosed_cases: Count = 16
    course: list[str] = field(default_factory=list)
    attack: list[str | dict[str, list[str] | Limits]] = field(default_factory=list)
    transfer_from: str | None = None
    starts: dict[str, Place] = field(default_factory=dict)
    baselines: dict[str, str | list[str]] = field(default_factory=dict)
    reported: Figures = field(default_factory=dict)
    further: dict[str, Figures] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, names in (("row", self.rows), ("column", self.columns)):
            if not names:
                raise InputError(f"suite {self.name}: has no {kind}s")
            for name in names:
                if FILE_NAME.fullmatch(name) is None:
                    raise InputError(
                        f"suite {self.name}: {kind} {name!r} must be letters, digits and . _ + -, as it "
                        "names files"
                    )
        reported = [self.reported, *self.further.values()]
        named = [row for figures in reported for row in figures]
        named += [row for row in self.baselines if row != "default"]
        named += [row for given in self.baselines.values() for row in _several(given)]
        plans = list(self._plans())
        named += [*self.starts, *(row for plan in plans for row in plan.rows)]
        named += [] if self.transfer_from is None else [self.transfer_from]
        if self.transfer_from is None and any(plan.name == TRANSFER for plan in plans):
            raise InputError(f"suite {self.name}: plan {TRANSFER} needs the key transfer_from")
        for seed in (seed for plan in plans for seed in plan.seeds or ()):
            if seed not in self.seeds:
                raise InputError(f"suite {self.name}: attack names seed {seed!r} (accepted: {self.seeds})")
        for row in named:
            if row not in self.rows:
                raise unknown(f"row of suite {self.name}", row, self.rows)
        for row, place in self.starts.items():
            if set(place) != {"suite", "row", "column"}:
                raise InputError(
                    f"suite {self.name}: the start of row {row} has the keys {sorted(place)} (accepted: "
                    "suite, row and column)"
                )
        for figure in (cell for figures in reported for row in figures.values() for cell in row.values()):
            if isinstance(figure, list) and len(figure) != 2:
                raise InputError(
                    f"suite {self.name}: reported {figure} must be a number, or [mean, deviation]"
                )
        columns = [column for figures in reported for row in figures.values() for column in row]
        columns += [*self.column_keys, *(column for values in self.values.values() for column in values)]
        for column in columns:
            if column not in self.columns:
                raise unknown(f"column of suite {self.name}", column, self.columns)

    def cells(
        self, rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> Iterator[Cell]:
        """The cells with these rows, columns and seeds (all by default), the first seed of every cell first.

        Raises:
            InputError: for a row or a column that the suite does not have.
        """
        for kind, given, names in (("row", rows, self.rows), ("column", columns, self.columns)):
            for name in given:
                if name not in names:
                    raise unknown(f"{kind} of suite {self.name}", name, names)
        for seed in seeds or self.seeds:
            for column in columns or self.columns:
                for row in rows or self.rows:
                    yield Cell(row, column, seed)

    def recipe(self, cell: Cell) -> tuple[str, BaseRecipe]:
        """The name of a cell's recipe, and the recipe.

        Raises:
            InputError: for keys that make no recipe, and for a ``$name`` without a value for the column.
        """
        recipe = self.columns[cell.column]
        _, keys = read_recipe(recipe)
        return recipe, make_recipe(keys | self.keys_of(cell) | {"seeds": [cell.seed]})

    def keys_of(self, cell: Cell) -> dict[str, Any]:
        """The keys that the suite itself sets in a cell's recipe.

        Raises:
            InputError: for a ``$name`` without a value for the column.
        """
        own = self.keys | self.column_keys.get(cell.column, {}) | self._filled(self.rows[cell.row], cell)
        return own if self.protocol is None else own | {"protocol": self.protocol}

    def start(self, cell: Cell) -> Start | None:
        """The cell whose trained model a cell's training starts from.

        Raises:
            InputError: for an unknown suite, row or column.
        """
        place = self.starts.get(cell.row)
        if place is None:
            return None
        suite = read_suite(place["suite"])
        (other,) = suite.cells([place["row"]], [place["column"]], [cell.seed])
        return Start(suite, other)

    def with_protocol(self, protocol: str | None) -> Suite:
        """The suite with another protocol, whose runs and records have folders of their own.

        Raises:
            InputError: for an unknown protocol.
        """
        if protocol is None or protocol == self.protocol:
            return self
        kept = {name: f"{getattr(self, name)}-{protocol}" for name in ("name", "records")}
        return replace(self, **kept, protocol=protocol)  # type: ignore[arg-type]  # checked by check_fields

    def figures(self) -> dict[str, Figures]:
        """The source's values, by the name of the figure; the suite's metric comes first."""
        return {self.metric: self.reported, **self.further}

    def compared_with(self) -> dict[str, list[str]]:
        """By row, the rows that it is compared with."""
        given = {row: self.baselines.get(row, self.baselines.get("default", [])) for row in self.rows}
        return {row: [other for other in _several(others) if other != row] for row, others in given.items()}

    def attack_plans(self, cell: Cell) -> list[str]:
        """The plans of attacks that are run on a cell."""
        return [
            name
            for name, rows, seeds in self._plans()
            if cell.row in rows and (seeds is None or cell.seed in seeds)
        ]

    def _plans(self) -> Iterator[_Plan]:
        for plan in self.attack:
            for name, cells in plan.items() if isinstance(plan, dict) else [(plan, {})]:
                limits = {"rows": cells} if isinstance(cells, list) else cells
                yield _Plan(name, limits.get("rows", list(self.rows)), limits.get("seeds"))

    def _filled(self, keys: Any, cell: Cell) -> Any:
        """The keys with the values that they name."""
        if isinstance(keys, Mapping):
            return {key: self._filled(entry, cell) for key, entry in keys.items()}
        if isinstance(keys, list):
            return [self._filled(entry, cell) for entry in keys]
        if not isinstance(keys, str) or not keys.startswith(_MARK):
            return keys
        values = self.values.get(keys.removeprefix(_MARK))
        if values is None:
            raise unknown(f"value of row {cell.row}", keys, [f"{_MARK}{name}" for name in self.values])
        if cell.column not in values:
            raise InputError(f"suite {self.name}: {keys} of row {cell.row} has no value for {cell.column}")
        return values[cell.column]


def list_suites() -> dict[str, Path]:
    """Name and file of every shipped suite; a family has one file."""
    return {name: location.path for name, location in _shipped_suites().items()}


def read_suite(name: str) -> Suite:
    """A shipped suite by name; a YAML file by path; or, in the file of a family, ``family.yaml/entry``.

    Raises:
        InputError: for an unknown name, and for a file that is no suite.
    """
    shipped = _shipped_suites()
    location = shipped.get(name) or find_file(name)
    if location is None:
        raise unknown("suite", name, shipped, listing="kernel-attention list suites; or give a YAML file")
    content = read_entry(location, "suite", name)
    accepted = [key for key in field_names(Suite) if key != "name"]
    for key in content:
        if key not in accepted:
            raise unknown(f"key of {location}", key, accepted)
    missing = [key for key in ("title", "source", "records", "columns", "rows") if key not in content]
    if missing:
        raise InputError(f"{location}: has no key {missing[0]}")
    try:
        return Suite(name=location.name, **content)
    except InputError as error:
        raise InputError(f"{location}: {error}") from None


def _several(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _shipped_suites() -> dict[str, FileEntry]:
    files = (recipes_dir() / "suites").glob("*.yaml")
    locations = [FileEntry(path, entry) for path in files for entry in read_entries(path, "suite")]
    return {location.name: location for location in sorted(locations, key=lambda location: location.name)}
