"""The command ``list``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kernel_attention.errors import unknown
from kernel_attention_lab.options import List

if TYPE_CHECKING:
    from rich.table import Table


def list_command(options: List) -> int:
    """Print the tables of what there is."""
    from rich.console import Console

    what = _OTHER_NAMES.get(options.what or "", options.what)
    if what is not None and what not in _TABLES:
        raise unknown("list", what, _TABLES)
    tables = {name: _TABLES[name](options) for name in (_TABLES if what is None else (what,))}
    if options.format == "json":
        rows = {name: _table_records(table) for name, table in tables.items()}
        print(json.dumps(rows if what is None else rows[what], indent=1, ensure_ascii=False))
        return 0
    # A pipe has no width, and the default of 80 columns would break the widest table.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in tables.values():
        console.print(table)
    return 0


def _table_records(table: Table) -> list[dict[str, str]]:
    """The rows by the names of the columns."""
    names = [str(column.header).replace(" ", "_") for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    return [dict(zip(names, map(str, row), strict=True)) for row in rows]


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place == 0)  # a name is to be copied
    return table


def _attention_table(options: List) -> Table:
    from kernel_attention.mechanisms import list_attention

    table = _table(
        "attention (N tokens, p head width, s rank)",
        "name", "paper", "equation", "time", "memory", "causal", "cross", "decoding",
        "mixes tokens",
    )  # fmt: skip
    for mechanism in list_attention():
        table.add_row(
            mechanism.name, mechanism.paper, mechanism.equation, mechanism.time, mechanism.memory,
            "yes" if mechanism.causal else "no", "yes" if mechanism.cross else "no", mechanism.decoding,
            mechanism.mixes_tokens,
        )  # fmt: skip
    return table


def _contender_table(options: List) -> Table:
    from kernel_attention_lab.benchmarking import contender_names, find_contender

    table = _table("contenders of a benchmark, in addition to every mechanism", "name", "package", "device")
    for contender in map(find_contender, contender_names(with_mechanisms=False)):
        table.add_row(contender.name, contender.package, contender.device)
    return table


def _dataset_table(options: List) -> Table:
    from kernel_attention_lab.data import (
        POSITION_TASKS,
        list_decision_sets,
        list_image_sets,
        list_time_series,
    )
    from kernel_attention_lab.data.texts.text import list_texts
    from kernel_attention_lab.data.tokens.loading import list_token_sets

    table = _table(
        "data sets on this machine (other time series and Minari data sets are downloaded by name)",
        "name", "source", "path", "task",
    )  # fmt: skip
    listed = {
        "time_series": list_time_series,
        "images, segmentation": list_image_sets,
        "language": list_texts,
        "tokens": list_token_sets,
        "decisions": list_decision_sets,
    }
    for task, sets in listed.items():
        for info in sets(options.data_root):
            table.add_row(info.name, info.source, str(info.path or ""), task)
    for name in sorted(POSITION_TASKS):
        table.add_row(name, "generated", "", "sequence_labels")
    return table


def _recipe_table(options: List) -> Table:
    from kernel_attention_lab.runs.recipe_files import list_recipes, read_recipe
    from kernel_attention_lab.tasks.registry import make_recipe

    table = _table("recipes", "name", "task", "data set", "attention", "length")
    for name in list_recipes():
        recipe = make_recipe(read_recipe(name)[1])
        table.add_row(name, recipe.task_name, recipe.dataset, recipe.attention_name(), recipe.duration)
    return table


def _suite_table(options: List) -> Table:
    from kernel_attention_lab.evidence import list_suites, read_suite

    table = _table("suites", "name", "title", "source", "rows", "columns", "seeds")
    for name in list_suites():
        suite = read_suite(name)
        sizes = (len(suite.rows), len(suite.columns), len(suite.seeds))
        table.add_row(name, suite.title, suite.source, *map(str, sizes))
    return table


_OTHER_NAMES = {"mechanisms": "attention"}
_TABLES: dict[str, Callable[[List], Table]] = {
    "attention": _attention_table,
    "contenders": _contender_table,
    "datasets": _dataset_table,
    "recipes": _recipe_table,
    "suites": _suite_table,
}
