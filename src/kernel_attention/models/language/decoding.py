"""Decoding a causal model token by token.

A layer with a recurrent form (``initial_state`` and ``step``) is decoded by that form. Any other keeps its
inputs and attends to all of them again: the output is the same, and time and memory grow with the text.
A short convolution before it remembers its last inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.models.encoder_layer import EncoderLayer


@dataclass(frozen=True)
class DecodingState:
    """The state of a model after the text that it has read.

    Args:
        position: tokens read, one number where all texts have equally many, or (B,) int64.
        layers: the state of every layer: its mechanism's own, or ``Prefix``; see ``Convolved`` too.
    """

    position: int | Tensor
    layers: tuple[Any, ...]


@dataclass(frozen=True)
class Prefix:
    """The inputs of an attention layer without a recurrent form, (B, n, d); None before the first.

    ``attention_mask`` (B, n) says which are real tokens; None: all.
    """

    x: Tensor | None = None
    attention_mask: Tensor | None = None

    def extended(self, x: Tensor) -> Prefix:
        """With the next inputs (B, N, d), all of them real tokens."""
        if self.x is None:
            return Prefix(x)
        whole = torch.cat([self.x, x], dim=1)
        if self.attention_mask is None:
            return Prefix(whole)
        real = self.attention_mask.new_ones(x.shape[:2])
        return Prefix(whole, torch.cat([self.attention_mask, real], dim=1))


class Convolved(NamedTuple):
    """The state of a layer with a short convolution of K taps.

    Attributes:
        window: the last K - 1 inputs of the convolution, (B, K - 1, d).
        attention: the state of the attention.
    """

    window: Tensor
    attention: Any


def is_recurrent(attention: Any) -> bool:
    """True where a layer decodes with a state of its own."""
    return bool(attention.supports(decoding=True))


def initial_state(model: nn.Module, batch_size: int) -> DecodingState:
    """The state before the first token of a model that has ``layers``."""
    layers: list[Any] = list(model.layers)  # type: ignore[arg-type]
    return DecodingState(0, tuple(_initial_state(layer, batch_size) for layer in layers))


def _initial_state(layer: EncoderLayer, batch_size: int) -> Any:
    attention = layer.attention
    state = attention.initial_state(batch_size) if is_recurrent(attention) else Prefix()
    convolution = layer.short_convolution
    return state if convolution is None else Convolved(convolution.initial_window(batch_size), state)


def step_through(layers: nn.ModuleList, x: Tensor, states: Iterable[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """One token (B, d) through encoder layers -> (B, d), without gradients, and their states after it."""
    return _continue(layers, x, states, _attend_one)


@torch.no_grad()
def state_after(layer: EncoderLayer, x: Tensor, attention_mask: Tensor | None) -> Any:
    """The state of a layer after the beginning of a text, whose tokens reach the layer as x."""
    x, convolution = layer.attention_input(x), layer.short_convolution
    if convolution is None:
        return _attention_after(layer.attention, x, attention_mask)
    window = convolution.window_after(x, attention_mask)
    x = convolution(x, attention_mask, is_causal=True)
    return Convolved(window, _attention_after(layer.attention, x, attention_mask))


def _attention_after(attention: Any, x: Tensor, attention_mask: Tensor | None) -> Any:
    if is_recurrent(attention):
        return attention.state_after(x, attention_mask)
    return Prefix(x.detach(), attention_mask)


def read_on(
    layers: nn.ModuleList, x: Tensor, states: Iterable[Any], hidden_states: list[Tensor] | None = None
) -> tuple[Tensor, tuple[Any, ...]]:
    """Tokens (B, N, d) through encoder layers after their states -> (B, N, d), and the states after them."""
    return _continue(layers, x, states, _attend_many, hidden_states)


def _continue(
    layers: nn.ModuleList,
    x: Tensor,
    states: Iterable[Any],
    attend: Callable[[Any, Tensor, Any], tuple[Tensor, Any]],
    hidden_states: list[Tensor] | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:
    """The layers after their states: (B, ..., d) -> (B, ..., d), and the states after it."""
    trained = torch.is_grad_enabled() and (
        x.requires_grad or any(p.requires_grad for p in layers.parameters())
    )
    after = []
    with torch.no_grad():
        for layer, before in zip(layers, states, strict=True):
            if hidden_states is not None:
                hidden_states.append(_without_gradients(x) if trained else x)
            x, state = _through(layer, x, before, attend)  # type: ignore[arg-type]
            after.append(state)
    return _without_gradients(x) if trained else x, tuple(after)


def _without_gradients(x: Tensor) -> Tensor:
    """x, at which a backward pass ends with an error: part of the gradients would be missing in silence."""
    if torch.compiler.is_compiling():
        return x
    x = x.detach().requires_grad_()
    x.register_hook(_refuse_gradient)
    return x


def _refuse_gradient(gradient: Tensor) -> None:
    raise InputError(
        "tokens that are read after a state have no gradients: compute the loss from whole texts, or decode "
        "under torch.no_grad()"
    )


def _through(
    layer: EncoderLayer, x: Tensor, state: Any, attend: Callable[[Any, Tensor, Any], tuple[Tensor, Any]]
) -> tuple[Tensor, Any]:
    """An encoder layer's forward that also carries its state."""
    after: Any = None

    def attention(inputs: Tensor) -> Tensor:
        nonlocal after
        if layer.short_convolution is None:
            y, after = attend(layer.attention, inputs, state)
            return y
        inputs, window = layer.short_convolution.read_on(inputs, state.window)
        y, own = attend(layer.attention, inputs, state.attention)
        after = Convolved(window, own)
        return y

    return layer.around(attention, x), after


def _attend_one(attention: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """x (B, d) -> (B, d)."""
    if not isinstance(state, Prefix):
        return attention.step(x, state)
    y, state = _attend_many(attention, x[:, None], state)
    return y[:, 0], state


def _attend_many(attention: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """x (B, N, d) -> (B, N, d)."""
    if isinstance(state, Prefix):
        seen = state.extended(x)
        y = attention(seen.x, attention_mask=seen.attention_mask, is_causal=True)
        return y[:, -x.size(1) :], seen
    outputs = []
    for token in x.unbind(1):
        y, state = attention.step(token, state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state
