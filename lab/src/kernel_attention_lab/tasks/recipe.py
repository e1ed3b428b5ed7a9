"""A recipe: all that a run depends on, in one flat record. A YAML file fills it, options override it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import (
    DIFFERENT,
    UNIQUE,
    Count,
    NonNegative,
    Part,
    Positive,
    Probability,
    Whole,
    check_fields,
    field_names,
)
from kernel_attention.specs import Choice
from kernel_attention.training.settings import TrainSettings
from kernel_attention_lab.plugins import require_plugins

DEFAULT_TASK = "time_series"

Protocol = Literal["holdout", "paper", "thesis-1", "thesis-3"]

PROTOCOLS: dict[str, str] = {
    "holdout": "the best epoch is chosen on the validation split, or on a stratified part of the training "
    "split; the test split is read once, at the end",
    "paper": "the best epoch is chosen on the test split itself, as the papers' released code does: "
    "an optimistic figure",
    "thesis-1": "the model is trained on the training split; the best epoch is chosen and reported on the "
    "first 80 % of the test split, as in tests 1 and 2 of the KMLSVD thesis: an optimistic figure. The last "
    "20 % are not used",
    "thesis-3": "the model is trained on the training split and the first 80 % of the test split; the best "
    "epoch is chosen and reported on the last 20 %, as in test 3 of the KMLSVD thesis: an optimistic figure. "
    "The thesis's own tables suggest that its runs at equal dimensions had the training split alone",
}

_REPORTED = {"thesis-1": "test, first 80 %", "thesis-3": "test, last 20 %"}

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's generators take no larger one


@dataclass(frozen=True)
class BaseRecipe(ABC):
    """The common keys of all recipes: the sizes of the model, the optimizer, the seeds, the machine.

    Args:
        dataset: name of a data set.
        attention: a mechanism's name, ``{name: options}``, or a list with one of these per layer. A name
            alone has the mechanism's default options: eta is 0, so there is no auxiliary objective.
        embed_dim: model width d.
        num_heads: attention heads.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        positions: learnt, learnt_normal (larger at first), fixed, time_absolute, convolutional (relative) or
            none; language models have learnt or fixed ones, others say which they take.
        norm_first: pre-norm layers.
        short_convolution: taps of a depth-wise convolution of each attention's input, causal where the model
            is, which starts as the identity; over the grid of patches in models of images. 0: none.
        batch_size: sequences per step, on each device and in each pass.
        optimizer: radam, adam or adamw.
        learning_rate: the constant rate, or the largest of the schedule.
        weight_decay: weight decay of the optimizer.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        auxiliary_reduction: sum or mean over the layers of eta J^2.
        protocol: holdout, paper, or, for time series, thesis-1 or thesis-3; see ``PROTOCOLS``.
        seeds: one training per seed; the same seed gives the same figures.
        precision: 32-true, a mixed precision, or auto: bf16-mixed where the processor has it.
        accelerator: where the model is trained; auto takes the fastest one available.
        devices: processes on every machine, each with a device of its own.
        num_nodes: machines; with more than one, torchrun starts the processes.
        strategy: how several processes share the model: ddp, each with a copy; fsdp, each with a part of
            every weight; or auto, which is ddp.
        accumulate: passes of ``batch_size`` sequences in every step, whose gradients add up.
        sequence_shards: processes that share every sequence, each with a part of its tokens; divides their
            number.
        threads: CPU threads of PyTorch; 0 leaves the choice to PyTorch.
        keep_weights_every: epochs (or evaluations, where training is counted in steps) from one kept copy of
            the weights to the next, for analyze --over_training; the untrained weights are the first. 0 keeps
            none.
        loggers: tensorboard, mlflow or wandb: what is told the figures, beside the run folder.
        plugins: modules that register further mechanisms; only ``train`` imports them.
        version: of what the recipe means. Raise it by hand where the recipe's file changes what is trained:
            records of a lower version are stale, while a changed default makes none so.

    Raises:
        InputError: for a value of the wrong type or out of its range.
    """

    task_name: ClassVar[str]

    dataset: str
    attention: Any = "primal"
    embed_dim: Count = 512
    num_heads: Count = 8
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 2  # a list of them is made before any other check
    feedforward_dim: Count = 2048
    dropout: Probability = 0.1
    positions: Literal["learnt", "learnt_normal", "fixed", "time_absolute", "convolutional", "none"] = (
        "learnt"
    )
    norm_first: bool = False
    short_convolution: Whole = 0
    batch_size: Count = 16
    optimizer: Literal["radam", "adam", "adamw"] = "radam"
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 0.0
    gradient_clip: NonNegative = 4.0
    auxiliary_reduction: Literal["sum", "mean"] = "sum"
    protocol: Protocol = "holdout"
    seeds: Annotated[list[Seed], *DIFFERENT] = field(default_factory=lambda: [0])
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Annotated[int, Field(ge=1, le=4096)] = 1
    num_nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    accumulate: Count = 1
    sequence_shards: Count = 1
    threads: Annotated[int, Field(ge=0, le=4096)] = 0  # a system that cannot start them ends the process
    keep_weights_every: Whole = 0
    loggers: Annotated[list[Literal["tensorboard", "mlflow", "wandb"]], *UNIQUE] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    version: Count = 1

    def __post_init__(self) -> None:
        check_fields(self)
        require_plugins(self.plugins)
        self._layers()
        if self.processes % self.sequence_shards:
            raise InputError(
                f"sequence_shards={self.sequence_shards} must divide the number of processes, "
                f"{self.processes} (devices={self.devices}, num_nodes={self.num_nodes})"
            )
        if self.strategy == "fsdp":
            self._check_sharding()

    @property
    def processes(self) -> int:
        """Processes that train one model together."""
        return self.devices * self.num_nodes

    def train_settings(self) -> TrainSettings:
        """The settings of the loop."""
        own = set(field_names(type(self)))
        shared: dict[str, Any] = {
            name: getattr(self, name) for name in field_names(TrainSettings) if name in own
        }
        return TrainSettings(
            **shared,
            rounds=self.rounds,
            rounds_per_evaluation=self.rounds_per_evaluation,
            leaves_unused=bool(getattr(self, "experts", 0)),
        )

    @property
    def effective_batch(self) -> int:
        """Sequences of a step, over all processes and passes."""
        return self.batch_size * self.accumulate * (self.processes // self.sequence_shards)

    def _check_sharding(self) -> None:
        """InputError for what weights in parts do not go with."""
        if getattr(self, "ema_decay", 0):
            raise InputError(
                f"strategy='fsdp' with ema_decay={self.ema_decay}: the moving average needs whole weights"  # type: ignore[attr-defined]
            )
        if getattr(self, "curve_episodes", 0):
            raise InputError(
                "strategy='fsdp' with curve_episodes: episodes between steps need whole weights (accepted: 0)"
            )
        if self.sequence_shards > 1:
            raise InputError(
                f"strategy='fsdp' with sequence_shards={self.sequence_shards}: parts of the weights do not "
                "go together with parts of the sequences (accepted: strategy='ddp')"
            )

    @property
    @abstractmethod
    def rounds(self) -> int:
        """Passes of the trainer's outer loop, each of which ends in a row of metrics and a checkpoint."""

    @property
    @abstractmethod
    def duration(self) -> str:
        """The length of training, in words."""

    @property
    def rounds_per_evaluation(self) -> int:
        """Rounds from one evaluation to the next."""
        return 1

    @property
    def protocol_text(self) -> str:
        """The meaning of the protocol, in one sentence."""
        return PROTOCOLS[self.protocol]

    @property
    def reported_split(self) -> str:
        """The name of the cases that the protocol reports, for ``evaluation.json``."""
        return _REPORTED.get(self.protocol, "test")

    def remarks(self) -> list[str]:
        """Remarks for the user before the run starts, a sentence each."""
        from kernel_attention.mechanisms import dropped_objective

        dropped = dropped_objective(self._layers())
        said = [] if self.processes * self.accumulate == 1 else [f"{self.step_text()}; {self.seeds_text()}"]
        return said if dropped is None else [*said, dropped]

    def step_text(self) -> str:
        """The sequences of a step and who reads them, in words."""
        copies = self.processes // self.sequence_shards
        factors = [f"{self.batch_size} in a batch"]
        if copies > 1:
            factors.append(
                f"{copies} processes" if self.sequence_shards == 1 else f"{copies} groups of processes"
            )
        if self.accumulate > 1:
            factors.append(f"{self.accumulate} passes")
        if self.sequence_shards > 1:
            factors.append(f"each sequence in {self.sequence_shards} parts")
        strategy = f", {'ddp' if self.strategy == 'auto' else self.strategy}" if self.processes > 1 else ""
        return f"a step has {self.effective_batch} sequences ({' x '.join(factors)}{strategy})"

    def seeds_text(self) -> str:
        """Which random numbers the processes have."""
        if self.processes == 1:
            return "one stream of random numbers"
        return (
            "weights and order of the cases from the seed, dropout and augmentation from the seed and the "
            "process's number"
        )

    def attention_name(self) -> str:
        """The mechanism in a few words: ``primal``, or ``softmax+primal`` where layers differ."""
        names = [name for name, _ in self._layers()]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    def encoder_options(self) -> dict[str, Any]:
        """The fields that ``kernel_attention.models.SequenceEncoder`` takes."""
        names = (
            "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout", "positions",
            "norm_first", "short_convolution",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _layers(self) -> list[Choice]:
        # The table of mechanisms needs torch; reading a class of recipes for its help text does not.
        from kernel_attention.mechanisms import layer_specs

        return layer_specs(self.attention, self.num_layers)

    def keys(self) -> dict[str, Any]:
        """All keys with their values, as ``config.yaml`` holds them."""
        task = {} if self.task_name == DEFAULT_TASK else {"task": self.task_name}
        return task | dataclasses.asdict(self)


@dataclass(frozen=True)
class EpochRecipe(BaseRecipe):
    """A recipe whose training is counted in passes over the training data.

    Args:
        epochs: passes over the training data.
        validation_fraction: fraction of the training split held out for model selection (holdout) where there
            is no validation split.
        evaluate_every: epochs between evaluations; where it exceeds ``epochs``, the last epoch is evaluated.

    The other keys are those of ``BaseRecipe``.
    """

    epochs: Count = 100
    validation_fraction: Part = 0.2
    evaluate_every: Count = 1

    def remarks(self) -> list[str]:
        """Also that ``evaluate_every`` exceeds ``epochs``, where it does."""
        if self.evaluate_every <= self.epochs:
            return super().remarks()
        rare = (
            f"evaluate_every={self.evaluate_every} exceeds epochs={self.epochs}: the model is evaluated "
            "once, after the last epoch"
        )
        return [rare, *super().remarks()]

    @property
    def rounds(self) -> int:
        return self.epochs

    @property
    def duration(self) -> str:
        return f"{self.epochs} epochs"

    @property
    def rounds_per_evaluation(self) -> int:
        return min(self.evaluate_every, self.epochs)


@dataclass(frozen=True)
class StepRecipe(BaseRecipe):
    """A recipe whose training is counted in optimizer steps.

    Args:
        steps: optimizer steps.
        warmup_steps: steps in which the learning rate grows linearly from 0 to ``learning_rate``.
        schedule: after the warm-up: constant; linear, falling to 0 at the last step; or inverse_sqrt, falling
            with the square root of the step's number.
        evaluate_every: steps from one evaluation and checkpoint to the next, at most ``steps``.
        max_seconds: training ends with the evaluation after which its steps have taken this long, without the
            evaluations; 0 sets no limit. The schedule must not be linear, as its end would not be known.
        clock: of ``max_seconds``: wall, or processor, the time that the processor gave to this process, over
            all its threads. With one thread the latter depends less on what else the machine does.

    The other keys are those of ``BaseRecipe``.
    """

    protocol: Literal["holdout", "paper"] = "holdout"
    steps: Count = 1000
    warmup_steps: Whole = 0
    schedule: Literal["constant", "linear", "inverse_sqrt"] = "linear"
    evaluate_every: Count = 1000
    max_seconds: NonNegative = 0.0
    clock: Literal["wall", "processor"] = "wall"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_seconds and self.schedule == "linear":
            raise InputError(
                f"max_seconds={self.max_seconds:g} with schedule='linear': the rate falls to 0 at the last "
                f"of {self.steps} steps, which training may never reach (accepted: constant, inverse_sqrt)"
            )
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
        if self.max_seconds:
            return f"{self.max_seconds:g} s ({self.clock} time), at most {self.steps} steps"
        return f"{self.steps} steps"

    def learning_rate_factor(self, step: int) -> float:
        """The factor of ``learning_rate`` at step number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "inverse_sqrt":
            return (max(self.warmup_steps, 1) / (step + 1)) ** 0.5
        return max(self.steps - step, 0) / max(self.steps - self.warmup_steps, 1)


@dataclass(frozen=True)
class VisionRecipe(EpochRecipe):
    """The common keys of recipes with a vision transformer, whose sizes are those of DeiT-tiny by default.

    Args:
        patch_size: side of the patches, each of which becomes a token.
        pooling: what the classifier reads: a class token, or the mean over all tokens.
        channel_attention: whether the channels of the feed-forward networks are weighed as in FAN.
        drop_path: largest rate of stochastic depth; it grows linearly from 0 in the first layer.
        min_learning_rate: the learning rate at the end of the schedule.
        train_cases: number of training images, evenly spaced; 0 is all.
        evaluation_cases: the same for the validation and the test split.
        workers: processes that read batches while the model trains; 0 reads them in between.

    The other keys are those of ``EpochRecipe``.
    """

    attention: Any = "softmax"
    embed_dim: Count = 192
    num_heads: Count = 3
    num_layers: Count = 12
    feedforward_dim: Count = 768
    dropout: Probability = 0.0
    norm_first: bool = True
    gradient_clip: NonNegative = 0.0
    protocol: Literal["holdout", "paper"] = "holdout"
    patch_size: Count = 4
    pooling: Literal["class", "mean"] = "class"
    channel_attention: bool = False
    drop_path: Probability = 0.0
    min_learning_rate: NonNegative = 1e-5
    train_cases: Whole = 0
    evaluation_cases: Whole = 0
    validation_fraction: Part = 0.1
    workers: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.norm_first or self.positions != "learnt":
            raise InputError("a vision transformer has norm_first=true and positions=learnt")
        if self.min_learning_rate > self.learning_rate:
            raise InputError(
                f"min_learning_rate={self.min_learning_rate} exceeds learning_rate={self.learning_rate}"
            )

    def model_options(self) -> dict[str, Any]:
        """The keys that ``kernel_attention.models.vision.VisionTransformer`` takes."""
        names = (
            "patch_size", "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout",
            "drop_path", "pooling", "channel_attention", "short_convolution",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def require_equal(trained: BaseRecipe, recipe: BaseRecipe, keys: Sequence[str]) -> None:
    """InputError where the recipe of the run that a training starts from differs in one of these keys."""
    different = [key for key in keys if getattr(trained, key) != getattr(recipe, key)]
    if different:
        said = (
            f"{key} is {getattr(trained, key)} there and {getattr(recipe, key)} here" for key in different
        )
        raise InputError(f"{', '.join(said)}; both must be equal")
