"""Decoding a causal model token by token, and the text it generates.

A layer with a recurrent form (``initial_state`` and ``step``) is decoded by that form. Any other keeps its
inputs and attends to all of them again: the output is the same, and time and memory grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernel_attention.core.validation import require_weight
from kernel_attention.errors import InputError

if TYPE_CHECKING:
    from kernel_attention.models.causal import CausalLanguageModel
    from kernel_attention.models.encoder_layer import EncoderLayer


@dataclass(frozen=True)
class DecodingState:
    """The state of a model after the text that it has read.

    Args:
        position: tokens read, one number where all texts have equally many, or (B,) int64.
        layers: the state of every layer: its mechanism's own, or ``Prefix``.
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


def is_recurrent(attention: Any) -> bool:
    """Whether a layer decodes with a state of its own."""
    return bool(attention.supports(decoding=True))


def initial_state(model: nn.Module, batch_size: int) -> DecodingState:
    """The state before the first token of a model that has ``layers``."""
    mechanisms: list[Any] = [layer.attention for layer in model.layers]  # type: ignore[union-attr]
    states = [one.initial_state(batch_size) if is_recurrent(one) else Prefix() for one in mechanisms]
    return DecodingState(0, tuple(states))


def step_through(layers: nn.ModuleList, x: Tensor, states: Iterable[Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """One token (B, d) through encoder layers -> (B, d), without gradients, and their states after it."""
    return _continue(layers, x, states, _attend_one)


def decode_step(
    model: CausalLanguageModel, tokens: Tensor, state: DecodingState
) -> tuple[Tensor, DecodingState]:
    """One token (B,) -> (B, d) after the last layer, without gradients, and the next state."""
    x = model.embed(tokens[:, None], state.position)[:, 0]
    x, states = step_through(model.layers, x, state.layers)
    return x, DecodingState(state.position + 1, states)


def read(
    model: CausalLanguageModel,
    tokens: Tensor,
    state: DecodingState,
    attention_mask: Tensor | None = None,
    hidden_states: list[Tensor] | None = None,
) -> tuple[Tensor, DecodingState]:
    """Tokens (B, N), or embedded ones (B, N, d), -> (B, N, d) after the last layer, and the state after them.

    At the beginning of a text the output is that of ``model.hidden`` and has its gradients. After a state it
    has none. The state never has any.
    """
    model.check_tokens(tokens)
    starts = isinstance(state.position, int) and state.position == 0
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape[:2] or attention_mask.dtype != torch.bool:
            raise InputError(
                f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}, "
                f"expected {tuple(tokens.shape[:2])} and torch.bool (True = real token)"
            )
        if not starts:
            raise InputError("attention_mask: only the beginning of a text can be padded")
    count = tokens.size(1) if attention_mask is None else attention_mask.sum(dim=1)
    x = model.embed(tokens, state.position, attention_mask)
    if starts:
        states = []
        for layer in model.layers:
            if hidden_states is not None:
                hidden_states.append(x)
            states.append(_state_after(layer, x, attention_mask))  # type: ignore[arg-type]
            x = layer(x, attention_mask, True)
        return x, DecodingState(count, tuple(states))
    x, after = _continue(model.layers, x, state.layers, _attend_many, hidden_states)
    return x, DecodingState(state.position + count, after)


@torch.no_grad()
def _state_after(layer: EncoderLayer, x: Tensor, attention_mask: Tensor | None) -> Any:
    """The state of a layer's attention after the beginning of a text, whose tokens reach the layer as x."""
    x = layer.attention_input(x)
    if is_recurrent(layer.attention):
        return layer.attention.state_after(x, attention_mask)
    return Prefix(x.detach(), attention_mask)


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
    """An encoder layer's forward that also carries the state of its attention."""
    after = None

    def attention(inputs: Tensor) -> Tensor:
        nonlocal after
        y, after = attend(layer.attention, inputs, state)
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


def generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow a prompt, one after the other.

    Args:
        model: put it into evaluation mode first; its dropout is not switched off here.
        prompt: (B, N) tokens, N at least 1.
        count: how many tokens to generate.
        temperature: 0 takes the most likely token; otherwise draws from softmax(logits / temperature).
        top_k: draw among the most likely tokens only.
        generator: for the draws; None: PyTorch's global one.

    Yields:
        (B,) tokens. They are not kept here: the memory is that of the state.

    Raises:
        InputError: before the first token, for arguments out of range and a text beyond max_len.
    """
    if count < 0:
        raise InputError(f"count={count} must be at least 0")
    require_weight(temperature=temperature)
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    if prompt.dim() != 2 or prompt.size(1) == 0:
        raise InputError(f"prompt has shape {tuple(prompt.shape)}, expected (B, N) with N at least 1")
    model.check_length(prompt.size(1) + max(count - 1, 0))
    return _generate(model, prompt, count, temperature, top_k, generator)


def _generate(
    model: CausalLanguageModel,
    prompt: Tensor,
    count: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    state: DecodingState | None = None
    tokens = prompt
    for _ in range(count):
        with torch.inference_mode():  # not around yield: the caller keeps its own gradient mode
            if state is None:
                logits, state = model.prefill(prompt)
            else:
                logits, state = model.step(tokens, state)
            tokens = draw_tokens(logits, temperature, top_k, generator)
        yield tokens


def draw_tokens(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """The next tokens (B,) from logits (B, V), most likely or drawn as ``generate`` says."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
