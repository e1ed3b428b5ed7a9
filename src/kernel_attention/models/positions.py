"""Classes for every position of a sequence, causal or not, with any mechanism in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.sequence import SequenceEncoder
from kernel_attention.models.tokens import TokenEncoder
from kernel_attention.tensors.packing import PackedSequences


class PositionClassifier(nn.Module):
    """Class logits of every position: encoder, linear head, or the embedding's weights as the head.

    Args:
        in_features: the number of different tokens, or of channels where ``is_real``.
        num_outputs: classes.
        max_len: longest sequence.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        is_real: whether the inputs are vectors (``SequenceEncoder``) or tokens (``TokenEncoder``).
        is_causal: whether a position reads only those up to it.
        tied: whether the logits use the weights of the embedding (Press & Wolf 2017), for tasks whose classes
            are the tokens. The encoder then ends in its norm, as language models do: after a GELU, no output
            could point away from an embedding.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
        encoder_options: the other arguments of ``SequenceEncoder``.

    Raises:
        InputError: for sizes out of range, where ``is_causal`` for a mechanism without a causal form, and
            where ``tied`` for classes that are not the tokens.
    """

    def __init__(
        self,
        in_features: int,
        num_outputs: int,
        max_len: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "softmax",
        *,
        is_real: bool = False,
        is_causal: bool = False,
        tied: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **encoder_options: Any,
    ) -> None:
        super().__init__()
        require_positive(num_outputs=num_outputs)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if tied and (is_real or num_outputs != in_features):
            what = "vectors" if is_real else f"{in_features} tokens"
            raise InputError(
                f"tied=True needs the tokens as classes; there are {num_outputs} classes of {what}"
            )
        self.is_causal = is_causal
        if tied:
            encoder_options.setdefault("final_activation", "none")
        kind = SequenceEncoder if is_real else TokenEncoder
        self.encoder = kind(in_features, max_len, attention, **where, **encoder_options)
        if is_causal:
            self.encoder.require_causal_form()
        self.head = None if tied else nn.Linear(self.encoder.embed_dim, num_outputs, **where)

    def reset_parameters(self) -> None:
        """Draw every parameter of the encoder and the head anew."""
        reset_submodules(self)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """x (B, N) tokens or (B, N, c) vectors -> logits (B, N, num_outputs).

        ``cu_seqlens`` and ``max_seqlen`` are those of ``SequenceEncoder.forward``.
        """
        packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        return self._logits(self.encoder(x, None, self.is_causal, **packing))

    def logits_at(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The logits of the positions where ``chosen`` (B, N) is True, in order, (positions, num_outputs)."""
        return self._logits(self.encoder(x, None, self.is_causal)[chosen])

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(hidden)
        assert isinstance(self.encoder, TokenEncoder)
        return F.linear(hidden, self.encoder.embed.weight)
