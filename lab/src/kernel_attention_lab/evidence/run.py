"""Run what a suite lacks: train each cell, attack it where the suite says so, and keep its record.

Any number of processes may run one suite in the same folders: a cell belongs to the process that holds the
lock of its run folder, and a process goes on with the next cell where another holds one.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.fetching import (
    NotDownloadedError,
    NotGeneratedError,
    without_fetching,
)
from kernel_attention_lab.evidence.records import ResultRecord, make_records, read_record, write_records
from kernel_attention_lab.evidence.suite import TRANSFER, Cell, Start, Suite
from kernel_attention_lab.lock import HeldByAnother, locked
from kernel_attention_lab.robustness.attack_plan import AttackStep, choose_steps
from kernel_attention_lab.robustness.shifts import split_plans
from kernel_attention_lab.runs.analyze import analyze_run
from kernel_attention_lab.runs.attack import attack_run
from kernel_attention_lab.runs.run import machine, train
from kernel_attention_lab.runs.saved import SavedRun, load_run
from kernel_attention_lab.tasks.registry import experiment_class, make_recipe

OnProgress = Callable[[str], object]

# Keys that a record may have otherwise than its suite, which names what a training starts from by ``starts``.
_OF_THE_MACHINE = ("accelerator", "precision", "threads", "seeds", "loggers", "plugins", "start_from")


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

    def run(self, suite: Suite, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self._column(self.runs / suite.name, suite, cell) / f"{cell.row}-{cell.seed}"

    def record(self, suite: Suite, cell: Cell) -> Path:
        """The file of a cell's record."""
        return self._column(self.results / suite.records, suite, cell) / f"{cell.row}-{cell.seed}.json"

    def _column(self, folder: Path, suite: Suite, cell: Cell) -> Path:
        return folder / cell.column if len(suite.columns) > 1 else folder


class CellState(NamedTuple):
    """The missing parts of the record of a cell.

    Attributes:
        cell: the cell.
        training: its training.
        diagnosis: figures of the suite's ``diagnose``.
        steps: steps of attacks.
        shifts: see ``split_plans``.
    """

    cell: Cell
    training: bool
    diagnosis: bool
    steps: tuple[AttackStep, ...]
    shifts: tuple[str, ...]

    @property
    def is_done(self) -> bool:
        """Return whether the record is complete."""
        return not (self.training or self.diagnosis or self.steps or self.shifts)


class Duration(NamedTuple):
    """How long trainings took.

    Attributes:
        cell: what was trained.
        seconds: of one training.
        accelerator: what they ran on, as records name it.
    """

    cell: Cell
    seconds: float
    accelerator: str


class Estimate(NamedTuple):
    """The costs of a cell.

    Attributes:
        state: what its record lacks.
        seconds: what the trainings most like its own tell; None where it has none to do, or no record tells.
        difference: what sets those apart, in words: other data, another accelerator.
        missing: why the cell cannot run, or what it downloads first.
    """

    state: CellState
    seconds: float | None
    difference: str | None
    missing: str | None


def find_state(suite: Suite, cell: Cell, places: Places) -> CellState:
    """The missing parts of the record of a cell.

    Raises:
        InputError: for a record that cannot be read, or that was made with other keys.
    """
    plans, shifts = split_plans(suite.attack_plans(cell))
    names = [plan for plan in plans if plan != TRANSFER]
    steps = choose_steps(plans=names, transfer=TRANSFER in plans) if plans else []
    path = places.record(suite, cell)
    if not path.is_file():
        return CellState(cell, True, bool(suite.diagnose), tuple(steps), tuple(shifts))
    record = read_record(path)
    _require_same_recipe(suite, cell, record, path)
    found = record.figures.get("robustness", {})
    return CellState(
        cell,
        False,
        bool(set(suite.diagnose) - set(record.figures.get("diagnostics", {}).get("quantities", []))),
        tuple(step for step in steps if not _has_step(found.get("attacks", []), step)),
        tuple(name for name in shifts if name not in found),
    )


def run_cell(suite: Suite, cell: Cell, places: Places, on_progress: OnProgress) -> bool:
    """Do what a cell lacks, and write its record after each part. False where another process works on it.

    Raises:
        InputError: for bad data or a bad recipe, and for a record whose run folder is gone.
    """
    lacking = find_state(suite, cell, places)
    if lacking.is_done:
        return True
    name, recipe = suite.recipe(cell)
    folder = places.run(suite, cell)
    is_trained = (folder / "summary.json").is_file()
    if not is_trained and not lacking.training:
        raise InputError(
            f"record {places.record(suite, cell)}: lacks {_lacking(lacking)}, and the weights in {folder} "
            "are gone; delete the record to train again"
        )
    try:
        if not is_trained:
            if (start := suite.start(cell)) is not None:
                if not run_cell(*start, places, on_progress):
                    return False
                recipe = make_recipe(recipe.keys() | {"start_from": _weights(start, places)})
            train(
                recipe,
                folder,
                name=name,
                data_root=places.data_root,
                resume=(folder / "config.yaml").is_file(),
                progress=False,
                begun=lambda: on_progress(f"{cell}: training, {recipe.duration}"),
                on_row=_seldom(lambda row: on_progress(f"{cell}: {row['epoch']} of {recipe.rounds} rounds")),
            )
        _keep(suite, cell, places, folder)
        if lacking.diagnosis:
            _diagnose(suite, cell, places, folder, on_progress)
        if lacking.steps or lacking.shifts:
            attack_run(
                load_run(folder),
                lacking.steps,
                transfer=_twin(suite, cell, places, lacking.steps),
                members=_members(suite, cell, places) if "ensemble" in lacking.shifts else (),
                shifts=lacking.shifts,
                data_root=places.data_root,
                on_progress=lambda line: on_progress(f"{cell.row}, {cell.column}, {line}"),
            )
            _keep(suite, cell, places, folder)
    except HeldByAnother:
        return False
    return True


def _seldom(tell: Callable[[Any], object], seconds: float = 60.0) -> Callable[[Any], None]:
    """A function that passes on what it is given, where this many seconds have passed since the last time."""
    last = time.monotonic()

    def passed(given: Any) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            tell(given)

    return passed


def _diagnose(suite: Suite, cell: Cell, places: Places, folder: Path, on_progress: OnProgress) -> None:
    with locked(folder):
        if not find_state(suite, cell, places).diagnosis:  # another process has just done it
            return
        on_progress(f"{cell}: diagnosing")
        run = load_run(folder)
        experiment = run.experiment(places.data_root)
        analyze_run(run, experiment, cases=suite.diagnosed_cases, quantities=suite.diagnose)
        _keep(suite, cell, places, folder)


def _weights(start: Start, places: Places) -> str:
    """The run folder of a trained start."""
    folder = places.run(*start)
    if not (folder / "summary.json").is_file():
        raise InputError(
            f"it starts from {start.cell} of suite {start.suite.name}, whose weights in {folder} are gone; "
            f"delete the record {places.record(*start)} to train it again"
        )
    return str(folder)


def _lacking(state: CellState) -> str:
    """The missing parts of a trained cell, in words."""
    parts = [("diagnostics", state.diagnosis), ("attacks", bool(state.steps or state.shifts))]
    return " and ".join(name for name, lacks in parts if lacks)


def estimates(suite: Suite, cells: Sequence[Cell], places: Places) -> list[Estimate]:
    """The missing parts of cells, why a cell cannot run, and how long trainings like its own took."""
    known, here = _durations(suite, places), _accelerator(machine())
    data: dict[tuple[str, str], str | None] = {}
    found = []
    for cell in cells:
        state = find_state(suite, cell, places)
        seconds, difference = _expected(cell, known, here) if state.training else (None, None)
        missing = None if state.is_done else _missing(suite, cell, places, data)
        found.append(Estimate(state, seconds, difference, missing))
    return found


def _accelerator(line: str) -> str:
    """The part of the line about a machine that decides how long a training takes."""
    return line.rpartition(", ")[2]


def _durations(suite: Suite, places: Places) -> list[Duration]:
    """The contents of the records of a suite."""
    found = []
    for cell in suite.cells():
        if (path := places.record(suite, cell)).is_file():
            record = read_record(path)
            if (seconds := record.budget.get("seconds")) is not None:
                found.append(Duration(cell, seconds, _accelerator(record.machine)))
    return found


def _expected(cell: Cell, known: Sequence[Duration], here: str) -> tuple[float | None, str | None]:
    """The seconds that the trainings most like a cell's lead to expect, and what sets those apart.

    The accelerator counts most, then the column, whose data set the scale, then the row; one of the last
    two must agree. Other rows of the column tell the row's time through the columns that both have.
    """
    alike: dict[tuple[bool, bool, bool], list[Duration]] = defaultdict(list)
    for each in known:
        column, row = each.cell.column == cell.column, each.cell.row == cell.row
        if row or column:
            alike[each.accelerator == here, column, row].append(each)
    if not alike:
        return None, None
    has_accelerator, has_column, has_row = most = max(alike)
    differences = [] if has_column else ["on other data"]
    if not has_accelerator:
        accelerators = sorted({each.accelerator for each in alike[most]})
        differences.append(f"with {' or '.join(accelerators)}")
    if has_row:
        seconds = fmean(each.seconds for each in alike[most])
    else:
        comparable = [each for each in known if (each.accelerator == here) == has_accelerator]
        seconds = _from_other_rows(cell, comparable)
    return seconds, " ".join(differences) or None


def _from_other_rows(cell: Cell, known: Sequence[Duration]) -> float:
    """The seconds of a cell whose column has records of other rows only.

    A row's factor times a column's factor, fitted to the logarithms of all records by least squares. A row
    without records has the factor 1.
    """
    effects = sorted({effect for each in known for effect in _effects(each.cell)})
    design = np.array([[effect in _effects(each.cell) for effect in effects] for each in known], dtype=float)
    logarithms = np.log([max(each.seconds, 0.1) for each in known])
    middle = logarithms.mean()
    fitted = dict(zip(effects, np.linalg.lstsq(design, logarithms - middle)[0], strict=True))
    return float(np.exp(middle + sum(fitted.get(effect, 0.0) for effect in _effects(cell))))


def _effects(cell: Cell) -> tuple[tuple[str, str], tuple[str, str]]:
    """The key of a cell's time: its row and its column."""
    return ("row", cell.row), ("column", cell.column)


def _missing(suite: Suite, cell: Cell, places: Places, data: dict[tuple[str, str], str | None]) -> str | None:
    """Why a cell cannot run: its recipe is wrong, or its data are missing, or so it is where it starts.

    Data that its first training downloads are named too. The cells of a column have the same data, whose
    loading can take minutes. ``data`` is what is known of them by suite and column, and is added to.
    """
    try:
        _, recipe = suite.recipe(cell)
        start = suite.start(cell)
    except InputError as error:
        return str(error)
    if (column := (suite.name, cell.column)) not in data:
        data[column] = None
        try:
            with without_fetching():
                experiment_class(recipe.task_name)(recipe, places.data_root)
        except NotGeneratedError:
            pass  # the first training generates them
        except (InputError, NotDownloadedError) as error:
            data[column] = str(error)
    if data[column] is None and start is not None and find_state(*start, places).training:
        return _missing(*start, places, data)
    return data[column]


def untrained_starts(suite: Suite, cells: Sequence[Cell], places: Places) -> list[Start]:
    """The cells of other suites that are trained before these cells, each once."""
    waiting = [cell for cell in cells if find_state(suite, cell, places).training]
    found = {start.cell: start for cell in waiting if (start := suite.start(cell)) is not None}
    return [start for start in found.values() if find_state(*start, places).training]


def _twin(suite: Suite, cell: Cell, places: Places, steps: Sequence[AttackStep]) -> SavedRun | None:
    """The run against which transferred attacks work; None where there are none."""
    if suite.transfer_from is None or not any(step.transferred for step in steps):
        return None
    twin = cell._replace(row=suite.transfer_from)
    folder = places.run(suite, twin)
    if not (folder / "summary.json").is_file():
        raise InputError(f"transferred attacks need the run {folder} ({twin}), which is not trained yet")
    return load_run(folder)


def _members(suite: Suite, cell: Cell, places: Places) -> list[SavedRun]:
    """The runs of a cell's row and column with the suite's other seeds."""
    found = []
    for other in suite.cells([cell.row], [cell.column]):
        folder = places.run(suite, other)
        if other != cell and not (folder / "summary.json").is_file():
            raise InputError(f"an ensemble needs the run {folder} ({other}), which is not trained yet")
        found += [] if other == cell else [load_run(folder)]
    return found


def _has_step(attacks: Sequence[dict[str, Any]], step: AttackStep) -> bool:
    """Return whether a step is among the attacks of a record; a small test split gives it fewer images."""
    wanted = step.record()
    return any(
        entry["cases"] <= step.cases
        and all(entry.get(key) == value for key, value in wanted.items() if key != "cases")
        for entry in attacks
    )


def _keep(suite: Suite, cell: Cell, places: Places, folder: Path) -> None:
    path = places.record(suite, cell)
    records = make_records(folder, label=cell.row, keys=sorted(suite.keys_of(cell)), course=suite.course)
    write_records(records, path.parent, replace=True)


def _require_same_recipe(suite: Suite, cell: Cell, record: ResultRecord, path: Path) -> None:
    """InputError unless a record has the cell's recipe, by name and version, and the keys that suites set.

    Its other keys are there to be read. They may be defaults, which can change.
    """
    name, recipe = suite.recipe(cell)
    expected = recipe.keys()
    compared = {key for key in (*suite.keys_of(cell), *record.keys) if key not in _OF_THE_MACHINE}
    pairs = [(f"{key}=", record.config.get(key), expected.get(key)) for key in sorted(compared)]
    pairs += [
        ("version=", record.config.get("version", 1), recipe.version),
        ("recipe ", _portable(record.recipe), _portable(name)),
    ]
    for what, found, wanted in pairs:
        if found != wanted:
            raise InputError(
                f"record {path}: was made with {what}{found!r}, suite {suite.name} has {wanted!r}; delete "
                "the record to train again"
            )


def _portable(name: str) -> str:
    """A recipe's name without the folder of its file."""
    folder, suffix, entry = name.rpartition(".yaml")
    return Path(folder).name + entry if suffix else name
