"""A sweep folder: its plan, and the study with the state of every point.

Every point is a trial of an Optuna study, with the point's number. All trials are made at the beginning, so
the study never has more of them than the plan, however many processes work on it. Those of a grid or of
random draws have their values from the beginning. TPE chooses a trial's values when the trial begins, from
the trials that are complete by then. Its random numbers depend on the sweep's seed and the trial's number
alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState

from kernel_attention.atomic import is_unfinished
from kernel_attention.errors import InputError, writing
from kernel_attention_lab.lock import HeldByAnother, locked
from kernel_attention_lab.reporting.sweep_record import SweepPoint
from kernel_attention_lab.runs.files import write_json
from kernel_attention_lab.sweeping.plan import (
    PLAN_NAME,
    SweepPlan,
    plan_as_json,
    read_plan,
    require_same_plan,
)
from kernel_attention_lab.sweeping.space import Choices, Range, Space, grid_points

JOURNAL_NAME = "study.journal"
POINTS = "points"

_STUDY = "sweep"
_RANDOM_FIRST = 10  # points that TPE draws at random before it has figures to learn from
_OPENING = 120.0  # seconds that another process may take to open the folder
_STATES = {TrialState.COMPLETE: "complete", TrialState.FAIL: "failed", TrialState.RUNNING: "begun"}


class SweepFolder:
    """An open sweep folder.

    Args:
        folder: which holds a plan.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = read_plan(folder)
        self._distributions = {key: _distribution(entry) for key, entry in self.plan.space.items()}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # Absolute, because the lock is a link to the journal, which a relative name would not reach.
        path = str((folder / JOURNAL_NAME).resolve())
        self._lock = JournalFileSymlinkLock(path)
        self._storage = JournalStorage(JournalFileBackend(path, self._lock))

    def fill(self) -> None:
        """Make the study and the trials that it lacks. Only one process may do so at a time."""
        self._drop_torn_line()
        directions = optuna.study.StudyDirection
        direction = directions.MAXIMIZE if self.plan.metric.larger_is_better else directions.MINIMIZE
        study = optuna.create_study(
            storage=self._storage, study_name=_STUDY, direction=direction, load_if_exists=True
        )
        begun = len(study.get_trials(deepcopy=False))
        points = list(grid_points(self.plan.space)) if self.plan.sampler == "grid" else []
        for number in range(begun, self.plan.points):
            study.enqueue_trial(_labels(self.plan.space, points[number]) if points else self._drawn(number))

    def trials(self) -> list[FrozenTrial]:
        """All trials in the order of their numbers."""
        return self._study().get_trials(deepcopy=False)

    def unfinished(self) -> list[int]:
        """The numbers of the points that are neither complete nor failed."""
        return [trial.number for trial in self.trials() if not trial.state.is_finished()]

    def begin(self, number: int) -> bool:
        """Mark a waiting point as begun; whether this process may run the point.

        False where the point is finished, or another process began it just now.
        """
        trial = self.trials()[number]
        if trial.state == TrialState.RUNNING:  # of a process that died, since the caller holds its lease
            return True
        if trial.state.is_finished():
            return False
        return self._storage.set_trial_state_values(self._id(number), TrialState.RUNNING)

    def keys(self, number: int) -> dict[str, Any]:
        """The values of a point that has begun; TPE chooses those that are not chosen yet."""
        study = self._study()
        study.sampler = optuna.samplers.TPESampler(
            seed=_seed(self.plan, number), multivariate=True, n_startup_trials=_RANDOM_FIRST
        )
        trial = optuna.trial.Trial(study, self._id(number))
        return {key: _suggest(trial, key, entry) for key, entry in self.plan.space.items()}

    def complete(self, number: int, values: list[float]) -> None:
        """Record a point's figures, one a seed. Nothing changes where the point is finished."""
        self._finish(number, {"values": values}, TrialState.COMPLETE, statistics.fmean(values))

    def fail(self, number: int, reason: str) -> None:
        """Record that a point cannot be run."""
        self._finish(number, {"error": reason}, TrialState.FAIL, None)

    def points(self) -> list[SweepPoint]:
        """The state of every point."""
        return [
            SweepPoint(
                trial.number,
                _known_keys(self.plan.space, trial),
                _STATES.get(trial.state, "waiting"),
                trial.value if trial.state == TrialState.COMPLETE else None,
                trial.user_attrs.get("values", []),
                trial.user_attrs.get("error"),
            )
            for trial in self.trials()
        ]

    def importances(self) -> dict[str, float] | None:
        """The share of each key in the variance of the metric, by Optuna's fANOVA; None with too few points.

        A key with one value has no share.
        """
        done = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE]
        varied = [key for key in self.plan.space if len({str(trial.params[key]) for trial in done}) > 1]
        if len(done) < 4 or len(varied) < 2 or len({trial.value for trial in done}) < 2:
            return None
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self.plan.sampler_seed)
        found = optuna.importance.get_param_importances(self._study(), evaluator=evaluator, params=varied)
        return {key: float(value) for key, value in found.items()}

    def data_root(self, given: str | None = None) -> str | None:
        """``given``, or else the data root of the sweep's start if it is a folder on this machine."""
        root = given or self.plan.data_root
        return root if given or (root is not None and Path(root).is_dir()) else None

    def point_folder(self, number: int) -> Path:
        """The run folder of a point."""
        return self.folder / POINTS / f"{number:03d}"

    def _study(self) -> optuna.Study:
        return optuna.load_study(study_name=_STUDY, storage=self._storage)

    def _id(self, number: int) -> int:
        study = self._storage.get_study_id_from_name(_STUDY)
        return self._storage.get_trial_id_from_study_id_trial_number(study, number)

    def _finish(
        self, number: int, attributes: dict[str, Any], state: TrialState, value: float | None
    ) -> None:
        """End a point that has begun. The journal takes one end of a point, the first, whoever writes it."""
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            for name, content in attributes.items():
                self._storage.set_trial_user_attr(self._id(number), name, content)
            self._study().tell(number, value, state, skip_if_finished=True)

    def _drawn(self, number: int) -> dict[str, Any]:
        """The values of a trial that are drawn at random; none where TPE chooses them later."""
        if self.plan.sampler == "tpe" and number >= _RANDOM_FIRST:
            return {}
        sampler = optuna.samplers.RandomSampler(seed=_seed(self.plan, number))
        return optuna.create_study(sampler=sampler).ask(self._distributions).params

    def _drop_torn_line(self) -> None:
        """Drop what a process wrote of its last line as it died: the journal could not be read after it."""
        path = self.folder / JOURNAL_NAME
        self._lock.acquire()
        try:
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
        finally:
            self._lock.release()


def start_sweep(plan: SweepPlan, folder: Path) -> SweepFolder:
    """Open the folder of a sweep, made if it is not there. A second start with the same plan goes on with it.

    Raises:
        InputError: where the folder holds another sweep or anything else, or cannot be written.
    """
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _opening(folder):
            if (folder / PLAN_NAME).exists():
                kept = read_plan(folder)
                require_same_plan(plan, kept, folder)
                if plan.points > kept.points:
                    write_json(folder / PLAN_NAME, plan_as_json(plan))
            else:
                _require_empty(folder)
                write_json(folder / PLAN_NAME, plan_as_json(plan))
            return _filled(folder)
    except OSError as error:
        for parent in created:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise InputError(f"output {folder}: cannot be written ({error.strerror or error})") from None


def open_sweep(folder: Path) -> SweepFolder:
    """Open a folder that holds a sweep.

    Raises:
        InputError: for a folder without one, a damaged one, and one that cannot be written.
    """
    read_plan(folder)
    with writing(f"sweep {folder}"), _opening(folder):
        return _filled(folder)


def _filled(folder: Path) -> SweepFolder:
    (folder / POINTS).mkdir(exist_ok=True)
    try:
        sweep = SweepFolder(folder)
        sweep.fill()
    except (ValueError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder / JOURNAL_NAME}: damaged ({error})") from None
    return sweep


@contextlib.contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Hold the folder while it is filled; wait for another process that fills it."""
    until = time.monotonic() + _OPENING
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(folder, ".sweep.lock"))
                break
            except HeldByAnother:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        yield


def _require_empty(folder: Path) -> None:
    found = [path for path in folder.iterdir() if path.name != ".sweep.lock" and not is_unfinished(path)]
    if found:
        raise InputError(f"output {folder} is not empty, and holds no sweep: choose another folder")


def _seed(plan: SweepPlan, number: int) -> int:
    return int(np.random.SeedSequence([plan.sampler_seed, number]).generate_state(1)[0])


def _distribution(entry: Choices | Range) -> BaseDistribution:
    if isinstance(entry, Choices):
        return CategoricalDistribution(entry.labels())
    if isinstance(entry.low, int):
        return IntDistribution(entry.low, int(entry.high), entry.log, int(entry.step or 1))
    return FloatDistribution(entry.low, entry.high, entry.log, entry.step)


def _suggest(trial: optuna.trial.Trial, key: str, entry: Choices | Range) -> Any:
    if isinstance(entry, Choices):
        return json.loads(trial.suggest_categorical(key, entry.labels()))
    if isinstance(entry.low, int):
        step = int(entry.step or 1)
        return trial.suggest_int(key, entry.low, int(entry.high), step=step, log=entry.log)
    return trial.suggest_float(key, entry.low, entry.high, step=entry.step, log=entry.log)


def _labels(space: Space, point: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: json.dumps(value) if isinstance(space[key], Choices) else value for key, value in point.items()
    }


def _known_keys(space: Space, trial: FrozenTrial) -> dict[str, Any]:
    """The values that are chosen: of a waiting trial those it was made with."""
    chosen = trial.system_attrs.get("fixed_params", {}) | trial.params
    return {
        key: json.loads(chosen[key]) if isinstance(entry, Choices) else chosen[key]
        for key, entry in space.items()
        if key in chosen
    }
