"""Linear attention one token at a time: the running sum of the keys' features times their values.

``factor`` is as in ``kernel_attention.mechanisms.softmax.kernel``: the sum holds the completed blocks.

Legend: B batch, h heads, p head width, m features, f factor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_attention.core.decoding import Position, State, before, new_where
from kernel_attention.tensors.affine import product_dtype, wide
from kernel_attention.tensors.features.feature_maps import (
    FeatureMap,
    energy_before,
    features_in_range,
    features_of,
    frobenius,
)
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures
from kernel_attention.tensors.statistics import accumulation_dtype, divide, exactly, without_autocast


@dataclass(frozen=True)
class RunningSum(State):
    """The sum of phi(k_j) v_j^T over the completed blocks, (B, h, m, p_v).

    It has one column more where the weights are summed too. Where the feature map divides by them, the state
    holds the squared norms of queries and keys, (B, h, 1, 1).
    """

    total: Tensor
    q_energy: Tensor | None
    k_energy: Tensor | None


def empty_sum(feature_map: FeatureMap, normalize: bool, like: Tensor) -> RunningSum:
    """The sum before the first token; ``like`` (B, h, N, p) gives sizes, precision and device."""
    num_features = feature_map(like.new_zeros(1, like.size(1), 1, like.size(3)), None, True).size(-1)
    dtype = accumulation_dtype(like.dtype)
    total = like.new_zeros(*like.shape[:2], num_features, like.size(3) + normalize, dtype=dtype)
    energy = energy_before(feature_map, like)
    return RunningSum(total, energy, energy)


def read_sum(
    feature_map: FeatureMap,
    normalize: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    factor: int = 1,
) -> RunningSum:
    """The sum after a prompt q, k, v (B, h, N, p); row i of k and v is the open block at token i."""
    _, phi_k, v = _features(feature_map, normalize, q, k, v)
    done = before(lengths // factor, phi_k.size(2) // factor)
    with without_autocast(v):
        phi_k, v = (exactly(x[:, :, factor - 1 :: factor]) for x in (phi_k, v))
        total = phi_k.masked_fill(~done, 0.0).mT @ v
    if feature_map is not frobenius:
        return RunningSum(total, None, None)
    real = before(lengths, k.size(2))
    q_energy, k_energy = (
        exactly(x).square().masked_fill(~real, 0.0).sum(dim=(-2, -1), keepdim=True) for x in (q, k)
    )
    return RunningSum(total, q_energy, k_energy)


def linear_step(
    feature_map: FeatureMap,
    normalize: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: RunningSum,
    position: Position,
    factor: int = 1,
) -> tuple[Tensor, RunningSum]:
    """The attention of one token, (B, h, 1, p), and the sum with it; q, k, v (B, h, 1, p)."""
    dtype = product_dtype(v)
    if memory.k_energy is None:
        phi_q, phi_k, v = _features(feature_map, normalize, q, k, v)
        q_energy, k_energy = None, None
    else:
        phi_q, q_energy = features_of(feature_map, q, memory.q_energy)
        phi_k, k_energy = features_of(feature_map, k, memory.k_energy)
        v = _with_ones(v) if normalize else v
    with without_autocast(v):
        total = memory.total + exactly(phi_k).mT @ exactly(v)
        out = exactly(phi_q) @ total
        if normalize:
            out = divide(out[..., :-1], out[..., -1:])
    out = out.to(dtype)
    return out, RunningSum(new_where(position.completes(factor), total, memory.total), q_energy, k_energy)


def _features(
    phi: FeatureMap, normalize: bool, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k), and v with a column of ones where the weights are summed too."""
    if normalize and isinstance(phi, SoftmaxPlusFeatures):
        phi_q, phi_k = phi.normalized_pair(wide(q), wide(k), None, True)
    else:
        phi_q, phi_k = (features_in_range(phi, x, None, True) for x in (q, k))
    return phi_q, phi_k, _with_ones(v) if normalize else v


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
