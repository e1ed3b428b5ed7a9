"""Layers to compare the mechanisms with: plain ones, as a user would write them, and other libraries'.

They map x (B, N, d) to (B, N, d). The plain ones have no masks, cross-attention and checks. The others have
the default options of their own documentation. A library is imported only when it is measured, and a missing
one is reported as absent.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention_lab.benchmarking.plans import Setting

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


class _Called(nn.Module):
    """A layer with another signature, called as x -> y."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.layer, x)


def linear_attention_transformer(setting: Setting) -> nn.Module:
    """Softmax over features for queries, over tokens for keys."""
    library = _load("linear_attention_transformer.linear_attention_transformer")
    return library.SelfAttention(
        setting.embed_dim, setting.num_heads, causal=setting.is_causal, blindspot_size=64
    )


def fast_transformers(setting: Setting) -> nn.Module:
    """phi = elu + 1; the causal form runs its own C++ or CUDA kernel."""
    attention, masking = _load("fast_transformers.attention"), _load("fast_transformers.masking")
    kernel = attention.CausalLinearAttention if setting.is_causal else attention.LinearAttention
    head_dim = setting.embed_dim // setting.num_heads
    layer = attention.AttentionLayer(kernel(head_dim), setting.embed_dim, setting.num_heads)
    masks: dict[Any, Any] = {}

    def call(module: nn.Module, x: Tensor) -> Tensor:
        key = (x.size(0), x.size(1), x.device)
        if key not in masks:  # its masks have size N or N^2; making them must not be timed
            full = masking.TriangularCausalMask if setting.is_causal else masking.FullMask
            lengths = masking.LengthMask(x.new_full((x.size(0),), x.size(1)).long(), device=x.device)
            masks[key] = (full(x.size(1), device=x.device), lengths, lengths)
        return module(x, x, x, *masks[key])

    return _Called(layer, call)


def performer(setting: Setting) -> nn.Module:
    """FAVOR+ with the default number of features, p log p."""
    return _load("performer_pytorch").SelfAttention(
        setting.embed_dim, heads=setting.num_heads, dim_head=setting.embed_dim // setting.num_heads,
        causal=setting.is_causal,
    )  # fmt: skip


def linformer(setting: Setting) -> nn.Module:
    """Keys and values projected to 256 rows."""
    return _load("linformer").LinformerSelfAttention(
        setting.embed_dim, setting.length, k=256, heads=setting.num_heads
    )


def nystrom(setting: Setting) -> nn.Module:
    """64 landmarks."""
    return _load("nystrom_attention").NystromAttention(
        setting.embed_dim, setting.embed_dim // setting.num_heads, setting.num_heads, num_landmarks=64
    )


def reformer(setting: Setting) -> nn.Module:
    """Two rounds of hashing, buckets of 64."""
    return _load("reformer_pytorch").LSHSelfAttention(
        setting.embed_dim, heads=setting.num_heads, n_hashes=2, bucket_size=64, causal=setting.is_causal
    )


def flash_linear_attention(setting: Setting) -> nn.Module:
    """Its chunked linear attention, always causal."""
    layer = _load("fla.layers").LinearAttention(
        hidden_size=setting.embed_dim, num_heads=setting.num_heads, mode="chunk"
    )
    return _Called(layer, lambda module, x: module(x)[0])


def _load(name: str) -> Any:
    return importlib.import_module(name)
