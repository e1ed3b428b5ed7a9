"""The base of all attention layers: sizes, heads, the checks of the call, and the auxiliary objective."""

from __future__ import annotations

import copy
import functools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.parameters import reset_submodules
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.padding import compaction
from kernel_attention.tensors.recompute import is_traced

_log = logging.getLogger(__name__)

OBJECTIVE_BOUND = 16.0
"""Up to this |J| a layer's penalty is the papers' J^2; beyond, it grows with log |J|."""


class AttentionLayer(nn.Module, ABC):
    """An attention layer ``x -> y``, (B, N, d) -> (B, N, d).

    A subclass implements ``attend``; the call's checks live here, so that every mechanism refuses bad
    input in the same words.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.

    Attributes:
        sequence_group: the processes that share every sequence, see ``shard_sequence``; None: this one
            has it whole.
        mechanism_name: the name the layer was made by, see `create_attention`; empty where it was made by its class.
        softmax_reading: whether the layer is softmax attention of its queries, keys and values ("exact"), or of
            keys that it changes first ("cleaned keys"); None where the kernel-PCA reading says nothing of it.
        reference_options: options that choose the readable form where another one would run.
    """

    sequence_group: SequenceGroup | None = None
    mechanism_name = ""
    softmax_reading: Literal["exact", "cleaned keys"] | None = None
    reference_options: Mapping[str, Any] = {}

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
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The layer's output, (B, N, d).

        Args:
            x: (B, N, d).
            context: (B, S, d), the source of keys and values in cross-attention; None: x itself.
            attention_mask: bool over the keys' tokens, (B, N) or (B, S); True = real token.
            is_causal: output i depends on x[:, :i + 1] only.

        Raises:
            InputError: for a wrong shape or dtype, or cross-attention where the mechanism has none.
        """
        self._check(x, context, attention_mask, is_causal)
        return self.attend(x, context, attention_mask, is_causal)

    @abstractmethod
    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The mechanism itself, on checked arguments."""

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new layer; after ``to_empty``, say.

        This resets the submodules. A layer with parameters of its own draws them too.
        """
        reset_submodules(self)

    def has_options(self, options: Mapping[str, Any]) -> bool:
        """Whether the layer is one that the constructor makes with these options."""
        return all(self.option_value(name) == value for name, value in options.items())

    def option_value(self, name: str) -> Any:
        """The value of a constructor's option; a layer that keeps it under another name or form says so here."""
        return getattr(self, name, None)

    def supports(
        self, *, causal: bool = False, context: bool = False, decoding: bool = False, sharding: bool = False
    ) -> bool:
        """Whether this layer, with the options it has, can be used in that way.

        Args:
            causal: with ``is_causal=True``.
            context: with a ``context`` (cross-attention).
            decoding: token by token, through ``initial_state``, ``step`` and ``prefill``.
            sharding: on sequences cut over processes; see [`shard_sequence`][kernel_attention.shard_sequence].
        """
        return self.why_not(causal=causal, context=context, decoding=decoding, sharding=sharding) is None

    def why_not(
        self, *, causal: bool = False, context: bool = False, decoding: bool = False, sharding: bool = False
    ) -> str | None:
        """Why [`supports`][kernel_attention.core.layer.AttentionLayer.supports] says no; None where it says yes."""
        reasons = []
        if context:
            reasons.append(self.why_not_context())
            if causal or decoding:
                reasons.append("is_causal=True cannot be combined with context")
            if sharding:
                reasons.append("only self-attention is sharded")
        if causal or decoding:
            reasons.append(self.why_not_causal())
        if decoding:
            sharded = sharding or self.sequence_group is not None
            reasons.append("a sharded sequence does not decode" if sharded else self.why_not_decoding())
        if sharding:
            reasons.append(self.why_not_sharded(causal))
        return next((reason for reason in reasons if reason is not None), None)

    def why_not_causal(self) -> str | None:
        """Why the layer has no causal form with its options; None where it has one."""
        return None

    def why_not_context(self) -> str | None:
        """Why the layer has no cross-attention with its options; None where it has it."""
        return "this mechanism has no cross-attention"

    def why_not_decoding(self) -> str | None:
        """Why the layer's causal form has no step-by-step form; None where it has one."""
        if type(self).decode_token is not AttentionLayer.decode_token:
            return None
        return "this mechanism has no step-by-step form: call it with is_causal=True on the whole prefix"

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why the layer cannot read sequences cut over processes in that form; None where it can."""
        return "its attention needs every token of the sequence on one rank"

    # A mechanism with a step-by-step form overrides these three together.

    def start_decoding(self, batch_size: int) -> Any:
        """The state before the first token."""
        raise InputError(f"{type(self).__name__} does not decode step by step")

    def decode_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: x (B, 1, d) -> output (B, 1, d), and the state with it."""
        raise InputError(f"{type(self).__name__} does not decode step by step")

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> Any:
        """The state after a prompt x (B, N, d), in parallel.

        ``lengths`` (B,) int64: the real tokens of each sequence, which come first; the rest is zero. None: all.
        """
        raise InputError(f"{type(self).__name__} does not decode step by step")

    @torch.no_grad()
    def initial_state(self, batch_size: int) -> Any:
        """The state of causal decoding before the first token, in the weights' precision and on their device.

        Raises:
            InputError: for a mechanism, or options, without a step-by-step form.
        """
        require_positive(batch_size=batch_size)
        self._require_decoding()
        return self.start_decoding(batch_size)

    @torch.no_grad()
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Decode one token, without gradients or dropout: what ``forward`` with ``is_causal=True`` gives it.

        Args:
            x: the token, (B, d).
            state: the state after the tokens before. A growing one is written into. You may go back to it,
            but
                to continue it in two ways copy it with ``kernel_attention.functional.reorder``.

        Returns:
            The output (B, d), and the state with the token.

        Raises:
            InputError: for a wrong shape, or a mechanism without a step-by-step form.
        """
        if x.dim() != 2 or x.size(-1) != self.embed_dim:
            raise InputError(
                f"{type(self).__name__}.step: x has shape {tuple(x.shape)}, expected (B, {self.embed_dim})"
            )
        self._require_decoding()
        y, state = self.decode_token(x[:, None], state)
        return y[:, 0], state

    @torch.no_grad()
    def prefill(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Read a prompt in parallel: the causal output, and the state after each sequence's real tokens.

        Args:
            x: (B, N, d).
            attention_mask: (B, N), True = real token; prompts may differ in length.

        Returns:
            y (B, N, d), and the state to continue from.
        """
        self._require_decoding()
        y = self(x, attention_mask=attention_mask, is_causal=True)
        if attention_mask is None:
            return y, self.read_prompt(x, None)
        x = x.masked_fill(~attention_mask[..., None], 0.0)
        moved = compaction(attention_mask)
        return y, self.read_prompt(x if moved is None else moved.apply(x), attention_mask.sum(dim=1))

    def _require_decoding(self) -> None:
        reason = self.why_not(decoding=True)
        if reason is not None:
            raise InputError(f"{type(self).__name__} does not decode step by step: {reason}")

    def _check(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> None:
        name = type(self).__name__
        if x.dim() != 3 or x.size(-1) != self.embed_dim or x.size(1) == 0:
            raise InputError(
                f"{name}: x has shape {tuple(x.shape)}, expected (B, N, {self.embed_dim}) with N at least 1"
            )
        if not x.is_floating_point():
            raise InputError(f"{name}: x has dtype {x.dtype}, expected floating-point numbers")
        if is_causal and (reason := self.why_not_causal()) is not None:
            raise InputError(f"{name}: is_causal=True, but {reason}")
        if context is not None:
            if (reason := self.why_not(causal=is_causal, context=True)) is not None:
                raise InputError(f"{name}: context was given, but {reason}")
            fits = context.dim() == 3 and context.size(0) == x.size(0) and context.size(-1) == self.embed_dim
            if not fits or context.size(1) == 0:
                raise InputError(
                    f"{name}: context has shape {tuple(context.shape)}, "
                    f"expected ({x.size(0)}, S, {self.embed_dim}) with S at least 1"
                )
        if attention_mask is not None:
            expected = (x if context is None else context).shape[:2]
            if attention_mask.dtype != torch.bool or attention_mask.shape != expected:
                raise InputError(
                    f"{name}: attention_mask has shape {tuple(attention_mask.shape)} and dtype "
                    f"{attention_mask.dtype}, expected {tuple(expected)} and torch.bool (True = real token)"
                )
        if self.sequence_group is not None:
            reason = self.why_not_sharded(is_causal)
            if context is not None:
                reason = "context was given, and only self-attention is sharded"
            elif torch.compiler.is_compiling():
                reason = "it is being compiled or exported"
            if reason is not None:
                raise InputError(f"{name} over a sharded sequence: {reason}")

    def named_scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> dict[str, Tensor]:
        """Projection scores of every token by name, (B, h, N, s) each; empty for a mechanism without any."""
        return {}

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor | None:
        """The attention matrix, or the kernel that the mechanism has instead, (B, h, N, N), for analysis.

        None for a mechanism without a kernel between pairs of tokens.
        """
        return None

    def kernel_tensor(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor | None:
        """The kernel between D tokens, (B, h, N, .., N), zero at padded ones, for analysis.

        None for a mechanism without one.
        """
        return None

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
    ``auxiliary_loss``.

    Attributes:
        objective: J of the last forward in training mode, a 0-dimensional tensor, or (B,) where a layer
            squares it per sequence; None before that or where the layer's weight of it is 0. It is not part
            of the state dict, of copies or of pickles.
        objective_bound: up to this |J| the square is that of the papers, see ``bounded_square``; infinity
            leaves it bare.
        objective_unit: what that bound is counted in: 1, or the number of tokens where J is a sum over them.
    """

    objective: Tensor | None
    objective_bound: float = OBJECTIVE_BOUND
    objective_unit: float | Tensor = 1.0

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads)
        self.objective = None

    def squared_objective(self, objective: Tensor) -> Tensor:
        """J^2 as ``bounded_square`` has it; a warning is logged once where |J| is past the bound."""
        bound = self.objective_bound * self.objective_unit
        # Elsewhere the question would stop the stream or break the graph.
        if objective.device.type == "cpu" and not is_traced() and (objective.detach().abs() > bound).any():
            _warn_of_large_objectives()
        return bounded_square(objective, bound)

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """What the layer adds to the loss, weights included; None where it adds nothing."""

    def measure_objective(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor | None:
        """J on x, averaged over the sequences where it is one number for each; None where its weight is 0.

        The layer's mode and its last objective stay as they are.
        """
        twin = copy.copy(self)  # shares the parameters
        twin.training, twin.objective = True, None
        twin.attend(x, None, attention_mask, is_causal)
        return None if twin.objective is None else twin.objective.mean()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "objective": None}  # a tensor inside an autograd graph cannot be copied


def bounded_square(objective: Tensor, bound: float | Tensor = OBJECTIVE_BOUND) -> Tensor:
    """J^2 where |J| <= c, and c^2 (1 + 2 log(|J| / c)) beyond: once differentiable, and increasing in |J|.

    J is quadratic in the weights and in the input, and J^2 quartic. On inputs that are not standardised its
    gradient throws the first steps of an optimiser further than they came from, and the next J^2 overflows.
    The gradient of the logarithm is 2 c^2 dJ / J: its direction is that of J^2, and its size does not depend
    on the size of the input.

    Args:
        objective: J, of any shape.
        bound: c; a positive number, infinity, or a tensor that broadcasts to J.
    """
    size = objective.abs()
    inside = size <= bound
    # Both branches have a gradient of their own, so that neither may overflow where the other is taken.
    square = objective.where(inside, 0.0).square()
    beyond = size.where(~inside, bound).div(bound).log() * (2 * bound**2) + bound**2
    return torch.where(inside, square, beyond)


@functools.cache
def _warn_of_large_objectives() -> None:
    """Once in a process."""
    _log.warning(
        "auxiliary_loss: an objective |J| exceeds its layer's objective_bound, beyond which the penalty "
        "grows with log |J|, not J^2. Standardise the inputs: mean 0 and variance 1 of every channel"
    )


def auxiliary_loss(model: nn.Module, reduction: str = "sum") -> Tensor:
    """What the layers of ``model`` add to the task's loss: sum over layers of eta J^2, a 0-dimensional
    tensor.

    Where |J| exceeds a layer's ``objective_bound``, which it does on inputs that are not standardised, the
    square gives way to ``bounded_square``, and a warning is logged once.

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


def require_causal_form(layer: AttentionLayer, name: str) -> None:
    """Raise InputError unless the layer, with its options, has a causal form."""
    if (reason := layer.why_not_causal()) is not None:
        raise InputError(f"attention {name!r} cannot be a layer of a causal model: {reason}")


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
