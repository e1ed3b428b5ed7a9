"""Linear attention: a kernel with explicit features, which sums keys and values before it reads a query.

Source: Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs", ICML 2020; Nguyen et al., "A
Primal-Dual Framework for Transformers and Neural Networks", ICLR 2023 (section 2.2.1, eq. 11).

Legend: B batch, h heads, N tokens, p head width, m features.
"""

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.tensors.affine import product_dtype, wide
from kernel_attention.tensors.blocks import by_offset, completed, for_each_offset, from_offset
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, elu, features_in_range
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures
from kernel_attention.tensors.padding import in_blocks, is_exporting, zero_padding
from kernel_attention.tensors.statistics import accumulation_dtype, divide, exactly, without_autocast


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap = elu,
    normalize: bool = True,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    factor: int = 1,
    group: SequenceGroup | None = None,
) -> Tensor:
    """sum_j (phi(q_i) . phi(k_j)) v_j, divided by sum_j phi(q_i) . phi(k_j) with ``normalize``.

    It takes O(N m p) time and O(N (m + p)) memory. The causal form works chunk by chunk within these bounds.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        feature_map: phi, from ``kernel_attention.features``.
        normalize: needs a phi whose kernel is never negative. A query whose weights sum to zero gets zeros.
        attention_mask: (B, S), True = real token.
        query_mask: (B, N), for the feature maps that normalise over the sequence.
        is_causal: query i sees keys 0..i only.
        factor: with ``is_causal``, row i of k and v is the open block of ``factor`` tokens pooled up to token
            i; query i sees the completed blocks and row i (see ``kernel_attention.tensors.blocks``).
        group: processes that hold the parts of every sequence, with ``factor`` 1 and a feature map that works
            token by token; the arguments are this part's.

    Returns:
        (B, h, N, p_v), in the precision of products with v. In the place of float16 everything in between is
        in float32: a few hundred keys of unit size already sum to more than float16 holds.
    """
    if normalize and isinstance(feature_map, SoftmaxPlusFeatures):
        phi_q, phi_k = feature_map.normalized_pair(wide(q), wide(k), attention_mask, is_causal)
    else:
        phi_q = features_in_range(feature_map, q, query_mask, is_causal)
        phi_k = features_in_range(feature_map, k, attention_mask, is_causal)
    dtype = product_dtype(v)
    phi_q, phi_k, v = wide(phi_q), wide(zero_padding(phi_k, attention_mask)), wide(v)
    with without_autocast(v):
        return _by_features(phi_q, phi_k, v, normalize, is_causal, factor, group).to(dtype)


def _by_features(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, normalize: bool, is_causal: bool, factor: int,
    group: SequenceGroup | None,
) -> Tensor:  # fmt: skip
    """``linear_attention`` of features, which are zero for padded keys, in their precision."""
    if group is not None:
        return _over_ranks(phi_q, phi_k, v, group, normalize, is_causal)
    if not is_causal:
        out = phi_q @ _state(phi_k, v)
        if not normalize:
            return out
        weights = phi_k.sum(dim=2, keepdim=True, dtype=accumulation_dtype(phi_k.dtype))
        return divide(out, (phi_q * weights).sum(dim=-1, keepdim=True))
    if normalize:  # numerator and denominator come from the same rounded weights
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    out = causal_product(phi_q, phi_k, v) if factor == 1 else _over_blocks(phi_q, phi_k, v, factor)
    return divide(out[..., :-1], out[..., -1:]) if normalize else out


def _state(phi_k: Tensor, v: Tensor) -> Tensor:
    """sum_j phi_k_j v_j^T, (B, h, m, p_v)."""
    if phi_k.size(1) == 1:  # as matrices of B: torch.export asks whether the number of keys divides one head
        return (phi_k[:, 0].mT @ v[:, 0]).unsqueeze(1)
    return phi_k.mT @ v


def causal_product(phi_q: Tensor, phi_k: Tensor, v: Tensor, chunk_size: int | None = None) -> Tensor:
    """sum_{j <= i} (phi_q_i . phi_k_j) v_j in O(N) time and memory.

    The features are (B, h, N, m), the values (B, h, N, p_v). The running state, the sum of phi_k_j v_j^T,
    accumulates in float32 for 16-bit inputs.
    """
    length = phi_q.size(2)
    if chunk_size is None:
        chunk_size = max(
            128, phi_q.size(3)
        )  # a state per chunk is m x p_v numbers, no more than the chunk's tokens have
    if not is_exporting():  # an exported program serves all lengths
        chunk_size = min(chunk_size, length)
    phi_q, phi_k, v = (in_blocks(x, chunk_size) for x in (phi_q, phi_k, v))
    inside = (phi_q @ phi_k.mT).tril() @ v
    # A chunk starts from the sum over the chunks before it.
    states = phi_k.mT @ v
    states = states.cumsum(dim=2, dtype=accumulation_dtype(states.dtype)).to(states.dtype)
    earlier = torch.nn.functional.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
    return (inside + phi_q @ earlier).flatten(2, 3)[:, :, :length]


def _over_ranks(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, group: SequenceGroup, normalize: bool, is_causal: bool
) -> Tensor:
    """Linear attention over ranks that each hold a part of the sums over the keys, (B, h, m, p_v + 1)."""
    if normalize:
        v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    state = exactly(phi_k).mT @ exactly(v)
    state = (group.before(state) if is_causal else group.total(state)).to(phi_q.dtype)
    out = phi_q @ state
    if is_causal:
        out = out + causal_product(phi_q, phi_k, v)
    return divide(out[..., :-1], out[..., -1:]) if normalize else out


def _over_blocks(phi_q: Tensor, phi_k: Tensor, v: Tensor, factor: int) -> Tensor:
    """The causal sum over the completed blocks and the open block."""
    length = phi_q.size(2)
    # Row b is block b - 1, so causality excludes a token's own block.
    done_k, done_v = (
        for_each_offset(torch.nn.functional.pad(completed(x, factor, length), (0, 0, 1, 0)), factor)
        for x in (phi_k, v)
    )
    out = from_offset(causal_product(by_offset(phi_q, factor), done_k, done_v), phi_q.size(1), length)
    return out + (phi_q * phi_k).sum(dim=-1, keepdim=True) * v


def cosine_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """phi(q) phi(k)^T v with phi(x) = x / ||x||, the extra baseline of the released Primal-Attention code.

    Shapes are as in ``linear_attention``. Time and memory are linear in the sequence: the right product is
    computed first, and the causal form carries the p x p_v state from chunk to chunk.
    """
    return linear_attention(
        q, k, zero_padding(v, attention_mask), feature_map=cosine, normalize=False,
        attention_mask=attention_mask, is_causal=is_causal,
    )  # fmt: skip
