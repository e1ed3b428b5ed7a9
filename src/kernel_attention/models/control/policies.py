"""The base of policies: scale of the states, range of the actions; and a policy of the state alone.

Legend: B episodes, K time steps, o numbers of a state, a numbers of an action or discrete actions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device
from kernel_attention.errors import InputError, require_positive, require_probability, unknown
from kernel_attention.tensors.dropout import Dropout

ActionKind = Literal["continuous", "discrete"]


class Policy(nn.Module, ABC):
    """A map of the steps of an episode to its actions.

    Args:
        state_dim: o.
        action_dim: a.
        actions: "continuous" (bounded, by tanh) or "discrete" (a of them, by their logits).
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        layers: the encoder layers; empty for a policy without attention.
        input_mean: the training states' mean, (o,); part of the weights, see ``set_scale``.
        input_std: their standard deviation, (o,).
        action_center: the middle of the range of the actions, (a,); see ``set_action_range``.
        action_radius: half of the range's width, (a,).
    """

    layers: nn.ModuleList
    input_mean: Tensor
    input_std: Tensor
    action_center: Tensor
    action_radius: Tensor

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        *,
        actions: ActionKind = "continuous",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(state_dim=state_dim, action_dim=action_dim)
        if actions not in ("continuous", "discrete"):
            raise unknown("actions", actions, ("continuous", "discrete"))
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.state_dim, self.action_dim = state_dim, action_dim
        self.is_discrete = actions == "discrete"
        self.register_buffer("input_mean", torch.zeros(state_dim, **where))
        self.register_buffer("input_std", torch.ones(state_dim, **where))
        self.register_buffer("action_center", torch.zeros(action_dim, **where))
        self.register_buffer("action_radius", torch.ones(action_dim, **where))

    @abstractmethod
    def forward(
        self,
        returns: Tensor,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The action of every step, from this step's state and what comes before it.

        Args:
            returns: (B, K), the sum of the rewards from each step to the episode's end.
            states: (B, K, o).
            actions: (B, K, a), or whole numbers (B, K) where actions are discrete.
            timesteps: (B, K) int64, the number of each step in its episode.
            attention_mask: (B, K) bool, True = real step; the others come last.

        Returns:
            (B, K, a): the actions in their range, or the logits of the discrete ones.
        """

    def set_scale(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Standardise every state by these statistics of the training states, (o,) each."""
        self.input_mean.copy_(torch.as_tensor(mean))
        self.input_std.copy_(torch.as_tensor(std))

    def set_action_range(self, low: Sequence[float] | Tensor, high: Sequence[float] | Tensor) -> None:
        """Bound the actions to these least and largest ones, (a,) each; (-1, 1) at first.

        Raises:
            InputError: for a range that is empty or not finite.
        """
        low, high = (torch.as_tensor(bound, dtype=self.action_center.dtype) for bound in (low, high))
        if not (torch.isfinite(low).all() and torch.isfinite(high).all() and (low < high).all()):
            raise InputError(f"action range {low.tolist()} to {high.tolist()}: expected finite low < high")
        self.action_center.copy_((low + high) / 2)
        self.action_radius.copy_((high - low) / 2)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self.input_mean.zero_()
        self.input_std.fill_(1.0)
        self.action_center.zero_()
        self.action_radius.fill_(1.0)

    def standardized(self, states: Tensor) -> Tensor:
        """(..., o) -> (..., o), by the training states' statistics."""
        return (states - self.input_mean) / self.input_std

    def in_range(self, outputs: Tensor) -> Tensor:
        """(..., a), the last layer's outputs -> the actions in their range, or the outputs as logits."""
        if self.is_discrete:
            return outputs
        return self.action_center + self.action_radius * torch.tanh(outputs)

    def check_steps(self, returns: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor) -> None:
        """InputError for the steps of a ``forward`` whose shapes do not fit."""
        expected = {
            "states": (states, (*returns.shape, self.state_dim)),
            "actions": (actions, returns.shape if self.is_discrete else (*returns.shape, self.action_dim)),
            "timesteps": (timesteps, returns.shape),
        }
        if returns.dim() != 2 or returns.size(1) == 0:
            raise InputError(
                f"returns has shape {tuple(returns.shape)}, expected (B, K) with K at least 1 time step"
            )
        for name, (found, shape) in expected.items():
            if found.shape != shape:
                raise InputError(f"{name} has shape {tuple(found.shape)}, expected {tuple(shape)}")


class StatePolicy(Policy):
    """A perceptron that reads the current state alone: behaviour cloning, the baseline without attention.

    Args:
        state_dim: o.
        action_dim: a.
        actions: "continuous" or "discrete".
        width: of every hidden layer.
        num_layers: hidden layers.
        dropout: after every hidden layer.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    def __init__(
        self,
        state_dim: int,
        action_dim: int,
        *,
        actions: ActionKind = "continuous",
        width: int = 128,
        num_layers: int = 3,
        dropout: float = 0.1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(state_dim, action_dim, actions=actions, device=device, dtype=dtype)
        require_positive(width=width, num_layers=num_layers)
        require_probability(dropout=dropout)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = [state_dim, *[width] * num_layers]
        self.layers = nn.ModuleList()
        self.hidden = nn.ModuleList(nn.Linear(before, after, **where) for before, after in pairwise(widths))
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(width, action_dim, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers."""
        super().reset_parameters()
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
        self.head.reset_parameters()

    def forward(
        self,
        returns: Tensor,
        states: Tensor,
        actions: Tensor,
        timesteps: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(B, K, o) states -> (B, K, a); the other arguments are those of every policy, and not read."""
        self.check_steps(returns, states, actions, timesteps)
        x = self.standardized(states)
        for layer in self.hidden:
            x = self.dropout(F.relu(layer(x)))
        return self.in_range(self.head(x))
