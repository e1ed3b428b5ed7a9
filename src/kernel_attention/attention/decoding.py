"""Decoding: what a layer's causal form carries from token to token.

A layer makes a :class:`Decoder` of itself; :class:`kernel_attention.attention.AttentionLayer` checks the
calls and moves the real tokens of a padded prompt together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from kernel_attention.functional.decoding import (
    FeatureKernel,
    Kernel,
    Memory,
    attention_step,
    empty_memory,
    read_memory,
)
from kernel_attention.functional.decoding_state import Position, State
from kernel_attention.kernels import cosine

if TYPE_CHECKING:
    from kernel_attention.attention.softmax import SoftmaxAttention

StateT = TypeVar("StateT")


class Decoder(ABC, Generic[StateT]):
    """The step-by-step causal form of one layer. d is the layer's width."""

    @abstractmethod
    def initial_state(self, batch_size: int) -> StateT:
        """The state before the first token."""

    @abstractmethod
    def step(self, x: Tensor, state: StateT) -> tuple[Tensor, StateT]:
        """One token: x (B, 1, d) -> output (B, 1, d) and the state with it."""

    @abstractmethod
    def read(self, x: Tensor, lengths: Tensor | None) -> StateT:
        """The state after a prompt x (B, N, d), in parallel.

        ``lengths`` (B,) int64: the real tokens of each sequence, which come first; the rest is zero. None:
        all.
        """


AnyDecoder = Decoder[Any]


def position_after(x: Tensor, lengths: Tensor | None) -> Position:
    """The position after a prompt x (B, N, d)."""
    return Position(x.size(1) if lengths is None else lengths, x.size(1))


def whole_lengths(x: Tensor, lengths: Tensor | None) -> Tensor:
    """(B,): the lengths given, or N for every sequence of x (B, N, d)."""
    return torch.full((x.size(0),), x.size(1), device=x.device) if lengths is None else lengths


@dataclass(frozen=True)
class AttentionState(State):
    """The tokens read, and the keys and values or their running sum."""

    position: Position
    memory: Memory


class SoftmaxDecoder(Decoder[AttentionState]):
    """Of softmax, symmetric and cosine attention."""

    def __init__(self, layer: SoftmaxAttention) -> None:
        self.layer = layer
        self.kernel: Kernel = FeatureKernel(cosine, False) if layer.kernel == "cosine" else None

    def initial_state(self, batch_size: int) -> AttentionState:
        """See :class:`Decoder`."""
        layer = self.layer
        like = layer.out_proj.weight.new_empty(batch_size, layer.num_heads, 0, layer.head_dim)
        return AttentionState(Position(), empty_memory(self.kernel, like))

    def step(self, x: Tensor, state: AttentionState) -> tuple[Tensor, AttentionState]:
        """See :class:`Decoder`."""
        out, memory = attention_step(self.kernel, *self._project(x), state.memory, state.position)
        out = self.layer.out_proj(self.layer.merge_heads(out))
        return out, AttentionState(state.position.next(), memory)

    def read(self, x: Tensor, lengths: Tensor | None) -> AttentionState:
        """See :class:`Decoder`."""
        memory = read_memory(self.kernel, *self._project(x), whole_lengths(x, lengths))
        return AttentionState(position_after(x, lengths), memory)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = self.layer
        q = layer.split_heads(layer.q_proj(x))
        k = q if layer.k_proj is None else layer.split_heads(layer.k_proj(x))
        return q, k, layer.split_heads(layer.v_proj(x))
