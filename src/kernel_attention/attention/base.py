"""What every attention layer shares: sizes, heads, the checks of its call, and the auxiliary objective."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.attention.decoding import AnyDecoder
from kernel_attention.errors import InputError
from kernel_attention.kernels.padding import compaction
from kernel_attention.memory_limit import require_parameters
from kernel_attention.ops.sequence_group import SequenceGroup


class AttentionLayer(nn.Module, ABC):
    """An attention layer ``x -> y``, (B, N, d) -> (B, N, d).

    A subclass implements :meth:`attend`; the call's checks live here, so that every mechanism refuses bad
    input in the same words.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.

    Attributes:
        sequence_group: the processes that share every sequence, see :func:`shard_sequence`; None: this one
            has it whole.
    """

    supports_context = False
    sequence_group: SequenceGroup | None = None

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        require_positive(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise InputError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
        # Every mechanism has three (d, d) projections or more.
        require_parameters(
            f"{type(self).__name__}: embed_dim={embed_dim}", 3 * embed_dim**2, "lower embed_dim"
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            x: (B, N, d).
            context: (B, S, d), what the keys and values are made of in cross-attention; None: x itself.
            key_padding_mask: bool over the keys' tokens, (B, N) or (B, S); True = real token.
            is_causal: output i depends on x[:, :i + 1] only.

        Raises:
            InputError: for a wrong shape or dtype, or cross-attention where the mechanism has none.
        """
        self._check(x, context, key_padding_mask, is_causal)
        return self.attend(x, context, key_padding_mask, is_causal)

    @abstractmethod
    def attend(
        self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The mechanism itself, on checked arguments."""

    def decoder(self) -> AnyDecoder:
        """The layer's causal form step by step; InputError where it has none."""
        raise InputError(
            f"{type(self).__name__} does not decode step by step: call it with is_causal=True on the whole "
            "prefix, where it has a causal form"
        )

    @property
    def supports_decoding(self) -> bool:
        """Whether ``initial_state``, ``step`` and ``prefill`` are defined with this layer's options."""
        try:
            self.decoder()
        except InputError:
            return False
        return self.sequence_group is None

    @torch.no_grad()
    def initial_state(self, batch_size: int) -> Any:
        """The state of causal decoding before the first token, in the weights' precision and on their device.

        Raises:
            InputError: for a mechanism, or options, without a step-by-step form.
        """
        require_positive(batch_size=batch_size)
        return self._decoder().initial_state(batch_size)

    @torch.no_grad()
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Decode one token, without gradients or dropout: what ``forward`` with ``is_causal=True`` gives it.

        Args:
            x: the token, (B, d).
            state: what the tokens before left behind. A growing one is written into: it may be gone back to,
                but two ways on from it at once need :func:`kernel_attention.functional.reorder`, which
                copies.

        Returns:
            The output (B, d), and the state with the token.

        Raises:
            InputError: for a wrong shape, or a mechanism without a step-by-step form.
        """
        if x.dim() != 2 or x.size(-1) != self.embed_dim:
            raise InputError(
                f"{type(self).__name__}.step: x has shape {tuple(x.shape)}, expected (B, {self.embed_dim})"
            )
        y, state = self._decoder().step(x[:, None], state)
        return y[:, 0], state

    @torch.no_grad()
    def prefill(self, x: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """A prompt in parallel: the causal form's output, and the state after each sequence's real tokens.

        Args:
            x: (B, N, d).
            key_padding_mask: (B, N), True = real token; prompts may differ in length.

        Returns:
            y (B, N, d), and the state to go on from.
        """
        decoder = self._decoder()
        y = self(x, key_padding_mask=key_padding_mask, is_causal=True)
        if key_padding_mask is None:
            return y, decoder.read(x, None)
        x = x.masked_fill(~key_padding_mask[..., None], 0.0)
        moved = compaction(key_padding_mask)
        return y, decoder.read(x if moved is None else moved.apply(x), key_padding_mask.sum(dim=1))

    def _decoder(self) -> AnyDecoder:
        if self.sequence_group is not None:
            raise InputError(f"{type(self).__name__} over a sharded sequence does not decode")
        return self.decoder()

    def _check(
        self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> None:
        name = type(self).__name__
        if x.dim() != 3 or x.size(-1) != self.embed_dim or x.size(1) == 0:
            raise InputError(
                f"{name}: x has shape {tuple(x.shape)}, expected (B, N, {self.embed_dim}) with N at least 1"
            )
        if not x.is_floating_point():
            raise InputError(f"{name}: x has dtype {x.dtype}, expected floating-point numbers")
        if context is not None:
            if not self.supports_context:
                raise InputError(f"{name}: context was given, but this mechanism has no cross-attention")
            if is_causal:
                raise InputError(f"{name}: is_causal=True cannot be combined with context")
            fits = context.dim() == 3 and context.size(0) == x.size(0) and context.size(-1) == self.embed_dim
            if not fits or context.size(1) == 0:
                raise InputError(
                    f"{name}: context has shape {tuple(context.shape)}, "
                    f"expected ({x.size(0)}, S, {self.embed_dim}) with S at least 1"
                )
        if key_padding_mask is not None:
            expected = (x if context is None else context).shape[:2]
            if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != expected:
                raise InputError(
                    f"{name}: key_padding_mask has shape {tuple(key_padding_mask.shape)} and dtype "
                    f"{key_padding_mask.dtype}, expected {tuple(expected)} and torch.bool (True = real token)"
                )
        if self.sequence_group is not None:
            reason = self.why_not_sharded(is_causal)
            if context is not None:
                reason = "context was given, and only self-attention is sharded"
            elif torch.compiler.is_compiling():
                reason = "it is being compiled or exported"
            if reason is not None:
                raise InputError(f"{name} over a sharded sequence: {reason}")

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why this layer cannot read sequences cut over processes in that form; None where it can."""
        return "its attention needs every token of the sequence on one rank"

    @property
    def supports_sharding(self) -> bool:
        """Whether :func:`shard_sequence` takes this layer."""
        return self.why_not_sharded(False) is None

    def extra_repr(self) -> str:
        """The sizes, for print(model)."""
        return f"{self.embed_dim}, {self.num_heads}"

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, h p) -> (B, h, N, p)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """(B, h, N, p) -> (B, N, h p)."""
        return x.transpose(1, 2).flatten(2)


class PenalizedAttention(AttentionLayer):
    """An attention layer with an objective of its own, added to the task's loss through
    :func:`auxiliary_loss`.

    Attributes:
        objective: J of the last forward in training mode, a 0-dimensional tensor, or (B,) where a layer
            squares it per sequence; None before that or where the layer's weight of it is 0. It is not part
            of the state dict, of copies or of pickles.
    """

    objective: Tensor | None

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.objective = None

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """What the layer adds to the loss, its weights included; None where there is nothing to add."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "objective": None}  # a tensor inside an autograd graph cannot be copied


def auxiliary_loss(model: nn.Module, reduction: str = "sum") -> Tensor:
    """What the layers of ``model`` add to the task's loss: sum over layers of eta J^2, a 0-dimensional
    tensor.

    Call it after a forward in training mode, once per backward: the square is taken per micro-batch, so
    gradient accumulation and data parallelism average J^2 of the parts, which is not J^2 of the whole batch.
    It is 0 for a model without such layers.

    Args:
        model: any module that holds our layers.
        reduction: "sum" over the layers (Primal-Attention poster) or "mean" (the released code).

    Raises:
        InputError: for another reduction.
        RuntimeError: if the objective was computed without gradients although gradients are wanted now.
    """
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction={reduction!r} must be 'sum' or 'mean'")
    layers = [module for module in model.modules() if isinstance(module, PenalizedAttention)]
    penalties = [penalty for layer in layers if (penalty := layer.penalty()) is not None]
    if not penalties:
        return torch.zeros((), device=next((p.device for p in model.parameters()), None))
    if torch.is_grad_enabled() and not all(penalty.requires_grad for penalty in penalties):
        raise RuntimeError(
            "auxiliary_loss: an objective was computed without gradients. Call it after a forward in "
            "training mode with gradients enabled; with activation checkpointing use use_reentrant=False"
        )
    total = torch.stack(penalties).sum()
    return total if reduction == "sum" else total / len(penalties)


def require_positive(**values: int) -> None:
    """Raise InputError for the first argument that is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r} must be a whole number of at least 1")


def require_probability(**values: float) -> None:
    """Raise InputError for the first argument outside [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < 1.0:
            raise InputError(f"{name}={value!r} must be a probability in [0, 1)")


def require_weight(**values: float) -> None:
    """Raise InputError for the first argument that is not a finite number of at least 0."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < math.inf:
            raise InputError(f"{name}={value!r} must be a finite number of at least 0")
