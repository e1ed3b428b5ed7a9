"""The classifier of the papers' time-series experiments: the encoder, a pooling and a linear head."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.mechanisms import AttentionFactory, AttentionSpec
from kernel_attention.models.rocket_stem import RocketStem
from kernel_attention.models.sequence import NUM_HEADS, SequenceEncoder
from kernel_attention.tensors.packing import PackedSequences
from kernel_attention.tensors.statistics import num_real

SequencePooling = Literal["flatten", "mean", "mean_max", "attention"]
_KINDS = ("flatten", "mean", "mean_max", "attention")


class TokenPooling(nn.Module):
    """One vector for every sequence.

    Args:
        kind: "flatten" joins all positions (the papers' head, fixed to max_len). The others read the real
            tokens: their "mean"; "mean_max", the mean and the maximum side by side; "attention", a mean with
            learnt weights in each of ``num_heads`` parts of the channels.
        max_len: largest number of tokens.
        embed_dim: width d of the tokens.
        num_heads: for "attention".
        where: ``device`` and ``dtype`` of the parameters.

    Attributes:
        width: length of the vector.
        sequence_group: the processes that share every sequence; None: whole sequences are here.
    """

    sequence_group: SequenceGroup | None = None

    def __init__(
        self, kind: SequencePooling, max_len: int, embed_dim: int, num_heads: int, **where: Any
    ) -> None:
        super().__init__()
        if kind not in _KINDS:
            raise unknown("pooling", kind, _KINDS)
        self.kind = kind
        self.max_len = max_len
        self.width = embed_dim * {"flatten": max_len, "mean_max": 2}.get(kind, 1)
        self.score = nn.Linear(embed_dim, num_heads, **where) if kind == "attention" else None

    def forward(self, encoded: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, d), zero at padded tokens (attention_mask False) -> (B, width)."""
        if self.kind == "flatten":
            # The positions a short batch lacks are zero, as padded ones are.
            return F.pad(encoded, (0, 0, 0, self.max_len - encoded.size(1))).flatten(1)
        if self.kind == "mean":
            return mean_token(encoded, attention_mask, self.sequence_group)
        if self.kind == "mean_max":
            return torch.cat([mean_token(encoded, attention_mask), _largest(encoded, attention_mask)], dim=-1)
        assert self.score is not None
        scores = self.score(encoded)
        if attention_mask is not None:
            # A finite number, so that a sequence without a real token has no NaN; its tokens are zero.
            scores = scores.masked_fill(~attention_mask[..., None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=1)[..., None]
        return (weights * encoded.unflatten(-1, (weights.size(-2), -1))).sum(dim=1).flatten(1)

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why the tokens of a sequence cannot come from several processes; None where they can."""
        return None if self.kind == "mean" else f"pooling={self.kind!r} reads all tokens (accepted: 'mean')"


def mean_token(encoded: Tensor, attention_mask: Tensor | None, group: SequenceGroup | None = None) -> Tensor:
    """The mean over the real tokens of encoded (B, N, d), zero at padded ones: (B, d).

    ``group`` are the processes that share the sequences; None: the sequences are whole.
    """
    if group is not None:
        count = group.places(num_real(encoded, attention_mask))[1]
        return group.total(encoded.sum(dim=1)) / count.clamp_min(1)[:, None]
    if attention_mask is None:
        return encoded.mean(dim=1)
    return encoded.sum(dim=1) / attention_mask.sum(dim=1, keepdim=True).clamp_min(1)


def _largest(encoded: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The maximum over the real tokens; 0 where there is none."""
    if attention_mask is None:
        return encoded.amax(dim=1)
    largest = encoded.masked_fill(~attention_mask[..., None], -torch.inf).amax(dim=1)
    return largest.masked_fill(~attention_mask.any(dim=1, keepdim=True), 0.0)


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
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
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
