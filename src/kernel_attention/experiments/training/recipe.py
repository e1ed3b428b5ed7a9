"""A recipe: all that a run depends on, as one flat record that a YAML file fills and options override."""

from __future__ import annotations

import dataclasses
import importlib.resources
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from kernel_attention.core.registry import layer_specs
from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.run_folder import read_yaml
from kernel_attention.experiments.training.recipe_values import field_names, plain_attention, typed_value
from kernel_attention.experiments.training.tasks import DEFAULT_TASK, recipe_class

Protocol = Literal["holdout", "paper"]

PROTOCOLS: dict[str, str] = {
    "holdout": "the best epoch is chosen on the validation split, or on a stratified part of the training "
    "split; the test split is read once, at the end",
    "paper": "the best epoch is chosen on the test split itself, as the papers' released code does: "
    "an optimistic figure",
}

_MAX_SEED = 2**32 - 1  # NumPy's generators take no larger one
_MAX_LAYERS = 10_000  # a list of them is made before anything else can refuse it
_MAX_THREADS = 4096  # a system that cannot start them ends the process


@dataclass(frozen=True)
class BaseRecipe(ABC):
    """What the recipes of every task share: the model's sizes, the optimizer, the seeds, the machine.

    Args:
        dataset: name of a data set.
        attention: a mechanism's name, ``{name: options}``, or a list with one of these per layer.
        embed_dim: model width d.
        num_heads: attention heads.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        positions: learnt or fixed positions.
        norm_first: pre-norm layers.
        batch_size: sequences per step.
        optimizer: radam, adam or adamw.
        learning_rate: constant, or the largest of the schedule.
        weight_decay: of the optimizer.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        auxiliary_reduction: sum or mean over the layers of eta J^2.
        protocol: holdout or paper, see ``PROTOCOLS``.
        seeds: one run each; the same seeds give the same figures.
        precision: 32-true, a mixed precision, or auto: bf16-mixed where the processor has it.
        accelerator: Lightning's accelerator: auto, cpu, gpu or mps.
        threads: CPU threads of PyTorch; 0 leaves its choice.

    Raises:
        InputError: for a value of the wrong type or out of its range.
    """

    task_name: ClassVar[str]

    dataset: str
    attention: Any = "primal"
    embed_dim: int = 512
    num_heads: int = 8
    num_layers: int = 2
    feedforward_dim: int = 2048
    dropout: float = 0.1
    positions: Literal["learnt", "fixed"] = "learnt"
    norm_first: bool = False
    batch_size: int = 16
    optimizer: Literal["radam", "adam", "adamw"] = "radam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    gradient_clip: float = 4.0
    auxiliary_reduction: Literal["sum", "mean"] = "sum"
    protocol: Protocol = "holdout"
    seeds: list[int] = field(default_factory=lambda: [0])
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        for name in field_names(type(self)):
            # YAML's 1 for 1.0 and NumPy's numbers become the types that are written to config.yaml.
            object.__setattr__(self, name, typed_value(type(self), name, getattr(self, name)))
        self.require_at_least(1, "batch_size", "num_layers")
        self.require_at_least(0, "gradient_clip", "weight_decay", "threads")
        for name, most in (("num_layers", _MAX_LAYERS), ("threads", _MAX_THREADS)):
            if getattr(self, name) > most:
                raise InputError(f"{name}={getattr(self, name)} must be at most {most}")
        if not self.learning_rate > 0:
            raise InputError(f"learning_rate={self.learning_rate} must be positive")
        in_range = all(0 <= seed <= _MAX_SEED for seed in self.seeds)
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or not in_range:
            raise InputError(
                f"seeds={self.seeds} must be one or more different whole numbers between 0 and {_MAX_SEED}"
            )
        layer_specs(self.attention, self.num_layers)
        object.__setattr__(self, "attention", plain_attention(self.attention))

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Passes of the trainer's outer loop, each of which ends in a row of metrics and a checkpoint."""

    @property
    @abstractmethod
    def duration(self) -> str:
        """How long training goes on, in words."""

    @property
    def rounds_per_evaluation(self) -> int:
        """Rounds from one evaluation to the next."""
        return 1

    @property
    def protocol_text(self) -> str:
        """What the protocol means, in one sentence."""
        return PROTOCOLS[self.protocol]

    def require_at_least(self, lowest: float, *names: str) -> None:
        """InputError for the first of these keys whose value is smaller."""
        for name in names:
            if getattr(self, name) < lowest:
                raise InputError(f"{name}={getattr(self, name)} must be at least {lowest}")

    def require_fraction(self, name: str, *, with_ends: bool = False) -> None:
        """InputError unless the key's value lies between 0 and 1, these included or not."""
        value = getattr(self, name)
        if not (0.0 <= value <= 1.0 if with_ends else 0.0 < value < 1.0):
            raise InputError(f"{name}={value} must lie between 0 and 1")

    def attention_name(self) -> str:
        """The mechanism in a few words: ``primal``, or ``softmax+primal`` where layers differ."""
        names = [name for name, _ in layer_specs(self.attention, self.num_layers)]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    def encoder_options(self) -> dict[str, Any]:
        """The fields that :class:`kernel_attention.models.SequenceEncoder` takes."""
        names = (
            "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout", "positions",
            "norm_first",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def keys(self) -> dict[str, Any]:
        """All keys with their values, as ``config.yaml`` holds them."""
        task = {} if self.task_name == DEFAULT_TASK else {"task": self.task_name}
        return task | dataclasses.asdict(self)


@dataclass(frozen=True)
class Recipe(BaseRecipe):
    """One experiment on a time-series set; the defaults are those of Primal-Attention's UEA experiments.

    Args:
        dataset: name of an aeon classification or regression set.
        pooling: flatten all positions, or average them.
        epochs: passes over the training data.
        validation_fraction: part of the training split held out for model selection (holdout).
        evaluate_every: epochs between evaluations.
        missing: what to do with missing values: auto, interpolate or error.

    The other keys are those of :class:`BaseRecipe`.
    """

    task_name: ClassVar[str] = DEFAULT_TASK

    pooling: Literal["flatten", "mean"] = "flatten"
    epochs: int = 100
    validation_fraction: float = 0.2
    evaluate_every: int = 1
    missing: Literal["auto", "interpolate", "error"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "epochs", "evaluate_every")
        self.require_fraction("validation_fraction")
        if self.epochs < self.evaluate_every:
            raise InputError(
                f"evaluate_every={self.evaluate_every} exceeds epochs={self.epochs}: no epoch could be chosen"
            )

    @property
    def rounds(self) -> int:
        return self.epochs

    @property
    def duration(self) -> str:
        return f"{self.epochs} epochs"

    @property
    def rounds_per_evaluation(self) -> int:
        return self.evaluate_every

    def encoder_options(self) -> dict[str, Any]:
        """The fields that :class:`kernel_attention.models.SequenceClassifier` takes."""
        return super().encoder_options() | {"pooling": self.pooling}


@dataclass(frozen=True)
class StepRecipe(BaseRecipe):
    """A recipe whose training is counted in optimizer steps.

    Args:
        steps: optimizer steps.
        warmup_steps: steps in which the learning rate grows linearly from 0 to ``learning_rate``.
        schedule: after the warm-up: constant, or falling linearly to 0 at the last step.
        evaluate_every: steps from one evaluation and checkpoint to the next, at most ``steps``.

    The other keys are those of :class:`BaseRecipe`.
    """

    steps: int = 1000
    warmup_steps: int = 0
    schedule: Literal["constant", "linear"] = "linear"
    evaluate_every: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "steps", "evaluate_every")
        self.require_at_least(0, "warmup_steps")
        if self.steps % self.steps_per_round:
            raise InputError(
                f"steps={self.steps} must be a multiple of evaluate_every={self.evaluate_every}: the last "
                "steps would never be evaluated"
            )

    @property
    def steps_per_round(self) -> int:
        """Steps from one evaluation to the next."""
        return min(self.evaluate_every, self.steps)

    @property
    def rounds(self) -> int:
        return self.steps // self.steps_per_round

    @property
    def duration(self) -> str:
        return f"{self.steps} steps"

    def learning_rate_factor(self, step: int) -> float:
        """What the optimizer's step number ``step`` (from 0) multiplies ``learning_rate`` by."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        return max(self.steps - step, 0) / max(self.steps - self.warmup_steps, 1)


def recipe_fields(recipe: type[BaseRecipe] = Recipe) -> list[str]:
    """Names of a recipe's keys."""
    return field_names(recipe)


def make_recipe(keys: dict[str, Any]) -> BaseRecipe:
    """The recipe of these keys, of the class that its key ``task`` names."""
    keys = dict(keys)
    return recipe_class(keys.pop("task", DEFAULT_TASK))(**keys)


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
    """The keys of a recipe's file, all of them known to its task; :func:`make_recipe` checks their values."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of the form key: value, found {type(values).__name__}")
    accepted = ["task", *field_names(recipe_class(values.get("task", DEFAULT_TASK)))]
    for key in values:
        if key not in accepted:
            raise unknown(f"key of {path}", key, accepted)
    return values
