"""Wrappers that make contenders of one or several layers, called as x -> y. Each has a ``penalty()``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.models import EncoderLayer


class CausalCall(nn.Module):
    """One of our layers, called with ``is_causal=True``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        return self.layer(x, is_causal=True)

    def penalty(self) -> Tensor | None:
        """The layer's term of the loss."""
        return penalty(self.layer)


class Encoder(nn.Module):
    """Attention layers in the pre-norm encoder of the Long Range Arena recipes: hidden 2 d, dropout 0.1.

    Embedding and classifier are left out, because they are the same for all contenders.

    Args:
        attentions: layers x -> y of width d.
        embed_dim: d.
    """

    def __init__(self, attentions: Sequence[nn.Module], embed_dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(as_attention(layer, embed_dim), 2 * embed_dim, dropout=0.1, norm_first=True)
            for layer in attentions
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        for layer in self.layers:
            x = layer(x)
        return x

    def penalty(self) -> Tensor | None:
        """The sum of what the layers add to the loss."""
        return sum_of_penalties(self.layers)


def as_attention(layer: nn.Module, embed_dim: int) -> AttentionLayer:
    """A layer x -> y of any library as one of ours."""
    return layer if isinstance(layer, AttentionLayer) else _Foreign(layer, embed_dim)


class _Foreign(AttentionLayer):
    """A layer x -> y of another library."""

    def __init__(self, layer: nn.Module, embed_dim: int) -> None:
        super().__init__(embed_dim, num_heads=1)
        self.layer = layer

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The foreign layer on x; the other arguments are not read."""
        return self.layer(x)

    def penalty(self) -> Tensor | None:
        """The layer's term of the loss."""
        return penalty(self.layer)


def penalty(layer: nn.Module) -> Tensor | None:
    """The layer's own share of the loss, None where it has none."""
    own = getattr(layer, "penalty", None)
    return own() if callable(own) else None


def sum_of_penalties(layers: Iterable[nn.Module]) -> Tensor | None:
    """The term of the loss of the attentions of encoder layers; None without one."""
    own = [penalty(layer.attention) for layer in layers if isinstance(layer, EncoderLayer)]
    added = [each for each in own if each is not None]
    return torch.stack(added).sum() if added else None
