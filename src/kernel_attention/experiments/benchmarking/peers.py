"""Layers of other libraries, each with the default options of its own documentation.

A library is imported only when it is measured. A missing library is reported as absent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kernel_attention.experiments.benchmarking.plans import Setting


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
