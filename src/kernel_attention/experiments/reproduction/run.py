"""Run what a suite lacks: train each cell, attack it where the suite says so, and keep its record.

Any number of processes may run one suite in the same folders: a cell belongs to the process that holds the
lock of its run folder, and a process goes on with the next cell where another holds one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kernel_attention.errors import InputError
from kernel_attention.experiments.reproduction.suite import Cell, Suite
from kernel_attention.experiments.results import ResultRecord, make_records, read_record, write_records
from kernel_attention.experiments.robustness.attack_plan import choose_steps
from kernel_attention.experiments.training.attack import attack_run
from kernel_attention.experiments.training.lock import HeldByAnother
from kernel_attention.experiments.training.run import train
from kernel_attention.experiments.training.saved import load_run

Told = Callable[[str], object]

_MACHINE = ("accelerator", "precision", "threads", "seeds", "plugins")  # may differ from the suite's


@dataclass(frozen=True)
class Places:
    """Where a suite works.

    Args:
        runs: the run folders, by column, row and seed.
        results: the records, in the suite's own folder below it.
        data_root: the folder that is searched first for data sets.
    """

    runs: Path
    results: Path
    data_root: str | None = None

    def record(self, suite: Suite, cell: Cell) -> Path:
        """The file of a cell's record."""
        folder = self.results / suite.records
        if len(suite.columns) > 1:
            folder /= cell.column
        return folder / f"{cell.row}-{cell.seed}.json"


class State(NamedTuple):
    """What a cell lacks: its training, and steps of attacks."""

    cell: Cell
    training: bool
    attacks: tuple[AttackStep, ...]

    @property
    def is_done(self) -> bool:
        """Whether the cell's record is complete."""
        return not self.training and not self.attacks


def find_state(suite: Suite, cell: Cell, places: Places) -> State:
    """What the record of a cell lacks.

    Raises:
        InputError: for a record that cannot be read, or that was made with other keys.
    """
    plans = suite.attack_plans(cell.row)
    steps = tuple(choose_steps(plans=plans)) if plans else ()
    path = places.record(suite, cell)
    if not path.is_file():
        return State(cell, True, steps)
    record = read_record(path)
    _require_same_recipe(suite, cell, record, path)
    return State(cell, False, tuple(step for step in steps if not has_step(record, step)))


def run_cell(suite: Suite, cell: Cell, places: Places, told: Told) -> bool:
    """Do what a cell lacks, and write its record after each part. False where another process works on it.

    Raises:
        InputError: for bad data or a bad recipe, and for a record whose run folder is gone.
    """
    found = find_state(suite, cell, places)
    if found.is_done:
        return True
    name, recipe = suite.recipe(cell)
    folder = places.runs / suite.name / cell.folder
    is_trained = (folder / "summary.json").is_file()
    if not is_trained and not found.training:
        raise InputError(
            f"record {places.record(suite, cell)}: lacks attacks, and the weights in {folder} are gone; "
            "delete the record to train again"
        )
    try:
        if not is_trained:
            told("training")
            resume = (folder / "config.yaml").is_file()
            train(recipe, folder, name=name, data_root=places.data_root, resume=resume, progress=False)
        _keep(suite, cell, places, folder)
        if found.attacks:
            attack_run(load_run(folder), found.attacks, data_root=places.data_root, told=told)
            _keep(suite, cell, places, folder)
    except HeldByAnother:
        return False
    return True


def _keep(suite: Suite, cell: Cell, places: Places, folder: Path) -> None:
    path = places.record(suite, cell)
    write_records(make_records(folder, label=cell.row), path.parent, replace=True)


def _require_same_recipe(suite: Suite, cell: Cell, record: ResultRecord, path: Path) -> None:
    """InputError unless the record was made with the cell's keys; machine and seed aside."""
    _, recipe = suite.recipe(cell)
    expected = recipe.keys()
    for key, value in record.config.items():
        if key not in _MACHINE and expected.get(key, value) != value:
            raise InputError(
                f"record {path}: was made with {key}={value!r}, suite {suite.name} has "
                f"{expected.get(key)!r}; delete the record to train again"
            )
