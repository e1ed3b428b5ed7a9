"""A sweep folder: its plan, and the Optuna study that all its workers share.

A trial of the study is one attempt at a point. Optuna's heartbeat says which workers live: a trial whose
worker has been silent for ``GRACE`` seconds fails, and its point is offered again, as that of an interrupted
worker is. So a point has as many trials as attempts, and the last one says how it stands.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sqlite3
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from kernel_attention.errors import InputError, writing
from kernel_attention.files import is_unfinished
from kernel_attention_lab.lock import locked
from kernel_attention_lab.runs.files import write_json
from kernel_attention_lab.sweeping.plan import (
    PLAN_NAME,
    SweepPlan,
    plan_as_json,
    read_plan,
    require_same_plan,
)
from kernel_attention_lab.sweeping.space import grid_points

STUDY_NAME = "study.db"
POINTS = "points"
STATES = ("complete", "begun", "failed", "waiting")
BEAT = 5  # seconds from one heartbeat to the next
GRACE = 60  # seconds without one after which a worker counts as dead

_LOCK = ".sweep.lock"  # of the folder, while a process makes it or enqueues a trial
_PATIENCE = 60.0  # seconds for which a process waits for another one's transaction
_RANDOM_FIRST = 10  # points that TPE draws at random before it has values to learn from


class SweepPoint(NamedTuple):
    """A point of a sweep.

    Attributes:
        number: from 0.
        keys: its values of the keys that vary; empty where they are not chosen yet.
        state: waiting, begun, complete or failed.
        values: of the metric, by seed.
        error: why it failed.
    """

    number: int
    keys: dict[str, Any]
    state: str = "waiting"
    values: Sequence[float] = ()
    error: str | None = None

    @property
    def value(self) -> float | None:
        """Mean of the metric over the seeds; None where the point is not complete."""
        return statistics.fmean(self.values) if self.state == "complete" else None


class SweepFolder:
    """An open sweep folder, with its study made if it is not there.

    Args:
        folder: which holds a plan.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = read_plan(folder)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        connect = functools.partial(
            sqlite3.connect, folder / STUDY_NAME, timeout=_PATIENCE, check_same_thread=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
            self._storage = optuna.storages.RDBStorage(
                f"sqlite:///{STUDY_NAME}",
                {"creator": connect, "poolclass": sqlalchemy.pool.NullPool},
                heartbeat_interval=BEAT,
                grace_period=GRACE,
            )
        self.study = optuna.create_study(
            storage=self._storage,
            study_name="sweep",
            sampler=_PointSampler(self.plan),
            direction="maximize" if self.plan.metric.larger_is_better else "minimize",
            load_if_exists=True,
        )

    def points(self) -> list[SweepPoint]:
        """The state of every point."""
        trials = self._trials()
        return [
            _point(number, trials[number]) if number in trials else SweepPoint(number, {})
            for number in range(self.plan.points)
        ]

    def unfinished(self) -> list[int]:
        """The numbers of the points that are neither complete nor failed."""
        return [point.number for point in self.points() if point.state in ("waiting", "begun")]

    def offer(self) -> bool:
        """Enqueue a trial of the first point that has none, or none that lives; whether any trial waits."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)
        if self._first_free() is not None:
            with locked(self.folder, _LOCK, wait=True):
                if (number := self._first_free()) is not None:
                    self._enqueue(number)
        return bool(self.study.get_trials(deepcopy=False, states=[TrialState.WAITING]))

    def choose(self, trial: Trial) -> dict[str, Any]:
        """The values of a trial's point."""
        return {key: _suggest(trial, key, entry) for key, entry in self.plan.space.items()}

    def importances(self) -> dict[str, float] | None:
        """The share of each key in the variance of the metric, by Optuna's fANOVA; None with too few points.

        A key with one value has no share.
        """
        done = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        varied = [key for key in self.plan.space if len({str(trial.params[key]) for trial in done}) > 1]
        if len(done) < 4 or len(varied) < 2 or len({trial.value for trial in done}) < 2:
            return None
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self.plan.sampler_seed)
        found = optuna.importance.get_param_importances(self.study, evaluator=evaluator, params=varied)
        return {key: float(value) for key, value in found.items()}

    def data_root(self, given: str | None = None) -> str | None:
        """``given``, or else the data root of the sweep's start if it is a folder on this machine."""
        root = given or self.plan.data_root
        return root if given or (root is not None and Path(root).is_dir()) else None

    def point_folder(self, number: int) -> Path:
        """The run folder of a point."""
        return self.folder / POINTS / f"{number:03d}"

    def _trials(self) -> dict[int, FrozenTrial]:
        """The last trial of every point that has one."""
        trials = self.study.get_trials(deepcopy=False)
        return {trial.user_attrs["point"]: trial for trial in trials if "point" in trial.user_attrs}

    def _first_free(self) -> int | None:
        trials = self._trials()
        return next((n for n in range(self.plan.points) if n not in trials or _is_lost(trials[n])), None)

    def _enqueue(self, number: int) -> None:
        """Enqueue a trial of a point, with a first heartbeat, as its worker may die before its own first."""
        self.study.enqueue_trial(self._known(number), {"point": number})
        study = self._storage.get_study_id_from_name(self.study.study_name)
        trial = self._trials()[number].number
        self._storage.record_heartbeat(self._storage.get_trial_id_from_study_id_trial_number(study, trial))

    def _known(self, number: int) -> dict[str, Any]:
        """The values of a point that are chosen already, as its trial has them."""
        if self.plan.sampler == "grid":
            values = next(itertools.islice(grid_points(self.plan.space), number, None))
            return {key: json.dumps(value) for key, value in values.items()}
        trials = self._trials()
        return _chosen(trials[number]) if number in trials else {}


def start_sweep(plan: SweepPlan, folder: Path) -> SweepFolder:
    """Open the folder of a sweep, made if it is not there. A second start with the same plan goes on with it.

    Raises:
        InputError: where the folder holds another sweep or anything else, or cannot be written.
    """
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, _LOCK, wait=True):
            kept = read_plan(folder) if (folder / PLAN_NAME).exists() else None
            if kept is not None:
                require_same_plan(plan, kept, folder)
            elif any(path.name != _LOCK and not is_unfinished(path) for path in folder.iterdir()):
                raise InputError(f"output {folder} is not empty, and holds no sweep: choose another folder")
            if kept is None or plan.points > kept.points:
                write_json(folder / PLAN_NAME, plan_as_json(plan))
    except OSError as error:
        for parent in created:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise InputError(f"output {folder}: cannot be written ({error.strerror or error})") from None
    return open_sweep(folder)


def open_sweep(folder: Path) -> SweepFolder:
    """Open a folder that holds a sweep.

    Raises:
        InputError: for a folder without one, a damaged one, and one that cannot be written.
    """
    read_plan(folder)
    with writing(f"sweep {folder}"), storing(folder), locked(folder, _LOCK, wait=True):
        (folder / POINTS).mkdir(exist_ok=True)
        return SweepFolder(folder)


@contextlib.contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Inside the block an error of the study's database becomes an OSError."""
    try:
        yield
    except (StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise OSError(f"{folder / STUDY_NAME}: {cause}") from None


class _PointSampler(TPESampler):
    """TPE whose draws depend on the sweep's seed, the point and the complete points, and not on the process.

    Before it has enough complete points it draws at random: always, where the plan says so.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._start(0)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._start(trial.user_attrs.get("point", 0))

    def _start(self, point: int) -> None:
        seed = int(np.random.SeedSequence([self._plan.sampler_seed, point]).generate_state(1)[0])
        random = _RANDOM_FIRST if self._plan.sampler == "tpe" else sys.maxsize
        super().__init__(seed=seed, multivariate=True, n_startup_trials=random)


def _suggest(trial: Trial, key: str, entry: list[Any] | dict[str, Any]) -> Any:
    if isinstance(entry, list):
        return json.loads(trial.suggest_categorical(key, [json.dumps(value) for value in entry]))
    options = {name: value for name, value in entry.items() if value is not None}
    return (trial.suggest_int if isinstance(entry["low"], int) else trial.suggest_float)(key, **options)


def _chosen(trial: FrozenTrial) -> dict[str, Any]:
    return trial.system_attrs.get("fixed_params", {}) | trial.params


def _is_lost(trial: FrozenTrial) -> bool:
    """True for a trial that ended with its worker, so that its point is free again."""
    return trial.state == TrialState.FAIL and "error" not in trial.user_attrs


def _point(number: int, trial: FrozenTrial) -> SweepPoint:
    keys = {k: json.loads(value) if isinstance(value, str) else value for k, value in _chosen(trial).items()}
    attributes = trial.user_attrs
    if trial.state == TrialState.COMPLETE:
        return SweepPoint(number, keys, "complete", attributes["values"])
    if "error" in attributes:
        return SweepPoint(number, keys, "failed", error=attributes["error"])
    return SweepPoint(number, keys, "begun" if trial.state == TrialState.RUNNING else "waiting")
