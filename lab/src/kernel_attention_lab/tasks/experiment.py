"""The interface of a task to a run: data, model, loss, loaders, figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from kernel_attention.core.sharding import require_shardable
from kernel_attention.errors import InputError
from kernel_attention.limits import require_memory
from kernel_attention_lab.tasks.recipe import BaseRecipe

if TYPE_CHECKING:
    from kernel_attention.training.task import TrainingTask

Loaders: TypeAlias = "tuple[DataLoader[Any], DataLoader[Any]]"

_TRAINING_COPIES = 4  # weights, gradients, and the two moments of every optimizer


class Metric(NamedTuple):
    """The headline figure: its key in ``evaluation.json``, and whether higher is better."""

    name: str
    larger_is_better: bool


class Trained(NamedTuple):
    """A trained model that another one starts from, with its recipe and the content of its ``data.json``."""

    recipe: Any
    facts: dict[str, Any]
    model: Any


class Experiment(ABC):
    """A recipe with its data loaded. Each task is a subclass, with ``register_task`` above it.

    The static methods need the facts only, so that a trained model can be opened and applied to a file
    without the data it was trained on.

    Args:
        recipe: of the task's class.
        data_root: the folder that is searched first for data sets.

    Raises:
        InputError: for data that are missing or bad.
    """

    required_facts: ClassVar[tuple[str, ...]]
    """Keys of ``data.json`` that the model depends on; each a whole number of at least 1."""

    has_classes: ClassVar[bool] = False
    """True where ``data.json`` must have the list ``class_names`` too."""

    divides_sequences: ClassVar[bool] = False
    """True where several processes can share a sequence; see ``TrainingTask.part``."""

    starts_with: ClassVar[str] = ""
    """The task of the runs that the key ``start_from`` may name, for recipes that have the key."""

    keeps_last_weights: ClassVar[bool] = False
    """True where the weights after the last step are evaluated, and not those of the best row."""

    def __init__(self, recipe: BaseRecipe, data_root: str | Path | None = None) -> None:
        self.recipe = recipe
        self.data_root = data_root

    @staticmethod
    @abstractmethod
    def build_model(recipe: Any, facts: dict[str, Any]) -> nn.Module:
        """The recipe's model, untrained, for data with these facts."""

    @classmethod
    def open_model(cls, recipe: Any, facts: dict[str, Any], copies: int = 2) -> nn.Module:
        """``build_model`` for a recipe and facts that are not yet checked against this machine.

        Args:
            recipe: of the task's class.
            facts: the content of ``data.json``.
            copies: number of copies of the weights in memory at once.

        Raises:
            InputError: for a model that cannot be built, or that this machine cannot hold.
        """
        advice = "make it smaller (embed_dim, feedforward_dim, num_layers, the mechanism's own sizes)"
        try:
            require_memory("the model", copies * _model_bytes(lambda: cls.build_model(recipe, facts)), advice)
            return cls.build_model(recipe, facts)
        except InputError:
            raise
        except OverflowError:
            raise InputError(f"the model has sizes that no machine can hold: {advice}") from None
        except (RuntimeError, TypeError, ValueError, ArithmeticError, MemoryError) as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(f"the model of this recipe and data cannot be built ({reason})") from None

    @classmethod
    def check_facts(cls, facts: Any, path: Path) -> None:
        """InputError where the content of ``data.json`` does not fit this task."""
        is_right = isinstance(facts, dict) and all(
            isinstance(facts.get(key), int) and facts[key] > 0 for key in cls.required_facts
        )
        if not is_right:
            raise InputError(f"{path}: does not describe a data set ({', '.join(cls.required_facts)})")
        names = facts.get("class_names")
        if cls.has_classes and not (
            isinstance(names, list) and names and all(isinstance(name, str) for name in names)
        ):
            raise InputError(f"{path}: class_names are no list of names")

    @property
    @abstractmethod
    def metric(self) -> Metric:
        """The headline figure of ``evaluate``."""

    @property
    def selection_metric(self) -> Metric:
        """The column of ``metrics.json`` by which runs are compared without their test figures."""
        return Metric(f"val_{self.metric.name}", self.metric.larger_is_better)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """The content of ``data.json``: the facts about the data that a trained model depends on."""

    @abstractmethod
    def loaders(self, seed: int) -> Loaders:
        """(training batches, batches that select the round), under the recipe's protocol.

        A round (an epoch, or ``evaluate_every`` steps) is one pass over the training batches. Their order
        depends on (seed, round) only: the loader's sampler has a ``set_epoch`` that the trainer calls.
        """

    @abstractmethod
    def task(self, model: nn.Module) -> TrainingTask:
        """The loss, the optimizer and the figures with which ``model`` is trained."""

    @abstractmethod
    def evaluate(self, model: Any) -> dict[str, Any]:
        """Figures of the test split: at least ``loss`` and the metric."""

    def evaluate_split(self, model: Any, split: str) -> dict[str, Any]:
        """The figures of a split by its name, for tasks with several splits."""
        raise InputError(f"task {self.recipe.task_name}: no split {split!r} to choose (only its test split)")

    def prepare(self, model: Any, seed: int) -> None:  # noqa: B027  (most tasks have nothing to set)
        """Set the parts of an untrained model that come from the training data, such as their scale."""

    def start(self, model: Any, trained: Trained) -> None:
        """Give an untrained model the weights of a trained one; InputError where the two do not fit."""
        raise NotImplementedError

    def target_variance(self, seed: int) -> float | None:
        """The variance of the values by which a seed's weights are chosen; None for a task without values."""
        return None

    def appendices(self, model: Any) -> dict[str, Any]:
        """Further JSON files of a finished seed, {file name: content}."""
        return {}

    def examples(self, model: Any) -> dict[str, np.ndarray]:
        """Arrays of a finished seed that the report shows, for ``examples.npz``; empty for none."""
        return {}

    def check(self) -> None:
        """InputError, before anything is written, for options that the model or the loaders refuse."""
        self.check_model()
        self.loaders(self.recipe.seeds[0])

    def check_model(self) -> None:
        """InputError for a model that cannot be built or trained on this machine, or by several processes."""
        model: Any = self.open_model(self.recipe, self.facts(), _TRAINING_COPIES)
        shards = self.recipe.sequence_shards
        if shards > 1:
            if not self.divides_sequences:
                raise InputError(
                    f"sequence_shards={shards}: task {self.recipe.task_name} does not divide its sequences "
                    "(accepted: 1)"
                )
            try:
                require_shardable(model, getattr(model, "is_causal", False))
            except InputError as error:
                raise InputError(f"sequence_shards={shards}: {error}") from None

    @abstractmethod
    def batches(self, cases: int) -> Iterable[Any]:
        """Batches of ``cases`` evenly spaced test cases, or of all where there are fewer, for diagnostics.

        A batch is a sequence of the model's arguments; the first has one row per case.
        """

    def cases_text(self, count: int) -> str:
        """A description of ``count`` cases of ``batches``."""
        return f"{count} evenly spaced sequences of the test split"

    @staticmethod
    def evaluate_file(model: Any, file: Path, recipe: Any, facts: dict[str, Any]) -> dict[str, Any]:
        """The same figures of a labelled file."""
        raise InputError(f"task {recipe.task_name}: evaluation on a file is not available for it")

    @staticmethod
    def predict(model: Any, file: Path, recipe: Any, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """One record per case of an unlabelled file."""
        raise InputError(f"task {recipe.task_name}: predictions of a file are not available for it")

    @staticmethod
    def generate(
        model: Any,
        prompt: str,
        recipe: Any,
        facts: dict[str, Any],
        *,
        tokens: int = 50,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Continue a prompt. Return the prompt as the vocabulary reads it, and the tokens that follow.

        Args:
            model: a trained one.
            prompt: at least one token long; unknown words are read as <unk>.
            recipe: of the run.
            facts: of the run.
            tokens: number of tokens to generate.
            temperature: 0 takes the most likely token; see ``kernel_attention.models.generate``.
            top_k: draw among this number of most likely tokens.
            seed: seed of the draws.

        Raises:
            InputError: for a task without texts, an empty prompt, or a text longer than the model's max_len.
        """
        raise InputError(f"task {recipe.task_name} generates no text (accepted: language)")


def _model_bytes(build: Callable[[], nn.Module]) -> int:
    """Bytes of a model's parameters and buffers, found without allocating them.

    0 for a model that cannot be built without its values; OverflowError for sizes beyond 64 bits.
    """
    try:
        with torch.device("meta"):
            model = build()
    except (RuntimeError, TypeError) as error:
        if "overflow" in str(error).lower():
            raise OverflowError from None
        return 0
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
