"""Plain layers, as a user would write them, to compare the mechanisms with.

They map x (B, N, d) to (B, N, d), without masks, cross-attention and checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Form = Literal["sdpa", "eager"]


class SoftmaxLayer(nn.Module):
    """Canonical attention between four projections.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h.
        form: "sdpa", PyTorch's fused product; "eager", the (B, h, N, N) weights in memory.
        is_causal: whether token i sees tokens 0..i only.
    """

    def __init__(self, embed_dim: int, num_heads: int, form: Form = "sdpa", is_causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.form = form
        self.is_causal = is_causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self._attend(q, k, v).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.form == "sdpa":
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return _eager(q, k, v, self.is_causal)


class EagerScaledHeads(SoftmaxLayer):
    """Attention-SH and Attention-BN+SH with their weights in memory, as the primal-dual paper counts them
    (equations 25 and 51): head i attends to keys and values averaged over blocks of ``factors[i]`` tokens.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h.
        factors: one downsampling factor per head; each divides N.
        beta: the multiple of the keys' mean that is subtracted from queries and keys.
    """

    def __init__(self, embed_dim: int, num_heads: int, factors: Sequence[int], beta: float = 0.0) -> None:
        super().__init__(embed_dim, num_heads, "eager")
        self.factors = tuple(factors)
        self.beta = beta

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for head, factor in enumerate(self.factors):
            keys, values = (t[:, head].unflatten(1, (-1, factor)).mean(dim=2) for t in (k, v))
            shift = self.beta * keys.mean(dim=1, keepdim=True)
            outputs.append(_eager(q[:, head] - shift, keys - shift, values, False))
        return torch.stack(outputs, dim=1)


def _eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if is_causal:
        future = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(dim=-1) @ v


class TorchMultihead(nn.Module):
    """``torch.nn.MultiheadAttention`` as self-attention that does not return its weights."""

    def __init__(self, embed_dim: int, num_heads: int, is_causal: bool = False) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        mask = None
        if self.is_causal:  # is_causal of the layer is only a hint about a mask, so the mask is needed too
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), x.device, x.dtype)
        return self.layer(x, x, x, attn_mask=mask, need_weights=False, is_causal=self.is_causal)[0]


class ReleasedPrimal(nn.Module):
    """The structure of the released Primal-Attention layer (data-dependent, non-causal), written by us.

    It follows the formulas of the paper and the description of the code, not its text. Every score is formed
    and kept, W_{e|X} is applied before the concatenation, and the objective is the mean over sequences of J
    squared. Time and memory are therefore those of the structure, not of that repository.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h.
        rank: directions s per head.
        eta: weight of the squared objective.
        rank_multiplier: rows of x sampled per direction.
        max_len: longest sequence; caps the rows.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rank: int = 30,
        eta: float = 0.1,
        rank_multiplier: int = 10,
        max_len: int = 4096,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.eta = eta
        self.rows = min(rank * rank_multiplier, max_len)
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        weights = (torch.empty(num_heads, self.rows, rank) for _ in range(2))
        self.w_e, self.w_r = (nn.Parameter(nn.init.orthogonal_(weight)) for weight in weights)
        self.sqrt_lambda = nn.Parameter(torch.rand(num_heads, rank))
        self.concat = nn.Linear(2 * rank, embed_dim // num_heads)
        self._penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        q, k = self._heads(self.q_proj(x)), self._heads(self.k_proj(x))
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        places = torch.linspace(0, x.size(1) - 1, min(self.rows, x.size(1)), device=x.device).long()
        rows = self._heads(x[:, places])
        w_e, w_r = (torch.einsum("bhmp,hms->bhps", rows, w[:, : rows.size(2)]) for w in (self.w_e, self.w_r))
        e, r = torch.einsum("bhnp,bhps->bhns", q, w_e), torch.einsum("bhnp,bhps->bhns", k, w_r)
        joined = self.concat(torch.cat([e, r], dim=-1))
        if self.training:
            scale = self.sqrt_lambda[:, None]
            energy = ((e * scale).square().sum(dim=-1) + (r * scale).square().sum(dim=-1)) / 2
            trace = torch.einsum("hms,hms->h", self.w_e, self.w_r)
            self._penalty = self.eta * (energy.mean(dim=(1, 2)) - trace.mean()).square().mean()
        return self.out_proj(joined.transpose(1, 2).flatten(2))

    def penalty(self) -> Tensor | None:
        """eta J^2 of the last forward in training mode."""
        return self._penalty

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
