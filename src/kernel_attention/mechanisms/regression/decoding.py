"""Regression attention one token at a time.

Legend: B batch, h heads, p head width, m features, p_v width of a value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_attention.core.decoding import Position, State, before
from kernel_attention.mechanisms.regression.functional import delta_states, faded, ridge_map, sums_of
from kernel_attention.mechanisms.regression.prefixes import PairSums
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.features.feature_maps import (
    FeatureMap,
    cosine,
    energy_before,
    features_of,
    frobenius,
)
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, without_autocast


@dataclass(frozen=True)
class RidgeMemory(State):
    """The sums over the pairs read: phi phi^T (B, h, m, m) and phi v^T (B, h, m, p_v).

    The inverse of the first sum could be updated instead, in a fraction of a factorisation's time. But in
    float32 it never forgets the rounding of its first steps, when it was largest, and the sum does.
    Where the feature map divides by them, the state holds the squared norms of queries and keys,
    (B, h, 1, 1).
    """

    gram: Tensor
    target: Tensor
    q_energy: Tensor | None
    k_energy: Tensor | None


def empty_ridge(feature_map: FeatureMap, like: Tensor) -> RidgeMemory:
    """The sums of no pairs; ``like`` (B, h, N, p) gives sizes, precision and device."""
    width = feature_map(like.new_zeros(1, like.size(1), 1, like.size(3)), None, True).size(-1)
    dtype = accumulation_dtype(like.dtype)
    gram = like.new_zeros(*like.shape[:2], width, width, dtype=dtype)
    target = like.new_zeros(*like.shape[:2], width, like.size(3), dtype=dtype)
    energy = energy_before(feature_map, like)
    return RidgeMemory(gram, target, energy, energy)


def read_ridge(
    feature_map: FeatureMap, forgetting: Tensor | None, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor
) -> RidgeMemory:
    """The sums after a prompt q, k, v (B, h, N, p) of which the first ``lengths`` (B,) tokens are real."""
    with without_autocast(v):
        real = before(lengths, k.size(2))
        q, k, v = (exactly(x).masked_fill(~real, 0.0) for x in (q, k, v))
        phi_k = feature_map(k, None, True).masked_fill(~real, 0.0)
        if forgetting is not None:
            phi_k, v = faded(phi_k, v, exactly(forgetting), lengths[:, None])
        sums = sums_of(phi_k, v)
        if feature_map is not frobenius:
            return RidgeMemory(*sums, None, None)
        return RidgeMemory(*sums, *(x.square().sum(dim=(-2, -1), keepdim=True) for x in (q, k)))


def ridge_step(
    feature_map: FeatureMap,
    ridge: Tensor,
    forgetting: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: RidgeMemory,
    position: Position,
) -> tuple[Tensor, RidgeMemory]:
    """The attention of one token, (B, h, 1, p), and the sums with it; q, k, v (B, h, 1, p)."""
    dtype = product_dtype(v)
    with without_autocast(v):
        q, k, v = exactly(q), exactly(k), exactly(v)
        phi_q, q_energy = features_of(feature_map, q, memory.q_energy)
        phi_k, k_energy = features_of(feature_map, k, memory.k_energy)
        ridge = exactly(ridge)
        gram, target = memory.gram, memory.target
        if forgetting is not None:
            fade = exactly(forgetting)
            seen = torch.as_tensor(position.tokens + 1, device=v.device).reshape(-1, 1)
            ridge = ridge * fade.pow(seen)
            gram, target = gram * fade[:, None, None], target * fade[:, None, None]
        sums = PairSums(gram + phi_k.mT @ phi_k, target + phi_k.mT @ v)
        out = phi_q @ ridge_map(sums, ridge)
    return out.to(dtype), RidgeMemory(*sums, q_energy, k_energy)


@dataclass(frozen=True)
class DeltaState(State):
    """The memory W that the delta rule has written, (B, h, p, p_v)."""

    memory: Tensor


def empty_delta(like: Tensor) -> DeltaState:
    """Zero; ``like`` (B, h, N, p) gives sizes, precision and device."""
    size = like.size(3)
    dtype = accumulation_dtype(like.dtype)
    return DeltaState(like.new_zeros(*like.shape[:2], size, size, dtype=dtype))


def read_delta(k: Tensor, v: Tensor, step: Tensor, log_decay: Tensor | None, lengths: Tensor) -> DeltaState:
    """The memory after a prompt k, v (B, h, N, p) of which the first ``lengths`` (B,) tokens are real."""
    with without_autocast(v):
        real = before(lengths, k.size(2))
        k, v = (exactly(x).masked_fill(~real, 0.0) for x in (k, v))
        if log_decay is not None:
            log_decay = exactly(log_decay).masked_fill(~real[..., 0], 0.0)
        return DeltaState(delta_states(cosine(k), v, exactly(step), log_decay).last)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, log_decay: Tensor | None, state: DeltaState
) -> tuple[Tensor, DeltaState]:
    """The attention of one token, (B, h, 1, p), and the memory with it; q, k, v (B, h, 1, p)."""
    dtype = product_dtype(v)
    with without_autocast(v):
        q, k, v = cosine(exactly(q)), cosine(exactly(k)), exactly(v)
        memory = state.memory
        if log_decay is not None:
            memory = memory * exactly(log_decay)[..., None].exp()
        memory = memory + k.mT @ (exactly(step)[..., None] * (v - k @ memory))
        return (q @ memory).to(dtype), DeltaState(memory)
