"""One token of causal attention at a time: a cache of keys and values, or their running sum.

Every function here gives what the parallel causal form gives the same token. ``factor`` is as in
:mod:`kernel_attention.functional.blocks`: the new token's key and value are its open block's, pooled up to
the token; row ``position // factor`` of a cache is the open block until it is complete, then the block.

Legend: B batch, h heads, p head width, f factor, N tokens read, M = ceil(N / f) keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention.functional.decoding_state import (
    KeyValueCache,
    Position,
    State,
    choose,
    per_sequence,
    scale_by,
)
from kernel_attention.functional.linear import divide
from kernel_attention.functional.sparse import SparsePattern, positions_seen
from kernel_attention.kernels.feature_maps import FeatureMap, frobenius, inverse_norm
from kernel_attention.kernels.softmax_features import SoftmaxPlusFeatures
from kernel_attention.kernels.statistics import accumulation_dtype, exactly


class FeatureKernel(NamedTuple):
    """phi(q) . phi(k), divided by its sum over the keys where ``normalize``."""

    feature_map: FeatureMap
    normalize: bool


Kernel = FeatureKernel | SparsePattern | None
"""What weighs the values: features, softmax over a pattern, or softmax over all (None)."""


@dataclass(frozen=True)
class RunningSum(State):
    """sum of phi(k_j) v_j^T over the completed blocks, (B, h, m, p_v), one column more where the weights are
    summed too; and the squared norms of queries and keys, (B, h, 1, 1), where the feature map divides by
    them.
    """

    total: Tensor
    q_energy: Tensor | None
    k_energy: Tensor | None


@dataclass(frozen=True)
class Moments(State):
    """The first key, and of the completed blocks' keys minus it: mean and sum of squared deviations; all
    (B, h, 1, p).
    """

    first: Tensor
    mean: Tensor
    squares: Tensor


Memory = KeyValueCache | RunningSum


def energy_before(feature_map: FeatureMap, x: Tensor) -> Tensor | None:
    """||X||^2 of no tokens, (B, h, 1, 1), where the map divides by it; x (B, h, N, p) gives the sizes."""
    return (
        x.new_zeros(*x.shape[:2], 1, 1, dtype=accumulation_dtype(x.dtype))
        if feature_map is frobenius
        else None
    )


def features_of(feature_map: FeatureMap, x: Tensor, energy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """phi of one token, (B, h, 1, p), and ||X||^2 of the prefix with it; a map other than the Frobenius map
    is taken to be token-wise.
    """
    if energy is None:
        return feature_map(x, None, True), None
    energy = energy + exactly(x).square().sum(dim=-1, keepdim=True)
    return (x * inverse_norm(energy)).to(x.dtype), energy


def empty_memory(kernel: Kernel, like: Tensor) -> Memory:
    """The memory before the first token; ``like`` (B, h, N, p) says sizes, precision and device."""
    if not isinstance(kernel, FeatureKernel):
        nothing = like.new_zeros(*like.shape[:2], 0, like.size(3))
        return KeyValueCache(nothing, nothing)
    num_features = kernel.feature_map(like.new_zeros(1, like.size(1), 1, like.size(3)), None, True).size(-1)
    dtype = accumulation_dtype(like.dtype)
    total = like.new_zeros(*like.shape[:2], num_features, like.size(3) + kernel.normalize, dtype=dtype)
    energy = energy_before(kernel.feature_map, like)
    return RunningSum(total, energy, energy)


def read_memory(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> Memory:
    """The memory after a prompt.

    Args:
        kernel: what weighs the values.
        q: queries, (B, h, N, p).
        k: keys, (B, h, N, p), row i the open block at token i.
        v: values likewise, (B, h, N, p_v).
        lengths: real tokens of each sequence, (B,), the first of its N.
        factor: f.
    """
    if not isinstance(kernel, FeatureKernel):
        # A sequence's rows past its completed blocks are written again before it sees them.
        return KeyValueCache(*(x[:, :, factor - 1 :: factor].contiguous() for x in (k, v)))
    _, phi_k, v = _features(kernel, q, k, v)
    done = _before(lengths // factor, phi_k.size(2) // factor)
    phi_k, v = (exactly(x[:, :, factor - 1 :: factor]) for x in (phi_k, v))
    total = phi_k.masked_fill(~done, 0.0).mT @ v
    if kernel.feature_map is not frobenius:
        return RunningSum(total, None, None)
    real = _before(lengths, k.size(2))
    q_energy, k_energy = (
        exactly(x).square().masked_fill(~real, 0.0).sum(dim=(-2, -1), keepdim=True) for x in (q, k)
    )
    return RunningSum(total, q_energy, k_energy)


def attention_step(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, memory: Memory, position: Position, factor: int = 1
) -> tuple[Tensor, Memory]:
    """One token's attention, (B, h, 1, p_v), and the memory with it; q, k, v (B, h, 1, p or p_v)."""
    if isinstance(memory, KeyValueCache):
        pattern = kernel if isinstance(kernel, SparsePattern) else None
        return _softmax_step(pattern, q, k, v, memory, position, factor)
    assert isinstance(kernel, FeatureKernel)
    if memory.k_energy is None:
        phi_q, phi_k, v = _features(kernel, q, k, v)
        q_energy, k_energy = None, None
    else:
        phi_q, q_energy = features_of(kernel.feature_map, q, memory.q_energy)
        phi_k, k_energy = features_of(kernel.feature_map, k, memory.k_energy)
        v = _with_ones(v) if kernel.normalize else v
    total = memory.total + exactly(phi_k).mT @ exactly(v)
    out = (exactly(phi_q) @ total).to(q.dtype)
    if kernel.normalize:
        out = divide(out[..., :-1], out[..., -1:])
    return out, RunningSum(choose(position.completes(factor), total, memory.total), q_energy, k_energy)


def _softmax_step(
    pattern: SparsePattern | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KeyValueCache,
    position: Position,
    factor: int,
) -> tuple[Tensor, KeyValueCache]:
    row, end = position.block(factor), position.longest // factor + 1
    cache = cache.append(row, end, k, v)
    keys, values = cache.keys[:, :, :end], cache.values[:, :, :end]
    token = position.tokens
    seen = None
    if isinstance(token, int):
        if pattern is not None:
            query = torch.full((1,), token, device=q.device)
            reached = positions_seen(pattern, query, end, factor=factor)[0].nonzero()[:, 0]
            keys, values = keys.index_select(2, reached), values.index_select(2, reached)
    else:
        seen = torch.arange(end, device=token.device) <= (token // factor)[:, None]
        if pattern is not None:
            seen = seen & positions_seen(pattern, token, end, factor=factor)
        seen = seen[:, None, None]
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen), cache


def _features(kernel: FeatureKernel, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k), and v with a column of ones where the weights are to be summed."""
    phi, normalize = kernel
    if normalize and isinstance(phi, SoftmaxPlusFeatures):
        phi_q, phi_k = phi.normalized_pair(q, k, None, True)
    else:
        phi_q, phi_k = phi(q, None, True), phi(k, None, True)
    return phi_q, phi_k, _with_ones(v) if normalize else v


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def _before(lengths: Tensor, size: int) -> Tensor:
    """Which of ``size`` rows come before ``lengths`` (B,): (B, 1, size, 1) bool."""
    return torch.arange(size, device=lengths.device)[:, None] < per_sequence(lengths)


def empty_moments(like: Tensor) -> Moments:
    """The moments of no keys; ``like`` (B, h, N, p) says sizes, precision and device."""
    zeros = like.new_zeros(*like.shape[:2], 1, like.size(3), dtype=accumulation_dtype(like.dtype))
    return Moments(like.new_zeros(zeros.shape), zeros, zeros)


def read_moments(k: Tensor, lengths: Tensor, factor: int = 1) -> Moments:
    """The moments after a prompt: k (B, h, N, p), row i the open block at token i; lengths (B,)."""
    first = k[:, :, :1]
    blocks = exactly((k - first)[:, :, factor - 1 :: factor])
    done = _before(lengths // factor, blocks.size(2))
    count = done.sum(dim=2, keepdim=True).clamp_min(1)
    mean = blocks.masked_fill(~done, 0.0).sum(dim=2, keepdim=True) / count
    squares = (blocks - mean).masked_fill(~done, 0.0).square().sum(dim=2, keepdim=True)
    return Moments(first, mean, squares)


def recentre_step(
    q: Tensor,
    k: Tensor,
    moments: Moments,
    position: Position,
    *,
    beta: float | Tensor,
    normalize: bool,
    eps: float,
    factor: int = 1,
) -> tuple[Tensor, Tensor, Moments]:
    """Attention-BN's query and key of one token, with the statistics of its prefix, and the moments with it.

    See :func:`kernel_attention.functional.recentre`, whose causal form this is: the statistics go to the
    query alone, so that the keys of the cache stay as they are. Welford's recurrence adds the new key.
    """
    first = choose(position.tokens == 0, k, moments.first)
    shifted = exactly(k - first)
    count = scale_by(position.block(factor), shifted)
    change = shifted - moments.mean
    mean = moments.mean + change / (count + 1)
    squares = moments.squares + change.square() * (count / (count + 1))
    complete = position.completes(factor)
    after = Moments(first, choose(complete, mean, moments.mean), choose(complete, squares, moments.squares))
    query = q - beta * (mean + first)
    if not normalize:
        return query.to(q.dtype), k, after
    return (query / (squares / (count + 1) + eps)).to(q.dtype), k - first, after
