"""The inputs of our own layers' attention, computed from the layers' input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.mechanisms import mechanism_name


def captured_own(
    name: str,
    layer: AttentionLayer,
    x: Tensor,
    *,
    context: Tensor | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> CapturedAttention:
    """The arguments of a layer's call as a ``CapturedAttention``."""
    x = x.detach()
    source = x if context is None else context.detach()
    q, k, v = (_projected(layer, part, at) for part, at in (("q", x), ("k", source), ("v", source)))
    # Symmetric layers have one projection for both.
    q, k = (k if q is None else q), (q if k is None else k)
    real_keys = torch.ones(source.shape[:2], dtype=torch.bool, device=x.device)
    if attention_mask is not None:
        real_keys = attention_mask
    real_queries = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return CapturedAttention(
        name=name,
        mechanism=mechanism_name(layer),
        queries=q,
        keys=k,
        values=v,
        real_queries=real_keys if context is None else real_queries,
        real_keys=real_keys,
        is_causal=is_causal,
        is_softmax=layer.softmax_reading == "exact",
        layer=layer,
        x=x,
        context=None if context is None else source,
    )


def near_softmax(attention: CapturedAttention) -> bool:
    """True where the kernel-PCA reading applies: to softmax attention of the keys, or of cleaned keys."""
    return attention.is_softmax or (
        attention.layer is not None and attention.layer.softmax_reading is not None
    )


def objective_of(attention: CapturedAttention, case: int) -> Tensor | None:
    """J of one sequence, 0-dimensional; None for a layer without an objective or with its weight at 0."""
    layer = attention.layer
    if not isinstance(layer, PenalizedAttention) or attention.x is None:
        return None
    one = slice(case, case + 1)
    found = layer.measure_objective(
        attention.x[one], attention_mask=attention.real_keys[one], is_causal=attention.is_causal
    )
    return None if found is None else found.detach().float().cpu()


def scores(attention: CapturedAttention, case: int) -> dict[str, Tensor]:
    """Projection scores of one sequence's real tokens by name, (h, n, rank) each; empty without any."""
    if attention.layer is None or attention.x is None:
        return {}
    one = slice(case, case + 1)
    found = attention.layer.named_scores(attention.x[one], attention_mask=attention.real_keys[one])
    real = attention.real_queries[case]
    return {f"scores_{name}": part[0][:, real].float().cpu() for name, part in found.items()}


def kernel_tensor(attention: CapturedAttention, case: int, tokens: Tensor | None = None) -> Tensor | None:
    """K of a sequence's real tokens, or of these among them, (h, n, .., n); None for a layer without K."""
    if attention.layer is None or attention.x is None:
        return None
    real = attention.x[case : case + 1][:, attention.real_keys[case]]
    found = attention.layer.kernel_tensor(real if tokens is None else real[:, tokens])
    return None if found is None else found[0].float().cpu()


def _projected(layer: AttentionLayer, part: str, x: Tensor) -> Tensor | None:
    projection = getattr(layer, f"{part}_proj", None)
    return layer.split_heads(projection(x)) if isinstance(projection, nn.Module) else None
