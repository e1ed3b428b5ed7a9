"""Policies from recorded episodes, and the episodes that they play."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Number, Part, Positive, Whole
from kernel_attention.models import DecisionTransformer, Policy, StatePolicy
from kernel_attention.series.outputs import batch_outputs
from kernel_attention.specs import Choice
from kernel_attention.training.task import SameLossTask
from kernel_attention_lab.control.environments import (
    check_spaces,
    longest_episode,
    make_environment,
    simulator_versions,
)
from kernel_attention_lab.control.roll_outs import (
    RollOuts,
    normalized_score,
    random_roll_outs,
    roll_out,
)
from kernel_attention_lab.data.decisions.batches import (
    DecisionBatch,
    ordered_windows,
    training_windows,
)
from kernel_attention_lab.data.decisions.episodes import Episodes
from kernel_attention_lab.data.decisions.loading import load_decisions
from kernel_attention_lab.data.decisions.sets import check_environment_name
from kernel_attention_lab.run_folder import is_number
from kernel_attention_lab.tasks.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.tasks.recipe import StepRecipe
from kernel_attention_lab.tasks.registry import register_task

NO_ATTENTION = "none"
_DIAGNOSED_AT_ONCE = 8
_EVALUATION_BATCH = 64  # windows at once
_SPLIT_SEED = 0
_BEST = 0.1  # of the episodes: what the baseline of percent behaviour cloning is trained on


@dataclass(frozen=True)
class DecisionRecipe(StepRecipe):
    """A decision transformer, or behaviour cloning, on episodes of a gymnasium environment.

    Args:
        dataset: a Minari data set by its name, or an HDF5 file of D4RL; several are joined with +.
        attention: as for other tasks; none is behaviour cloning, a perceptron that reads the current state
            alone.
        context: time steps that the model reads in training, three tokens each.
        activation: of the feed-forward networks.
        return_scale: returns are divided by it inside the model.
        environment: gymnasium's name of the environment, such as Hopper-v5; empty: the data set's own.
        target_returns: the returns that evaluation asks for, each with episodes of its own. The first one
            gives the headline metric. Empty: the largest return of the data.
        best_fraction: train on this fraction of the episodes, those of the largest returns.
        validation_fraction: fraction of the episodes that is held out.
        evaluation_episodes: episodes of each target.
        evaluation_seed: the first episode's seed; the others follow it.
        parallel_environments: episodes that are played at once.
        memory: what the policy remembers of an episode: sliding, the last steps; recurrent, all steps in the
            layers' decoding states.
        evaluation_context: steps of the sliding memory; 0 is context.
        curve_episodes: also play so many episodes at every evaluation in training; 0 plays none.

    The other keys are those of ``StepRecipe``.
    """

    task_name: ClassVar[str] = "decisions"

    attention: Any = "softmax"
    embed_dim: Count = 128
    num_heads: Count = 4
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 3
    feedforward_dim: Count = 512
    norm_first: bool = True
    context: Count = 20
    activation: Literal["relu", "gelu"] = "relu"
    return_scale: Positive = 1000.0
    environment: str = ""
    target_returns: list[Number] = field(default_factory=list)
    best_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    validation_fraction: Part = 0.1
    evaluation_episodes: Count = 20
    evaluation_seed: Whole = 0
    parallel_environments: Count = 20
    memory: Literal["sliding", "recurrent"] = "sliding"
    evaluation_context: Whole = 0
    curve_episodes: Whole = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.norm_first or self.positions != "learnt":
            raise InputError("a decision transformer has norm_first=true and positions=learnt")
        if self.protocol != "holdout":
            raise InputError(
                f"protocol={self.protocol!r}: no episode chooses the weights of a policy, use holdout"
            )
        if len(set(self.target_returns)) < len(self.target_returns):
            raise InputError(f"target_returns={self.target_returns}: a value is given twice")

    @property
    def has_attention(self) -> bool:
        """Return whether the policy is a decision transformer."""
        return self.attention != NO_ATTENTION

    @property
    def protocol_text(self) -> str:
        return (
            "the weights after the last step are played in the environment; no episode of it chooses them, "
            "and the loss is that of held-out recorded episodes"
        )

    @property
    def reported_split(self) -> str:
        return "environment"

    def attention_name(self) -> str:
        return super().attention_name() if self.has_attention else NO_ATTENTION

    def model_options(self) -> dict[str, Any]:
        """The keys that ``kernel_attention.models.DecisionTransformer`` takes."""
        names = (
            "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout", "context",
            "activation", "return_scale", "short_convolution",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _layers(self) -> list[Choice]:
        return super()._layers() if self.has_attention else []


class DecisionTask(SameLossTask):
    """Mean squared error of the actions, or cross-entropy of discrete ones, over the real steps.

    Logs ``train_loss``, ``val_loss``, each J, and the metrics of ``played``, if any, prefixed ``val_``.

    Args:
        model: a policy.
        recipe: optimizer and schedule.
        played: plays a few episodes and returns their metrics; called after every evaluation.
    """

    model: Policy

    def __init__(
        self,
        model: Policy,
        recipe: DecisionRecipe,
        played: Callable[[Policy], dict[str, float]] | None = None,
    ) -> None:
        super().__init__(model, recipe.train_settings(), recipe.learning_rate_factor)
        self.played = played

    def on_validation_epoch_end(self) -> None:
        if self.played is not None:
            for name, value in self.trainer.processes.told(self.played(self.model)).items():
                self.log(f"val_{name}", value)

    def weight(self, batch: DecisionBatch) -> int:
        """The real steps."""
        return int(batch.is_real.sum())

    def _log_step(self, stage: str, batch: DecisionBatch) -> Tensor:
        loss = action_loss(self.model(*batch.arguments), batch)
        self.log(f"{stage}_loss", loss.detach(), self.weight(batch))
        return loss


def action_loss(outputs: Tensor, batch: DecisionBatch) -> Tensor:
    """Mean over the real steps of the squared error (B, K, a), or of the cross-entropy of logits."""
    found, targets = outputs.float()[batch.is_real], batch.actions[batch.is_real]
    if targets.dtype == torch.long:
        return F.cross_entropy(found, targets)
    return F.mse_loss(found, targets)


@register_task(DecisionRecipe)
class DecisionExperiment(Experiment):
    """A policy from recorded episodes, described by a ``DecisionRecipe``."""

    recipe: DecisionRecipe
    required_facts: ClassVar[tuple[str, ...]] = ("state_dim", "action_dim", "max_timestep")
    keeps_last_weights: ClassVar[bool] = True

    def __init__(self, recipe: DecisionRecipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        self.data = load_decisions(recipe.dataset, data_root, recipe.environment)
        if not self.data.environment:
            raise InputError(
                f"dataset {recipe.dataset}: names no environment; give one, as --environment Hopper-v5"
            )
        environment = self._environments(1)[0]
        bounds = {"low": list(self.data.low), "high": list(self.data.high)}
        check_spaces(environment, state_dim=self.data.state_dim, action_dim=self.data.action_dim, **bounds)
        self.max_timestep = max(longest_episode(environment), int(self.data.episodes.lengths.max()))
        self.played: dict[str, RollOuts] = {}

    @staticmethod
    def build_model(recipe: DecisionRecipe, facts: dict[str, Any]) -> Policy:
        sizes = (facts["state_dim"], facts["action_dim"])
        if recipe.has_attention:
            more = recipe.model_options() | {"max_timestep": facts["max_timestep"]}
            return DecisionTransformer(*sizes, actions=facts["actions"], **more)
        return StatePolicy(
            *sizes,
            actions=facts["actions"],
            width=recipe.embed_dim,
            num_layers=recipe.num_layers,
            dropout=recipe.dropout,
        )

    @classmethod
    def check_facts(cls, facts: Any, path: Path) -> None:
        super().check_facts(facts, path)
        if facts.get("actions") not in ("continuous", "discrete"):
            raise InputError(f"{path}: actions are {facts.get('actions')!r}, accepted: continuous, discrete")
        check_environment_name(facts.get("environment"), str(path))
        reference = facts.get("reference")
        is_pair = isinstance(reference, list) and len(reference) == 2 and all(map(is_number, reference))
        is_right = (
            isinstance(facts.get("environment_options"), dict)
            and is_number(facts.get("best_return"))
            and (reference is None or (is_pair and reference[0] < reference[1]))
        )
        if not is_right:
            raise InputError(
                f"{path}: does not describe an environment (environment_options, best_return, reference)"
            )

    @property
    def metric(self) -> Metric:
        return Metric("episode_return" if self.data.reference is None else "normalized_score", True)

    @property
    def selection_metric(self) -> Metric:
        return Metric("val_loss", False)  # no episode is played before the end

    def facts(self) -> dict[str, Any]:
        data, episodes = self.data, self.data.episodes
        return {
            "dataset": data.name,
            "task": "decisions",
            "environment": data.environment,
            "environment_options": data.environment_options,
            "state_dim": data.state_dim,
            "action_dim": data.action_dim,
            "actions": "discrete" if episodes.is_discrete else "continuous",
            "action_low": list(data.low),
            "action_high": list(data.high),
            "max_timestep": self.max_timestep,
            "reference": None if data.reference is None else list(data.reference),
            "episodes": len(episodes),
            "steps": episodes.steps,
            "mean_return": round(float(episodes.returns.mean()), 3),
            "best_return": round(float(episodes.returns.max()), 3),
        }

    def loaders(self, seed: int) -> Loaders:
        recipe = self.recipe
        train, held_out = self._split
        batches = training_windows(
            train, recipe.context, recipe.effective_batch, recipe.steps_per_round, seed
        )
        return batches, ordered_windows(held_out, recipe.context, _EVALUATION_BATCH)

    def prepare(self, model: Policy, seed: int) -> None:
        states = self._split[0].states
        # The deviation has the released code's floor, so that a constant part of the state stays zero.
        model.set_scale(states.mean(axis=0, dtype=np.float64), states.std(axis=0, dtype=np.float64) + 1e-6)
        if self.data.low:
            model.set_action_range(self.data.low, self.data.high)

    def task(self, model: nn.Module) -> DecisionTask:
        assert isinstance(model, Policy)
        return DecisionTask(model, self.recipe, self._curve_metrics if self.recipe.curve_episodes else None)

    def evaluate(self, model: Policy) -> dict[str, Any]:
        """The metrics of the episodes of every target, and the baselines that need no policy.

        Deviations are those over the episodes. ``data`` is the mean over the recorded episodes, ``best_data``
        over the best tenth of them, ``random`` over episodes of random actions.
        """
        recipe = self.recipe
        metrics: dict[str, Any] = {}
        for place, target in enumerate(self.targets):
            found = self._play(model, target, recipe.evaluation_episodes)
            self.played[f"{target:g}"] = found
            name = "" if place == 0 else f"_target_{target:g}"
            metrics |= {f"{key}{name}": value for key, value in self._metrics(found).items()}
        random = self._random()
        self.played["random"] = random
        recorded = self.data.episodes
        baselines = {
            "data": recorded.returns,
            "best_data": recorded.best(_BEST).returns,
            "random": random.returns,
        }
        for name, returns in baselines.items():
            metrics[f"{name}_{self.metric.name}"] = float(self._score(returns).mean())
        played = {
            "target_return": self.targets[0],
            "episodes": recipe.evaluation_episodes,
            "memory": recipe.memory,
            "loss": self._loss(model),
            **simulator_versions(),
        }
        return metrics | played

    def appendices(self, model: Any) -> dict[str, Any]:
        """The return and the length of every episode that was played, and the recorded returns."""
        played = {
            name: {"returns": found.returns.tolist(), "lengths": found.lengths.tolist()}
            for name, found in self.played.items()
        }
        return {"episodes.json": {"played": played, "recorded": self.data.episodes.returns.tolist()}}

    @property
    def targets(self) -> list[float]:
        """The returns that are asked for; one alone where the policy does not read it."""
        asked = self.recipe.target_returns or [round(float(self.data.episodes.returns.max()), 3)]
        return asked if self.recipe.has_attention else asked[:1]

    def batches(self, cases: int) -> list[tuple[torch.Tensor, ...]]:
        """Evenly spaced windows of the held-out episodes."""
        loader = ordered_windows(self._split[1], self.recipe.context, _DIAGNOSED_AT_ONCE, cases)
        return [batch.arguments for batch in loader]

    def cases_text(self, count: int) -> str:
        return f"{count} evenly spaced windows of {self.recipe.context} steps of the held-out episodes"

    @functools.cached_property
    def _split(self) -> tuple[Episodes, Episodes]:
        """(training episodes, those held out), the same for every seed."""
        rest, held_out = self.data.episodes.split(self.recipe.validation_fraction, _SPLIT_SEED)
        return (rest if self.recipe.best_fraction == 1.0 else rest.best(self.recipe.best_fraction)), held_out

    def _environments(self, count: int) -> list[Any]:
        return [make_environment(self.data.environment, self.data.environment_options) for _ in range(count)]

    @functools.cached_property
    def _playground(self) -> list[Any]:
        most = max(self.recipe.evaluation_episodes, self.recipe.curve_episodes)
        return self._environments(min(self.recipe.parallel_environments, most))

    def _seeds(self, count: int) -> list[int]:
        return [self.recipe.evaluation_seed + number for number in range(count)]

    def _play(self, model: Policy, target: float, count: int) -> RollOuts:
        recipe = self.recipe
        return roll_out(
            model,
            self._playground,
            self._seeds(count),
            target,
            memory=recipe.memory,
            context=recipe.evaluation_context,
            longest=self.max_timestep,
        )

    def _random(self) -> RollOuts:
        return random_roll_outs(
            self._playground, self._seeds(self.recipe.evaluation_episodes), self.max_timestep
        )

    def _curve_metrics(self, model: Policy) -> dict[str, float]:
        """The headline metric of a few episodes, for the learning curve."""
        found = self._play(model, self.targets[0], self.recipe.curve_episodes)
        return {self.metric.name: float(self._score(found.returns).mean())}

    def _metrics(self, found: RollOuts) -> dict[str, float]:
        metrics = {"episode_return": found.returns, "episode_length": found.lengths.astype(float)}
        if self.data.reference is not None:
            metrics = {"normalized_score": self._score(found.returns)} | metrics
        means = {name: float(values.mean()) for name, values in metrics.items()}
        if not all(np.isfinite(value) for value in means.values()):
            raise FloatingPointError(
                f"the episodes of {self.data.environment} have returns that are not finite"
            )
        if len(found.returns) < 2:
            return means
        deviations = {
            f"{name}_deviation": float(values.std(ddof=1))
            for name, values in metrics.items()
            if name != "episode_length"
        }
        return means | deviations

    def _score(self, returns: np.ndarray) -> np.ndarray:
        """The returns in the unit of the headline metric."""
        return returns if self.data.reference is None else normalized_score(returns, self.data.reference)

    def _loss(self, model: Policy) -> float:
        """The loss on the held-out episodes."""
        total, count = 0.0, 0
        windows = ordered_windows(self._split[1], self.recipe.context, _EVALUATION_BATCH)
        batch: DecisionBatch
        for outputs, batch in batch_outputs(model, windows, self.recipe.precision):
            steps = int(batch.is_real.sum())
            total += float(action_loss(outputs, batch)) * steps
            count += steps
        return total / count
