"""The base of all attention layers: sizes, heads, the checks of the call, and what a mechanism can do."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.calls import Objective
from kernel_attention.core.capabilities import GivenHeads, StepByStep
from kernel_attention.core.engine import REFERENCE, LayerPlan
from kernel_attention.core.parameters import reset_submodules
from kernel_attention.errors import InputError, require_positive
from kernel_attention.limits import require_parameters
from kernel_attention.tensors.packing import PackedSequences, pack_sequences


class TokenWork(NamedTuple):
    """Operations on a token, and the numbers that it moves between memory and processor at least."""

    operations: int
    numbers: int


class AttentionLayer(StepByStep, GivenHeads, ABC):
    """An attention layer ``x -> y``, (B, N, d) -> (B, N, d).

    A subclass implements ``attend``. The checks of the call are here, so that every mechanism refuses bad
    input in the same words.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.

    Attributes:
        mechanism_name: the name the layer was made by, see ``create_attention``; empty where it was made by
            its class.
        softmax_reading: "exact" where the layer is softmax attention of its queries, keys and values,
            "cleaned keys" where it changes the keys first; None where the kernel-PCA reading does not apply.
        reference_options: options that choose the readable form of the mechanism.
    """

    mechanism_name = ""
    softmax_reading: Literal["exact", "cleaned keys"] | None = None
    reference_options: Mapping[str, Any] = {}

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        require_positive(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise InputError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}")
        # Every mechanism has at least three (d, d) projections.
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
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The layer's output, (B, N, d).

        Args:
            x: (B, N, d).
            context: (B, S, d), the source of keys and values in cross-attention; None: x itself.
            attention_mask: bool over the keys' tokens, (B, N) or (B, S); True = real token.
            is_causal: output i depends on x[:, :i + 1] only.
            cu_seqlens: (S + 1,) int32 or int64, from 0 to N, where each of S sequences begins that lie end to
                end in x (1, N, d). Each has the output and the objective that it has alone.
            max_seqlen: with ``cu_seqlens``, the longest sequence's tokens, or more. None: as many as it has;
                boundaries on another device than the CPU are then read by the host, which waits for them.

        Raises:
            InputError: for a wrong shape or dtype, for cross-attention that the mechanism does not have, and
                for boundaries that do not divide x.
        """
        self._check(x, context, attention_mask, is_causal)
        if cu_seqlens is None:
            if max_seqlen is not None:
                raise InputError(f"{type(self).__name__}: max_seqlen={max_seqlen} needs cu_seqlens")
            found = self.attend(x, context, attention_mask, is_causal)
        else:
            name = self.mechanism_name or type(self).__name__
            if (reason := self.why_not(causal=is_causal, packing=True)) is not None:
                raise InputError(f"{name}: cu_seqlens was given, but {reason}")
            others = {"context": context, "attention_mask": attention_mask}
            packed = pack_sequences(name, x, cu_seqlens, max_seqlen, **others)
            found = self.attend_packed(x, packed, is_causal)
        y, objective = (found, None) if isinstance(found, Tensor) else found
        if objective is not None:
            self.record_objective(objective)
        return y

    @abstractmethod
    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | Tensor | None] | Tensor:
        """The mechanism itself. The arguments are those of ``forward``, checked.

        Returns:
            y (B, N, d) and the call's objective in training mode: a tensor where it is J alone, None where
            there is none. y alone has none either.
        """

    def attend_packed(
        self, x: Tensor, packed: PackedSequences, is_causal: bool
    ) -> tuple[Tensor, Objective | Tensor | None] | Tensor:
        """``attend`` of sequences that lie end to end in x (1, N, d): as a padded batch."""
        found = self.attend(packed.unpack(x), None, packed.attention_mask, is_causal)
        y, objective = (found, None) if isinstance(found, Tensor) else found
        return packed.pack(y), objective

    def record_objective(self, objective: Objective | Tensor) -> None:
        """Refuse the objective of a call. A ``PenalizedAttention`` hands it to the loss."""
        raise TypeError(
            f"{type(self).__name__}.attend returned an objective: make the layer a PenalizedAttention"
        )

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new layer; after ``to_empty``, say.

        This resets the submodules. A layer with parameters of its own draws them too.
        """
        reset_submodules(self)

    def has_options(self, options: Mapping[str, Any]) -> bool:
        """True where the layer is one that the constructor makes with these options."""
        return all(self.option_value(name) == value for name, value in options.items())

    def option_value(self, name: str) -> Any:
        """The value of a constructor's option. A layer that keeps it under another name overrides this."""
        return getattr(self, name, None)

    @classmethod
    def replacement_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Further options for a layer in the place of a trained softmax layer, whose weights it takes over.

        A layer overrides this where its defaults, made for training from the start, harm those weights.
        """
        return {}

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
        """The attention matrix, or the mechanism's own kernel matrix, (B, h, N, N), for analysis.

        None for a mechanism without a kernel between pairs of tokens.
        """
        return None

    def token_work(self, *, training: bool, length: int) -> TokenWork | None:
        """The work of the layer's fast non-causal form on a token, for rooflines; None: not counted.

        Args:
            training: forward and backward pass, or the forward pass alone.
            length: tokens of a sequence.
        """
        return None

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why; printed, the table of the layer's engines.

        All engines give the same numbers, up to rounding. A layer that has some overrides this.

        Args:
            x: the layer's input, (B, N, d). Its sizes and its device decide.
            is_causal: as in the call.
            compiled: whether torch.compile runs the layer; None: whether it does now.

        Raises:
            InputError: where the call would raise it, for an engine that was asked for and does not serve it.
        """
        return LayerPlan(REFERENCE, "the mechanism has its formulas only")

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


def require_causal_form(layer: AttentionLayer, name: str) -> None:
    """Raise InputError unless the layer, with its options, has a causal form."""
    if (reason := layer.why_not_causal()) is not None:
        raise InputError(f"attention {name!r} cannot be a layer of a causal model: {reason}")
