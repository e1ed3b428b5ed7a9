"""A recipe: all that a run depends on, as one flat record that a YAML file fills and options override."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kernel_attention.attention import layer_specs
from kernel_attention.errors import InputError, unknown
from kernel_attention.training.files import read_yaml

Protocol = Literal["holdout", "paper"]

PROTOCOLS: dict[str, str] = {
    "holdout": "the best epoch is chosen on a stratified part of the training split; "
    "the test split is read once, at the end",
    "paper": "the best epoch is chosen on the test split itself, as the papers' released code does: "
    "an optimistic figure",
}


@dataclass(frozen=True)
class Recipe:
    """One experiment on a time-series set; the defaults are those of Primal-Attention's UEA experiments.

    Args:
        dataset: name of an aeon classification or regression set.
        attention: a mechanism's name, ``{name: options}``, or a list with one of these per layer.
        embed_dim: model width d.
        num_heads: attention heads.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        positions: learnt or fixed positions.
        pooling: flatten all positions, or average them.
        norm_first: pre-norm layers.
        epochs: passes over the training data.
        batch_size: sequences per step.
        optimizer: radam, adam or adamw.
        learning_rate: constant.
        weight_decay: of the optimizer.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        auxiliary_reduction: sum or mean over the layers of eta J^2.
        protocol: holdout or paper, see ``PROTOCOLS``.
        validation_fraction: part of the training split held out for model selection (holdout).
        evaluate_every: epochs between evaluations.
        seeds: one run each; the same seeds give the same figures.
        missing: what to do with missing values: auto, interpolate or error.
        precision: 32-true, or a mixed precision.
        accelerator: Lightning's accelerator: auto, cpu, gpu or mps.
        threads: CPU threads of PyTorch; 0 leaves its choice.

    Raises:
        InputError: for a value of the wrong type or out of its range.
    """

    dataset: str
    attention: Any = "primal"
    embed_dim: int = 512
    num_heads: int = 8
    num_layers: int = 2
    feedforward_dim: int = 2048
    dropout: float = 0.1
    positions: Literal["learnt", "fixed"] = "learnt"
    pooling: Literal["flatten", "mean"] = "flatten"
    norm_first: bool = False
    epochs: int = 100
    batch_size: int = 16
    optimizer: Literal["radam", "adam", "adamw"] = "radam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    gradient_clip: float = 4.0
    auxiliary_reduction: Literal["sum", "mean"] = "sum"
    protocol: Protocol = "holdout"
    validation_fraction: float = 0.2
    evaluate_every: int = 1
    seeds: list[int] = field(default_factory=lambda: [0])
    missing: Literal["auto", "interpolate", "error"] = "auto"
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        for name in recipe_fields():
            # YAML's 1 for 1.0 and NumPy's numbers become the types that are written to config.yaml.
            object.__setattr__(self, name, typed(name, getattr(self, name)))
        for name in ("epochs", "batch_size", "evaluate_every", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("gradient_clip", "weight_decay", "threads"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must be at least 0")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate} must be positive")
        if not 0.0 < self.validation_fraction < 1.0:
            raise InputError(f"validation_fraction={self.validation_fraction} must lie between 0 and 1")
        if self.epochs < self.evaluate_every:
            raise InputError(
                f"evaluate_every={self.evaluate_every} exceeds epochs={self.epochs}: no epoch could be chosen"
            )
        in_range = all(0 <= seed <= _MAX_SEED for seed in self.seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not in_range:
            raise InputError(
                f"seeds={self.seeds} must be one or more different whole numbers between 0 and {_MAX_SEED}"
            )
        layer_specs(self.attention, self.num_layers)
        object.__setattr__(self, "attention", _plain_attention(self.attention))

    def attention_name(self) -> str:
        """The mechanism in a few words: ``primal``, or ``softmax+primal`` where layers differ."""
        names = [name for name, _ in layer_specs(self.attention, self.num_layers)]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    def encoder_options(self) -> dict[str, Any]:
        """The fields that :class:`kernel_attention.models.SequenceClassifier` takes."""
        names = (
            "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout", "positions",
            "pooling", "norm_first",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def recipe_fields() -> list[str]:
    """Names of a recipe's keys."""
    return [entry.name for entry in dataclasses.fields(Recipe)]


def recipes_dir() -> Path:
    """Where the shipped recipes are: inside the installed package, or beside ``src`` in a checkout."""
    installed = Path(str(importlib.resources.files("kernel_attention"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "recipes"


def list_recipes() -> dict[str, Path]:
    """Name (path without suffix, for example ``uea/japanese_vowels``) and file of every shipped recipe."""
    root = recipes_dir()
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def read_recipe(name: str) -> tuple[str, dict[str, Any]]:
    """A shipped recipe by name, or a YAML file by path -> (its short name, its keys)."""
    shipped = list_recipes()
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise unknown("recipe", name, shipped)
    return path.stem, read_keys(path)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a recipe's file, all of them known; :class:`Recipe` checks their values."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of the form key: value, found {type(values).__name__}")
    for key in values:
        if key not in recipe_fields():
            raise unknown(f"key of {path}", key, recipe_fields())
    return values


def typed(name: str, value: Any, label: str | None = None) -> Any:
    """``value`` in the type of the recipe's key ``name``; InputError where it is of another type.

    Args:
        name: a key of the recipe.
        value: what was given for it.
        label: what the message calls the two, by default ``name=value``.
    """
    kind = _field_types()[name]
    if not _is_of(kind, value):
        accepted = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _WORDS[kind]
        raise InputError(f"{label or f'{name}={value!r}'} must be {accepted}")
    if kind is int or kind is float:
        return kind(value)
    return [int(item) for item in value] if get_origin(kind) is list else value


def _plain_attention(spec: Any) -> Any:
    """A pair (name, options) as ``{name: options}``: YAML would give it back as a list, one entry a layer."""
    if isinstance(spec, list):
        return [_plain_attention(entry) for entry in spec]
    return {spec[0]: dict(spec[1])} if isinstance(spec, tuple) else spec


_MAX_SEED = 2**32 - 1  # NumPy's generators take no larger one
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a name",
    list[int]: "whole numbers, such as [0, 1, 2]",
}


@functools.cache
def _field_types() -> dict[str, Any]:
    return get_type_hints(Recipe)


def _is_of(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(_is_of(int, item) for item in value)
    if isinstance(value, bool):  # Python counts them among the integers
        return kind is bool
    if kind is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, Integral if kind is int else kind)
