"""Attention among channels, which Fully Attentional Networks add to the feed-forward network.

Zhou et al. 2022, "Understanding The Robustness in Vision Transformers": the efficient channel attention, from
its published formula. FAN's released code was not read, and nothing here was compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_attention.core.parameters import Device


class ChannelAttention(nn.Module):
    """Weighs the channels of the feed-forward network's output by the tokens before it (FAN).

    With the tokens Z, N rows of d channels, and their prototype z, the N means over the channels,

        ECA(Z) = sigmoid(W_Q softmax(Z)^T softmax(z) / sqrt(N)) * MLP(Z).

    The paper writes it ECA(Z) = Norm((W_Q' σ(Z)) σ(Z̄)^T / √n) ⊙ MLP(Z) with a prototype that is the mean over
    the channels, and takes the sigmoid for Norm; it applies the weights to the MLP's output. Here σ is the
    softmax over the tokens. A secondary description of the paper reads σ as a sigmoid too, so of all parts of
    the formula this one is the least certain.

    The weights lie in (0, 1), and all tokens of a sequence share them. A
    large weight of one channel does not lower the others, as a softmax over the channels would.

    Args:
        embed_dim: channels d.
        device: where the parameter is made; None: the default device.
        dtype: the parameter's precision; None: the default one.
    """

    def __init__(self, embed_dim: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, values: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The values (B, N, d) times the channels' weights of x (B, N, d)."""
        return values * self.channel_weights(x, attention_mask)[:, None]

    def channel_weights(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, N, d) -> (B, d) in (0, 1); attention_mask (B, N), True = real token."""
        prototype = x.mean(dim=2)
        if attention_mask is None:
            length: Tensor | int = x.size(1)
        else:
            length = attention_mask.sum(dim=1, keepdim=True).clamp_min(1)
            # The lowest number, not -inf: a sequence without real tokens keeps finite gradients.
            lowest = torch.finfo(x.dtype).min
            prototype = prototype.masked_fill(~attention_mask, lowest)
            x = x.masked_fill(~attention_mask[..., None], lowest)
        correlation = prototype.softmax(dim=1)[:, None] @ x.softmax(dim=1)
        return torch.sigmoid(self.q_proj(correlation[:, 0]) / length**0.5)
