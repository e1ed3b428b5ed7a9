"""The plan of a sweep: what ``sweep.json`` holds, and what every worker works from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs.saved import find_data_root
from kernel_attention_lab.sweeping.space import Space, checked_space, examples, grid_points
from kernel_attention_lab.tasks.experiment import Metric
from kernel_attention_lab.tasks.recipe import DEFAULT_TASK, BaseRecipe
from kernel_attention_lab.tasks.registry import experiment_class, make_recipe, recipe_class

SAMPLERS = ("grid", "random", "tpe")
PLAN_NAME = "sweep.json"

_SCHEMA = 2
_POINTS = 20
_LARGEST = 10_000


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The points of a sweep.

    Args:
        recipe: name of the recipe.
        keys: the recipe's keys that no point changes.
        space: the keys that vary.
        sampler: grid, random or tpe.
        sampler_seed: of the draws of random and tpe.
        points: number of points.
        metric: the figure of ``metrics.json`` that points are compared by.
        data_root: the folder that is searched first for data sets, where the sweep began.
    """

    recipe: str
    keys: dict[str, Any]
    space: Space
    sampler: str
    sampler_seed: int
    points: int
    metric: Metric
    data_root: str | None = None

    def make(self, point: Mapping[str, Any]) -> BaseRecipe:
        """The recipe of a point; InputError where its values do not fit together."""
        return make_recipe(self.keys | dict(point))

    def example(self) -> BaseRecipe:
        """The recipe of one point, for what all points have in common."""
        return self.make(next(examples(self.space)))


def make_plan(
    recipe: str,
    keys: dict[str, Any],
    space: Space,
    *,
    sampler: str = "grid",
    sampler_seed: int = 0,
    points: int | None = None,
    data_root: str | None = None,
) -> SweepPlan:
    """The plan of these fields, checked: its sampler, the recipe of every point of a grid, and the data.

    ``points`` is 20 by default for random and tpe; a grid has as many as combinations.

    Raises:
        InputError: for an unknown sampler, a recipe that cannot be made, and missing or bad data.
    """
    if sampler not in SAMPLERS:
        raise unknown("sampler", sampler, SAMPLERS)
    if sampler_seed < 0:
        raise InputError(f"sampler_seed={sampler_seed} must be a whole number of at least 0")
    count = _count_points(space, sampler, points)
    recipes = [_make(keys, point) for point in (grid_points if sampler == "grid" else examples)(space)]
    experiment = experiment_class(recipes[0].task_name)(recipes[0], data_root)
    return SweepPlan(
        recipe=recipe,
        keys={key: value for key, value in recipes[0].keys().items() if key not in space},
        space=space,
        sampler=sampler,
        sampler_seed=sampler_seed,
        points=count,
        metric=experiment.selection_metric,
        data_root=find_data_root(recipes[0].dataset, data_root),
    )


def plan_as_json(plan: SweepPlan) -> dict[str, Any]:
    """The content of ``sweep.json``."""
    return {"schema": _SCHEMA} | vars(plan) | {"metric": plan.metric._asdict()}


def read_plan(folder: Path) -> SweepPlan:
    """The plan of a sweep folder.

    Raises:
        InputError: for a folder that holds no sweep, one of an earlier version, and a damaged ``sweep.json``.
    """
    path = folder / PLAN_NAME
    if not path.is_file():
        raise InputError(f"sweep {folder}: not a sweep folder (it has no {PLAN_NAME})")
    content = read_json(path)
    try:
        if (schema := content.pop("schema")) != _SCHEMA:
            words = "which another version made: finish it there; its points are runs, and open here too"
            raise InputError(f"a sweep of schema {schema} and not {_SCHEMA}, {words}")
        space = checked_space(recipe_class(content["keys"].get("task", DEFAULT_TASK)), content["space"])
        return SweepPlan(**content | {"space": space, "metric": Metric(**content["metric"])})
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error})") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def require_same_plan(plan: SweepPlan, kept: SweepPlan, folder: Path) -> None:
    """InputError where a folder holds another sweep; random and tpe may ask for more points than it has."""
    now, then = plan_as_json(plan), plan_as_json(kept)
    for name in ("recipe", "space", "sampler", "sampler_seed", "keys"):
        if json.dumps(now[name]) == json.dumps(then[name]):  # in this order, which numbers the points
            continue
        if name == "keys":
            unequal = (key for key in plan.keys | kept.keys if plan.keys.get(key) != kept.keys.get(key))
            name = next(unequal, "order of keys")
        raise InputError(
            f"output {folder}: holds a sweep with another {name}; choose another folder with --output"
        )
    if plan.points < kept.points:
        raise InputError(
            f"output {folder}: holds a sweep of {kept.points} points, and points={plan.points} is less"
        )


def _count_points(space: Space, sampler: str, points: int | None) -> int:
    if sampler != "grid":
        if points is not None and not 1 <= points <= _LARGEST:
            raise InputError(f"points={points} must be a whole number between 1 and {_LARGEST}")
        return _POINTS if points is None else points
    count = 0
    for count, _ in enumerate(grid_points(space), 1):
        if count > _LARGEST:
            raise InputError(
                f"space: the grid has more than {_LARGEST} points; take fewer values, or --sampler tpe"
            )
    if points not in (None, count):
        raise InputError(f"points={points}: the grid has {count} points, and all of them are run")
    return count


def _make(keys: dict[str, Any], point: dict[str, Any]) -> BaseRecipe:
    try:
        return make_recipe(keys | point)
    except InputError as error:
        if len(point) == 1:
            raise
        values = ", ".join(f"{key}={value!r}" for key, value in point.items())
        raise InputError(f"point {values}: {error}") from None
