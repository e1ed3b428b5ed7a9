"""The decision transformer (Chen et al. 2021): actions from returns-to-go, states and earlier actions; and
memories.

Primal-Attention's form has three layers, the last with the causal data-independent mechanism (supplement,
B.1): ``attention=["softmax", "softmax", {"primal": {"rank": 64, "eta": 0.05, "data_dependent": False}}]``.

The legend is that of ``kernel_attention.models.control.policies``; d is the model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.core.decoding import reorder
from kernel_attention.core.layer import require_causal_form
from kernel_attention.core.parameters import Device, reset_module
from kernel_attention.errors import InputError, require_positive, require_probability, unknown
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.control.policies import ActionKind, Policy
from kernel_attention.models.encoder_layer import EncoderLayer, create_attentions
from kernel_attention.models.language.decoding import DecodingState, initial_state, step_through
from kernel_attention.tensors.dropout import Dropout

TOKENS = 3  # of a time step: its return-to-go, its state, its action
_DEVIATION = 0.02  # of the embedded time steps at first; PyTorch's 1 hides the states behind them


class DecisionTransformer(Policy):
    """Three tokens a time step, an embedding of the step's number, causal layers, the action at the state.

    A step is the tokens (return-to-go, state, action). The action is read off at its state, so it depends on
    the returns and states up to its step and on the actions before it.

    Args:
        state_dim: o.
        action_dim: a.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        actions: "continuous" (mapped to their range by tanh) or "discrete" (a of them, by their logits).
        context: time steps K that training reads at once; mechanisms with a longest sequence get 3 K.
        max_timestep: longest episode.
        return_scale: returns are divided by it.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: of embeddings and layers, and of the attention weights where a mechanism has them.
        activation: of the feed-forward networks, "relu" as released, or "gelu".
        short_convolution: taps of a depth-wise convolution of each attention's input; 0: none. See
            ``ShortConvolution``.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Raises:
        InputError: for a mechanism or options without a causal form, and for sizes out of range.
    """

    supports_sharding = False  # every part of a sequence would get the steps of the first part

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "softmax",
        *,
        actions: ActionKind = "continuous",
        context: int = 20,
        max_timestep: int = 1000,
        return_scale: float = 1000.0,
        embed_dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 3,
        feedforward_dim: int = 512,
        dropout: float = 0.1,
        activation: Literal["gelu", "relu"] = "relu",
        short_convolution: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(state_dim, action_dim, actions=actions, device=device, dtype=dtype)
        require_positive(
            context=context, max_timestep=max_timestep, embed_dim=embed_dim, num_layers=num_layers,
            feedforward_dim=feedforward_dim,
        )  # fmt: skip
        require_probability(dropout=dropout)
        if not 0.0 < return_scale < float("inf"):
            raise InputError(f"return_scale={return_scale} must be a finite number above 0")
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.context, self.max_timestep, self.return_scale = context, max_timestep, return_scale
        self.time_embedding = nn.Embedding(max_timestep, embed_dim, **where)
        nn.init.normal_(self.time_embedding.weight, std=_DEVIATION)
        self.return_embedding = nn.Linear(1, embed_dim, **where)
        self.state_embedding = nn.Linear(state_dim, embed_dim, **where)
        self.action_embedding: nn.Module = (
            nn.Embedding(action_dim, embed_dim, **where)
            if self.is_discrete
            else nn.Linear(action_dim, embed_dim, **where)
        )
        self.embedding_norm = nn.LayerNorm(embed_dim, **where)
        self.dropout = Dropout(dropout)
        shared = {"max_len": TOKENS * context, "dropout": dropout}
        self.layers = nn.ModuleList()
        for layer in create_attentions(attention, num_layers, embed_dim, num_heads, shared, **where):
            require_causal_form(layer, layer.mechanism_name)
            self.layers.append(
                EncoderLayer(
                    layer, feedforward_dim, dropout, True, activation=activation,
                    short_convolution=short_convolution, **where,
                )
            )  # fmt: skip
        self.norm = nn.LayerNorm(embed_dim, **where)
        self.head = nn.Linear(embed_dim, action_dim, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        super().reset_parameters()
        self.time_embedding.reset_parameters()
        nn.init.normal_(self.time_embedding.weight, std=_DEVIATION)
        for part in (
            self.return_embedding, self.state_embedding, self.action_embedding,
            self.embedding_norm, self.layers, self.norm, self.head,
        ):  # fmt: skip
            reset_module(part)

    def forward(
        self,
        returns: Tensor,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The actions (B, K, a) of all steps in parallel; see ``Policy.forward``.

        Raises:
            InputError: for shapes that do not fit together.
        """
        self.check_steps(returns, states, actions, timesteps)
        time = self.time_embedding(timesteps)
        tokens = [self._return_token(returns), self._state_token(states), self._action_token(actions)]
        x = torch.stack([token + time for token in tokens], dim=2).flatten(1, 2)
        x = self.dropout(self.embedding_norm(x))
        mask = None if attention_mask is None else attention_mask.repeat_interleave(TOKENS, dim=1)
        for layer in self.layers:
            x = layer(x, mask, True)
        return self._read(x[:, 1::TOKENS])

    def initial_state(self, batch_size: int = 1) -> DecodingState:
        """The state of a roll-out before its first step."""
        return initial_state(self, batch_size)

    def act(self, returns: Tensor, states: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        """Read the return-to-go and the state of a step -> its action (B, a), and the state after them.

        What ``forward`` gives the last of all steps read so far, in evaluation mode. The time and memory of a
        step are constant where every mechanism has a recurrent form of constant size.

        Args:
            returns: (B,).
            states: (B, o).
            state: of the roll-out, after ``observe``.
        """
        _, state = self._step(self._return_token(returns), state)
        x, state = self._step(self._state_token(states), state)
        return self._read(x), state

    def observe(self, actions: Tensor, state: DecodingState) -> DecodingState:
        """Read the action that was taken, (B, a), or (B,) where actions are discrete, after ``act``."""
        return self._step(self._action_token(actions), state)[1]

    def check_time(self, timestep: int) -> None:
        """InputError for a step beyond the longest episode."""
        if timestep >= self.max_timestep:
            raise InputError(f"timestep {timestep} exceeds max_timestep={self.max_timestep}")

    def _step(self, token: Tensor, state: DecodingState) -> tuple[Tensor, DecodingState]:
        assert isinstance(state.position, int)  # every episode of a roll-out is as long
        timestep = state.position // TOKENS
        self.check_time(timestep)
        x = self.dropout(self.embedding_norm(token + self.time_embedding.weight[timestep]))
        x, layers = step_through(self.layers, x, state.layers)
        return x, DecodingState(state.position + 1, layers)

    def _return_token(self, returns: Tensor) -> Tensor:
        return self.return_embedding(returns[..., None] / self.return_scale)

    def _state_token(self, states: Tensor) -> Tensor:
        return self.state_embedding(self.standardized(states))

    def _action_token(self, actions: Tensor) -> Tensor:
        if self.is_discrete:
            return self.action_embedding(actions)
        return self.action_embedding((actions - self.action_center) / self.action_radius)

    def _read(self, x: Tensor) -> Tensor:
        return self.in_range(self.head(self.norm(x)))


MEMORIES = ("sliding", "recurrent")


class Memory(ABC):
    """B episodes under way, all at the same step.

    Every step is ``act`` and then ``observe``. Gradients are off; put the model into evaluation mode first.
    """

    @abstractmethod
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """Returns-to-go (B,) and states (B, o) of a step -> its actions in their range or logits, (B, a)."""

    @abstractmethod
    def observe(self, actions: Tensor) -> None:
        """Remember the actions that were taken, (B, a), or (B,) where they are discrete."""

    @abstractmethod
    def keep(self, episodes: Tensor) -> None:
        """Go on with these episodes alone, int64 indices."""


class _Steps(NamedTuple):
    """Steps of B episodes: (B, K), (B, K, o), and (B, K, a) or (B, K)."""

    returns: Tensor
    states: Tensor
    actions: Tensor


class SlidingMemory(Memory):
    """The last steps, read anew at every step, as the decision transformer's released code does.

    Args:
        model: any policy.
        context: the number of steps that are kept.
    """

    def __init__(self, model: Policy, context: int) -> None:
        require_positive(context=context)
        self.model = model
        self.context = context
        self.timestep = 0
        self.steps: _Steps | None = None

    @torch.no_grad()
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """The action after the last steps and these returns and states."""
        if isinstance(self.model, DecisionTransformer):
            self.model.check_time(self.timestep)
        # The action of this step is not taken yet; a causal model does not read it.
        kind = torch.long if self.model.is_discrete else states.dtype
        shape = (len(states), 1) if self.model.is_discrete else (len(states), 1, self.model.action_dim)
        new = _Steps(returns[:, None], states[:, None], torch.zeros(shape, dtype=kind, device=states.device))
        if self.steps is not None:
            new = _Steps(*(torch.cat(parts, dim=1) for parts in zip(self.steps, new, strict=True)))
        self.steps = _Steps(*(part[:, -self.context :] for part in new))
        first = self.timestep + 1 - self.steps.returns.size(1)
        times = torch.arange(first, self.timestep + 1, device=states.device).expand_as(self.steps.returns)
        return self.model(*self.steps, times)[:, -1]

    def observe(self, actions: Tensor) -> None:
        """Put the actions that were taken in the place of those to come."""
        assert self.steps is not None, "act comes first"
        taken = self.steps.actions.clone()
        taken[:, -1] = actions
        self.steps = self.steps._replace(actions=taken)
        self.timestep += 1

    def keep(self, episodes: Tensor) -> None:
        """Forget the other episodes."""
        if self.steps is not None:
            self.steps = _Steps(*(part[episodes] for part in self.steps))


class RecurrentMemory(Memory):
    """All steps, in the layers' decoding states: constant time and memory a step where these are constant.

    For the first K steps of an episode its actions are those of ``SlidingMemory`` with a context of K. Later
    they differ: here no step is forgotten, and no step is read as if it were the first.

    Args:
        model: a decision transformer.
        batch_size: B.
    """

    def __init__(self, model: DecisionTransformer, batch_size: int) -> None:
        self.model = model
        self.state = model.initial_state(batch_size)

    @torch.no_grad()
    def act(self, returns: Tensor, states: Tensor) -> Tensor:
        """The action after all steps so far and these returns and states."""
        actions, self.state = self.model.act(returns, states, self.state)
        return actions

    @torch.no_grad()
    def observe(self, actions: Tensor) -> None:
        """Read the actions that were taken."""
        self.state = self.model.observe(actions, self.state)

    def keep(self, episodes: Tensor) -> None:
        """Forget the other episodes."""
        self.state = reorder(self.state, episodes)


def make_memory(model: Policy, batch_size: int, memory: str = "sliding", context: int = 0) -> Memory:
    """The memory of B new episodes.

    Args:
        model: any policy. One that reads the current state alone needs no more than this state.
        batch_size: B.
        memory: "sliding" or "recurrent".
        context: steps that the sliding memory keeps; 0: those of the model's training.

    Raises:
        InputError: for another memory.
    """
    if memory not in MEMORIES:
        raise unknown("memory", memory, MEMORIES)
    if not isinstance(model, DecisionTransformer):
        return SlidingMemory(model, 1)
    if memory == "recurrent":
        return RecurrentMemory(model, batch_size)
    return SlidingMemory(model, context or model.context)
