"""The decision transformer (Chen et al. 2021): actions from returns-to-go, states and earlier actions.

Primal-Attention's form has three layers, the last with the causal data-independent mechanism (supplement,
B.1): ``attention=["softmax", "softmax", {"primal": {"rank": 64, "eta": 0.05, "data_dependent": False}}]``.

The legend is that of ``kernel_attention.models.control.policies``; d is the model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import require_causal_form
from kernel_attention.core.parameters import Device, reset_module
from kernel_attention.core.validation import require_positive, require_probability
from kernel_attention.errors import InputError
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
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

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
