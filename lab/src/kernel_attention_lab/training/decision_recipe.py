"""The recipe of a policy that is learnt from recorded episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Number, Part, Positive, Whole
from kernel_attention.specs import Choice
from kernel_attention_lab.training.recipe import StepRecipe

NO_ATTENTION = "none"


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
            gives the headline figure. Empty: the largest return of the data.
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
            "activation", "return_scale",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _layers(self) -> list[Choice]:
        return super()._layers() if self.has_attention else []
