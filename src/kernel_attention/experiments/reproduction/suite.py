"""A suite: a table of a paper as data. Rows are mechanisms, columns are recipes; a cell has several seeds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.plain_yaml import read_yaml
from kernel_attention.experiments.settings import DIFFERENT, check_fields, field_names
from kernel_attention.experiments.training.recipe import (
    BaseRecipe,
    Seed,
    make_recipe,
    read_recipe,
    recipes_dir,
)

TRANSFER = "transfer"
_NAME = re.compile(r"\w[\w.+-]*")


class Cell(NamedTuple):
    """One training of a suite."""

    row: str
    column: str
    seed: int

    def __str__(self) -> str:
        return f"{self.row}, {self.column}, seed {self.seed}"


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
        keys: the recipe's keys of every cell.
        column_keys: the keys of a column's cells, by its name.
        seeds: trained in every cell.
        metric: a figure of ``evaluation.json``; those named accuracy are printed in per cent.
        larger_is_better: whether the best figure of a column is the largest.
        attack: plans of ``kernel-attention attack`` that are run on every cell after its training; a plan
            given as ``{plan: rows}`` is run on these rows alone. ``transfer`` is FGSM and PGD against the
            model of ``transfer_from``.
        transfer_from: the row whose model, with the same seed, transferred attacks work against.
        baselines: the row that a row is compared with; ``default`` for the rows not named.
        reported: the source's figures by row and column: a number, or [mean, deviation].
        remarks: what a reader must know to compare, a sentence each.
    """

    name: str
    title: str
    source: str
    records: str
    columns: dict[str, str]
    rows: dict[str, dict[str, Any]]
    keys: dict[str, Any] = field(default_factory=dict)
    column_keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: Annotated[list[Seed], *DIFFERENT] = field(default_factory=lambda: [0, 1, 2])
    metric: str = "accuracy"
    larger_is_better: bool = True
    attack: list[str | dict[str, list[str]]] = field(default_factory=list)
    transfer_from: str | None = None
    baselines: dict[str, str] = field(default_factory=dict)
    reported: dict[str, dict[str, float | list[float]]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, names in (("row", self.rows), ("column", self.columns)):
            if not names:
                raise InputError(f"suite {self.name}: has no {kind}s")
            for name in names:
                if _NAME.fullmatch(name) is None:
                    raise InputError(
                        f"suite {self.name}: {kind} {name!r} must be letters, digits and . _ + -, as it "
                        "names files"
                    )
        named = [*self.reported, *(row for row in self.baselines if row != "default")]
        named += [*self.baselines.values(), *(row for plan in self.attack if isinstance(plan, dict)
                                              for rows in plan.values() for row in rows)]  # fmt: skip
        named += [] if self.transfer_from is None else [self.transfer_from]
        if self.transfer_from is None and any(TRANSFER in self.attack_plans(row) for row in self.rows):
            raise InputError(f"suite {self.name}: plan {TRANSFER} needs the key transfer_from")
        for row in named:
            if row not in self.rows:
                raise unknown(f"row of suite {self.name}", row, self.rows)
        for column in [*self.column_keys, *(name for row in self.reported.values() for name in row)]:
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
        """The name of a cell's recipe, and the recipe."""
        recipe = self.columns[cell.column]
        _, keys = read_recipe(recipe)
        own = self.keys | self.column_keys.get(cell.column, {}) | self.rows[cell.row]
        return recipe, make_recipe(keys | own | {"seeds": [cell.seed]})

    def baseline(self, row: str) -> str | None:
        """The row that ``row`` is compared with."""
        other = self.baselines.get(row, self.baselines.get("default"))
        return None if other == row else other

    def attack_plans(self, row: str) -> list[str]:
        """The plans of attacks that are run on a row."""
        return [
            name
            for plan in self.attack
            for name, rows in (plan.items() if isinstance(plan, dict) else [(plan, list(self.rows))])
            if row in rows
        ]


def list_suites() -> dict[str, Path]:
    """Name and file of every shipped suite."""
    return {path.stem: path for path in sorted((recipes_dir() / "suites").glob("*.yaml"))}


def read_suite(name: str) -> Suite:
    """A shipped suite by name, or a YAML file by path.

    Raises:
        InputError: for an unknown name, and for a file that is no suite.
    """
    shipped = list_suites()
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise unknown("suite", name, shipped, listing="kernel-attention list suites; or give a YAML file")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected lines of the form key: value, found {type(content).__name__}")
    accepted = [key for key in field_names(Suite) if key != "name"]
    for key in content:
        if key not in accepted:
            raise unknown(f"key of {path}", key, accepted)
    missing = [key for key in ("title", "source", "records", "columns", "rows") if key not in content]
    if missing:
        raise InputError(f"{path}: has no key {missing[0]}")
    try:
        return Suite(name=path.stem, **content)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
