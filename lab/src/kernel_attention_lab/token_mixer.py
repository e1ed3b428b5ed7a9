"""The mixing of tokens of MLP-Mixer (Tolstikhin et al., NeurIPS 2021) in the place of attention: a plugin.

    kernel-attention reproduce places --plugin kernel_attention_lab.token_mixer

It compares no token with another: every place has fixed, learnt weights for every other place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.errors import InputError, require_positive


@ka.register_attention(
    "token_mixer",
    paper="Tolstikhin et al. 2021",
    equation="W_2 gelu(W_1 V), over the tokens of every channel",
    summary="a feed-forward network over the places of a sequence, the same for all channels",
    time="N f",
    memory="N f",
)
class TokenMixer(ka.AttentionLayer):
    """A feed-forward network over places.

    Args:
        embed_dim: model width d.
        num_heads: h; has no effect on a network that all channels share.
        max_len: the longest sequence, N; shorter ones are filled with zeros.
        hidden: f, the width of the network.
        bias: whether the projections of the channels have biases.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_len: int,
        hidden: int = 64,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(max_len=max_len, hidden=hidden)
        self.max_len = max_len
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.spread = nn.Linear(max_len, hidden, device=device, dtype=dtype)
        self.gather = nn.Linear(hidden, max_len, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for projection in (self.v_proj, self.out_proj, self.spread, self.gather):
            projection.reset_parameters()

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """x (B, N, d) -> (B, N, d).

        Raises:
            InputError: for a sequence that is longer than ``max_len``.
        """
        length = x.size(1)
        if length > self.max_len:
            raise InputError(f"sequence length {length} exceeds max_len={self.max_len}")
        v = self.v_proj(x)
        if attention_mask is not None:
            v = v * attention_mask[:, :, None]
        places = nn.functional.pad(v.mT, (0, self.max_len - length))
        mixed = self.gather(nn.functional.gelu(self.spread(places)))[..., :length]
        out: Tensor = self.out_proj(mixed.mT)
        return out

    def why_not_causal(self) -> str:
        """Every place reads every other."""
        return "a network over places reads later ones too"
