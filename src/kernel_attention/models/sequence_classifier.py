"""The classifier of the papers' time-series experiments: the encoder, a pooling and a linear head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError
from kernel_attention.mechanisms import AttentionFactory, AttentionSpec
from kernel_attention.models.rocket_stem import RocketStem
from kernel_attention.models.sequence import NUM_HEADS, SequenceEncoder
from kernel_attention.models.sequence_pooling import SequencePooling, TokenPooling, mean_token
from kernel_attention.tensors.packing import PackedSequences


class SequenceClassifier(nn.Module):
    """The encoder with a linear head: class logits, or regression values.

    With a ``readout``, the outputs in evaluation are the mean of the head's and of a linear map of the
    features of the rocket stem, averaged over the tokens. The map is no parameter: ``set_readout`` takes its
    weights from a closed form. In training the outputs are the head's alone.

    Args:
        in_features: channels c of the input.
        num_outputs: classes, or regression targets.
        max_len: longest sequence.
        attention: as in ``SequenceEncoder``.
        pooling: how the tokens become one vector: "flatten" (the papers' head, fixed to max_len), "mean",
            "mean_max" or "attention"; see ``TokenPooling``.
        readout: whether the model has a readout, which needs ``stem="rocket"``.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
        encoder_options: the other arguments of ``SequenceEncoder``.
    """

    readout_weight: Tensor
    readout_bias: Tensor

    def __init__(
        self,
        in_features: int,
        num_outputs: int,
        max_len: int,
        attention: AttentionSpec | AttentionFactory | Sequence[AttentionSpec | AttentionFactory] = "primal",
        *,
        pooling: SequencePooling = "flatten",
        readout: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **encoder_options: Any,
    ) -> None:
        super().__init__()
        require_positive(num_outputs=num_outputs)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoder = SequenceEncoder(in_features, max_len, attention, **where, **encoder_options)
        num_heads = encoder_options.get("num_heads", NUM_HEADS)
        sizes = (self.encoder.num_tokens, self.encoder.embed_dim, num_heads)
        self.pooling = TokenPooling(pooling, *sizes, **where)
        self.head = nn.Linear(self.pooling.width, num_outputs, **where)
        self.has_readout = readout
        if readout:
            if not isinstance(self.encoder.project, RocketStem):
                raise InputError("readout=True needs stem='rocket', whose features it reads")
            num_features = self.encoder.project.num_features
            self.register_buffer("readout_weight", torch.zeros(num_outputs, num_features, **where))
            self.register_buffer("readout_bias", torch.zeros(num_outputs, **where))

    def reset_parameters(self) -> None:
        """Draw every parameter of the encoder and the classifier anew; a readout gives zeros."""
        reset_submodules(self)
        if self.has_readout:
            self.set_readout(torch.tensor(0.0), torch.tensor(0.0))

    def set_readout(self, weight: Tensor, bias: Tensor) -> None:
        """Set the readout's map, (num_outputs, F) and (num_outputs,)."""
        self.readout_weight.copy_(weight)
        self.readout_bias.copy_(bias)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: list[Tensor] | None = None,
        cu_seqlens: Tensor | PackedSequences | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Class logits or values, (B, num_outputs).

        Args:
            x: (B, N, c).
            attention_mask: (B, N), True = real token.
            hidden_states: see ``SequenceEncoder.forward``.
            cu_seqlens: where S sequences begin in a row x (1, N, c), whose outputs are (S, num_outputs).
            max_seqlen: with ``cu_seqlens``, the longest sequence's tokens, or more.
        """
        if cu_seqlens is not None:
            packed = self.encoder.packed(x, cu_seqlens, max_seqlen, attention_mask=attention_mask)
            if not self.has_readout:
                encoded = self.encoder(x, hidden_states=hidden_states, cu_seqlens=packed)
                packed = packed.in_patches(self.encoder.patch_len)
                return self.head(self.pooling(packed.unpack(encoded), packed.attention_mask))
            x, attention_mask = packed.unpack(x), packed.attention_mask
        if self.has_readout:
            token_mask = self.encoder.token_mask(attention_mask)
            return self.from_features(self.encoder.features(x, attention_mask), token_mask, hidden_states)
        return self.head(self.embed(x, attention_mask, hidden_states))

    def embed(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """The vector that the head reads, (B, N, c) -> (B, width)."""
        encoded = self.encoder(x, attention_mask, hidden_states=hidden_states)
        return self.pooling(encoded, self.encoder.token_mask(attention_mask))

    def from_features(
        self,
        features: Tensor,
        token_mask: Tensor | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """``forward`` from the ``features`` of the encoder on: (B, M, F), (B, M) -> (B, num_outputs)."""
        encoded = self.encoder.from_features(features, token_mask, hidden_states)
        outputs = self.head(self.pooling(encoded, token_mask))
        if self.training or not self.has_readout:
            return outputs
        if token_mask is not None:
            features = features.masked_fill(~token_mask[..., None], 0.0)
        read = F.linear(mean_token(features, token_mask), self.readout_weight, self.readout_bias)
        return (outputs + read) / 2
