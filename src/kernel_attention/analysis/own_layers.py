"""What layers of ours attend with, from their input."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention import functional
from kernel_attention.analysis.captured import CapturedAttention
from kernel_attention.attention import (
    AttentionLayer,
    DualMultilinearAttention,
    MultilinearAttention,
    PrimalAttention,
    RobustPrincipalAttention,
    SoftmaxAttention,
    TensorAttention,
)
from kernel_attention.attention.base import PenalizedAttention
from kernel_attention.attention.modes import ReadsModes
from kernel_attention.attention.registry import mechanism_name


def captured_own(
    name: str,
    layer: AttentionLayer,
    x: Tensor,
    *,
    context: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> CapturedAttention:
    """The arguments of a layer's call as a :class:`CapturedAttention`."""
    x = x.detach()
    source = x if context is None else context.detach()
    q, k, v = (_projected(layer, part, at) for part, at in (("q", x), ("k", source), ("v", source)))
    # Symmetric layers have one projection for both.
    q, k = (k if q is None else q), (q if k is None else k)
    real_keys = torch.ones(source.shape[:2], dtype=torch.bool, device=x.device)
    if key_padding_mask is not None:
        real_keys = key_padding_mask
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
        is_softmax=isinstance(layer, SoftmaxAttention) and layer.kernel == "softmax",
        layer=layer,
        x=x,
        context=None if context is None else source,
    )


def near_softmax(attention: CapturedAttention) -> bool:
    """Whether the layer is softmax attention or, like RPC-Attention, a change of it with q, k and v of its
    own, so that the kernel-PCA reading is about it.
    """
    return attention.is_softmax or isinstance(attention.layer, RobustPrincipalAttention)


def objective(attention: CapturedAttention, case: int) -> Tensor | None:
    """J of one sequence, 0-dimensional; None for a layer without an objective or with its weight at 0."""
    layer = attention.layer
    if not isinstance(layer, PenalizedAttention) or attention.x is None:
        return None
    twin = copy.copy(layer)  # shares the parameters; the layer's own mode and last objective stay as they are
    twin.training, twin.objective = True, None
    one = slice(case, case + 1)
    twin.attend(attention.x[one], None, attention.real_keys[one], attention.is_causal)
    return None if twin.objective is None else twin.objective.detach().float().cpu().mean()


def scores(attention: CapturedAttention, case: int) -> dict[str, Tensor]:
    """Projection scores of one sequence's real tokens by name, (h, n, rank) each; empty without any."""
    if not isinstance(attention.layer, PrimalAttention | ReadsModes) or attention.x is None:
        return {}
    layer: Any = attention.layer
    one = slice(case, case + 1)
    found = layer.scores(attention.x[one], key_padding_mask=attention.real_keys[one])
    names = ("e", "r") if isinstance(layer, PrimalAttention) else [str(n + 1) for n in range(len(found))]
    real = attention.real_queries[case]
    parts = list(found)[: len(names)]
    return {f"scores_{n}": part[0][:, real].float().cpu() for n, part in zip(names, parts, strict=True)}


def has_kernel_tensor(attention: CapturedAttention) -> bool:
    """Whether the layer's kernel is a tensor that :func:`kernel_tensor` can form."""
    layer = attention.layer
    return isinstance(layer, DualMultilinearAttention | TensorAttention) or (
        isinstance(layer, MultilinearAttention) and layer.variant != "data_dependent"
    )


def kernel_tensor(attention: CapturedAttention, case: int, tokens: Tensor | None = None) -> Tensor:
    """K of one sequence's real tokens, or of these among them, (h, n, .., n).

    The cubemax tensor of the dual and the tensor mechanism, C x_1 Phi_1 .. x_D Phi_D of the primal one.
    """
    layer, x = attention.layer, attention.x
    assert isinstance(layer, ReadsModes), "a layer without a kernel tensor"
    assert x is not None, "layers of ours keep their input"
    real = x[case : case + 1][:, attention.real_keys[case]]
    sequences = layer.sequences(real if tokens is None else real[:, tokens])
    if not isinstance(layer, MultilinearAttention):
        return functional.cubemax_kernel(sequences)[0].float().cpu()
    features = [layer.feature_map(sequence, None, False) for sequence in sequences]
    return functional.multilinear_kernel(features, layer.compatibility)[0].float().cpu()


def _projected(layer: AttentionLayer, part: str, x: Tensor) -> Tensor | None:
    projection = getattr(layer, f"{part}_proj", None)
    return layer.split_heads(projection(x)) if isinstance(projection, nn.Module) else None
