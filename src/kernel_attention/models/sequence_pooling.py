"""From the encoded tokens of a sequence to one vector."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import unknown
from kernel_attention.tensors.statistics import num_real

SequencePooling = Literal["flatten", "mean", "mean_max", "attention"]
_KINDS = ("flatten", "mean", "mean_max", "attention")


class TokenPooling(nn.Module):
    """One vector for every sequence.

    Args:
        kind: "flatten" joins all positions (the papers' head, fixed to max_len). The others read the real
            tokens: their "mean"; "mean_max", the mean and the maximum side by side; "attention", a mean with
            learnt weights in each of the ``num_heads`` parts of the channels.
        max_len: largest number of tokens.
        embed_dim: width d of the tokens.
        num_heads: parts of the channels for "attention".
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
