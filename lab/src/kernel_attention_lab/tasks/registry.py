"""The kinds of tasks. A file of this folder that is none of the shared ones is one, found by its name.

A plugin adds a task with ``register_task``, as the files of this folder do.
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

from kernel_attention.errors import unknown
from kernel_attention.fields import checked, field_names
from kernel_attention_lab.tasks.recipe import DEFAULT_TASK, BaseRecipe

if TYPE_CHECKING:
    from torch import nn

    from kernel_attention_lab.tasks.experiment import Experiment

Kind = TypeVar("Kind", bound="type[Experiment]")

_FOLDER = Path(__file__).parent
_SHARED = ("experiment", "metrics", "recipe", "registry", "vision")
_LIGHT = (
    "__future__", "dataclasses", "typing", "pydantic", "kernel_attention.errors", "kernel_attention.fields",
    "kernel_attention.training.settings", "kernel_attention_lab.tasks.recipe",
)  # fmt: skip


class _Task(NamedTuple):
    recipe: type[BaseRecipe]
    experiment: type[Experiment]


_registered: dict[str, _Task] = {}


def register_task(recipe: type[BaseRecipe]) -> Callable[[Kind], Kind]:
    """Register an experiment's class as the task of recipes of this class."""

    def register(experiment: Kind) -> Kind:
        _registered[recipe.task_name] = _Task(recipe, experiment)
        return experiment

    return register


def task_names() -> list[str]:
    """The names of all tasks."""
    found = [module.name for module in pkgutil.iter_modules([str(_FOLDER)]) if module.name not in _SHARED]
    return list(dict.fromkeys([*found, *_registered]))


def recipe_class(task: Any) -> type[BaseRecipe]:
    """The class of the recipes of a task; InputError for an unknown one."""
    return _find(task).recipe


def experiment_class(task: Any) -> type[Experiment]:
    """The class of the experiments of a task; InputError for an unknown one."""
    return _find(task).experiment


def build_model(recipe: BaseRecipe, facts: dict[str, Any]) -> nn.Module:
    """The recipe's model for data with these facts; InputError where this machine cannot hold it."""
    return experiment_class(recipe.task_name).open_model(recipe, facts)


def settings_class(task: Any) -> type[BaseRecipe]:
    """The class of the recipes of a task for reading its keys: a help text does not wait for torch."""
    if _name(task) in _registered or f"{__package__}.{task}" in sys.modules:
        return recipe_class(task)
    return _light_class(task) or recipe_class(task)


def make_recipe(keys: dict[str, Any]) -> BaseRecipe:
    """The recipe of these keys, of the class that its key ``task`` names.

    Raises:
        InputError: for an unknown key, a wrong value, or a plugin that is not loaded.
    """
    check_keys(keys, "recipe")
    made = recipe_class(keys.get("task", DEFAULT_TASK))
    return made(**{key: value for key, value in keys.items() if key != "task"})


def check_keys(keys: dict[str, Any], source: str) -> list[str]:
    """The accepted keys of a recipe of this task; InputError, with ``source``, for another one."""
    accepted = ["task", *field_names(settings_class(keys.get("task", DEFAULT_TASK)))]
    for key in keys:
        if key not in accepted:
            raise unknown(f"key of {source}", key, accepted, listing="kernel-attention train --help")
    return accepted


def recipe_plugins(keys: dict[str, Any], more: Iterable[str] = ()) -> list[str]:
    """The plugins in a recipe's keys and in ``more``, each once."""
    return list(dict.fromkeys([*checked(BaseRecipe, "plugins", keys.get("plugins", [])), *more]))


def _name(task: Any) -> str:
    if not isinstance(task, str) or task not in task_names():
        raise unknown("task", task, task_names())
    return task


def _find(task: Any) -> _Task:
    if _name(task) not in _registered:
        importlib.import_module(f"{__package__}.{task}")
    return _registered[task]


@functools.cache
def _light_class(task: str) -> type[BaseRecipe] | None:
    """The recipe's class from its lines of the task's file and the imports that bring no torch.

    None where the class needs more than these.
    """
    tree = ast.parse((_FOLDER / f"{task}.py").read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if (isinstance(node, ast.ImportFrom) and node.module in _LIGHT)
        or (
            isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        )
    ]
    module = types.ModuleType(f"{__package__}.{task}:keys")
    sys.modules[module.__name__] = module  # where the annotations are looked up
    try:
        exec(compile(tree, str(_FOLDER / f"{task}.py"), "exec"), module.__dict__)
        (found,) = [each for each in vars(module).values() if getattr(each, "task_name", None) == task]
        get_type_hints(found)
    except (NameError, ValueError):
        return None
    return found
