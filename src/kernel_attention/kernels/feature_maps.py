"""Feature maps phi: the explicit side of a kernel k(x, y) = <phi(x), phi(y)>.

Every map takes ``x`` (B, h, N, p) and returns (B, h, N, p'). ``key_padding_mask`` (B, N; True = real token)
and ``is_causal`` matter to the maps that normalise over the sequence; the token-wise maps do not read them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_attention.errors import unknown
from kernel_attention.kernels.statistics import accumulation_dtype

FeatureMap = Callable[[Tensor, Tensor | None, bool], Tensor]

_SMALLEST_NORM = 1e-12  # shorter rows count as zero rows


def cosine(x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """x / ||x|| per token, the map of the cosine-similarity kernel (Primal-Attention, section 4.1).

    The norm accumulates in float32 for 16-bit inputs; a zero row stays zero and passes no gradient.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x.dtype))
    # Dividing by a clamped norm would give a zero row the slope 1e12, which no gradient clipping survives.
    return (x / norm.masked_fill(norm < _SMALLEST_NORM, torch.inf)).to(x.dtype)


def identity(x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """x itself, the map of the linear kernel."""
    return x


FEATURE_MAPS: dict[str, FeatureMap] = {"cosine": cosine, "identity": identity}


def get_feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    """The feature map of that name; a callable of the same signature passes through."""
    if callable(feature_map):
        return feature_map
    if feature_map not in FEATURE_MAPS:
        raise unknown("feature_map", feature_map, FEATURE_MAPS)
    return FEATURE_MAPS[feature_map]
