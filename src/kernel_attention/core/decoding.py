"""The states that decoding keeps between tokens, and how to move, reorder and measure them.

A state is a NamedTuple or a dataclass. Its fields are tensors whose first dimension is the batch, numbers, or
other states. A field with the metadata ``{"shared": True}`` is the same for all sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

StateType = TypeVar("StateType")

_SMALLEST_BUFFER = 16  # rows

SHARED = {"shared": True}
"""The metadata of a field that all sequences share."""


class State:
    """The base class of states that are dataclasses."""

    def to(self: StateType, device: torch.device | str) -> StateType:
        """The state on another device."""
        return move(self, device)

    def reorder(self: StateType, index: Tensor) -> StateType:
        """The sequences ``index`` (B',) int64 of the state, copied."""
        return reorder(self, index)


def reorder(state: StateType, index: Tensor) -> StateType:
    """The sequences ``index`` (B',) int64 of a state, copied. Beam search needs this after every step.

    An index may occur several times. The result shares no memory with ``state``.
    """
    return _map(state, lambda tensor: tensor.index_select(0, index.to(tensor.device)))


def move(state: StateType, device: torch.device | str) -> StateType:
    """The state on another device."""
    return _map(state, lambda tensor: tensor.to(device), shared=True)


def state_bytes(state: Any) -> int:
    """The bytes of a state's tensors. Buffers count in full, shared fields do not count."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state))


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors of a state, without those that all sequences share."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    _map(state, collect)
    return tensors


def fill_tensors(state: StateType, tensors: Iterable[Tensor]) -> StateType:
    """The state with these tensors in the place of ``tensors_of(state)``."""
    following = iter(tensors)
    return _map(state, lambda _: next(following))


def bound_positions(state: StateType, longest: int) -> StateType:
    """The state with another upper bound of its positions. Buffers with that much room do not grow."""
    return _map(state, lambda position: Position(position.tokens, longest), leaf=Position)


def _map(state: Any, function: Callable[[Any], Any], shared: bool = False, leaf: type[Any] = Tensor) -> Any:
    if isinstance(state, leaf):
        return function(state)
    if isinstance(state, tuple):
        parts = [_map(part, function, shared, leaf) for part in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        return state
    changes = {
        field.name: _map(getattr(state, field.name), function, shared, leaf)
        for field in dataclasses.fields(state)
        if shared or not field.metadata.get("shared")
    }
    return dataclasses.replace(state, **changes)


def per_sequence(number: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1, 1)."""
    return number[:, None, None, None]


@dataclasses.dataclass(frozen=True)
class Position(State):
    """The number of tokens read.

    Attributes:
        tokens: one number where all sequences have equally many, or (B,) int64.
        longest: an upper bound of ``tokens`` that is known without reading from the device; it sizes buffers.
    """

    tokens: int | Tensor = 0
    longest: int = 0

    def next(self) -> Position:
        """One token later."""
        return Position(self.tokens + 1, self.longest + 1)

    def block(self, factor: int) -> int | Tensor:
        """The number of the block of ``factor`` tokens that holds the next token."""
        return self.tokens // factor

    def offset(self, factor: int) -> int | Tensor:
        """The position of the next token in its block."""
        return self.tokens % factor

    def completes(self, factor: int) -> bool | Tensor:
        """True where the next token is its block's last."""
        return (self.tokens + 1) % factor == 0


def position_after(x: Tensor, lengths: Tensor | None) -> Position:
    """The position after a prompt x (B, N, d)."""
    return Position(x.size(1) if lengths is None else lengths, x.size(1))


def whole_lengths(x: Tensor, lengths: Tensor | None) -> Tensor:
    """(B,): the lengths given, or N for every sequence of x (B, N, d)."""
    return torch.full((x.size(0),), x.size(1), device=x.device) if lengths is None else lengths


def new_where(condition: bool | Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where the condition holds, a bool for all sequences or (B,); tensors have the batch first."""
    if isinstance(condition, bool):
        return new if condition else old
    return torch.where(condition.view(-1, *[1] * (new.dim() - 1)), new, old)


def scale_by(number: int | Tensor, x: Tensor) -> int | Tensor:
    """A number per sequence, (B,) or one for all, so that it broadcasts to x."""
    return number if isinstance(number, int) else number.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def before(lengths: Tensor, size: int) -> Tensor:
    """Which of ``size`` rows come before ``lengths`` (B,): (B, 1, size, 1) bool."""
    return torch.arange(size, device=lengths.device)[:, None] < per_sequence(lengths)


@dataclasses.dataclass(frozen=True)
class KeyValueCache(State):
    """Keys (B, h, C, p) and values (B, h, C, p_v) in buffers of C rows that double when they are full.

    Writing row n costs O(1) on average. It changes the buffers in place and leaves the rows before n alone.
    You can go back to an older cache; the rows written since are then lost. To continue one cache in two
    ways, copy it with ``reorder``.
    """

    keys: Tensor
    values: Tensor

    def append(self, row: int | Tensor, end: int, k: Tensor, v: Tensor) -> KeyValueCache:
        """Write k (B, h, 1, p) and v (B, h, 1, p_v) into a row, one for all or (B,), smaller than ``end``."""
        cache = self if end <= self.keys.size(2) else self._grown(end)
        if isinstance(row, int):
            cache.keys[:, :, row] = k[:, :, 0]
            cache.values[:, :, row] = v[:, :, 0]
        else:
            sequence = torch.arange(row.size(0), device=row.device)
            cache.keys[sequence, :, row] = k[:, :, 0]
            cache.values[sequence, :, row] = v[:, :, 0]
        return cache

    def _grown(self, end: int) -> KeyValueCache:
        size = max(end, 2 * self.keys.size(2), _SMALLEST_BUFFER)
        return KeyValueCache(*(_with_room(x, size) for x in (self.keys, self.values)))


def _with_room(x: Tensor, size: int) -> Tensor:
    # Zeros, because a masked row is still multiplied by its weight 0, and 0 times NaN is NaN.
    larger = x.new_zeros(*x.shape[:2], size, x.size(3))
    larger[:, :, : x.size(2)] = x
    return larger
