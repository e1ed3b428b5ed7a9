"""Regression attention: queries read a map that was fitted to the pairs of keys and values.

Softmax attention is a local mean of the values (Nadaraya-Watson), linear attention one Hebbian step. Here the
map is the least-squares one with a penalty on its size: kernel ridge regression, which is a least-squares
support vector machine without bias. The delta rule takes one gradient step on each pair instead. Wang et al.
2025 ("Test-time regression") give the view; the causal form of ridge regression by blocks is derived here.

Legend: B batch, h heads, N queries, S keys, p head width, m features, p_v width of a value.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.regression.prefixes import PairSums, least_ridge, prefix_ridge, trace_of
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine
from kernel_attention.tensors.padding import in_blocks, zero_padding
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    only_formulas,
)
from kernel_attention.tensors.statistics import exactly, without_autocast

_BLOCK = 64


class DeltaStates(NamedTuple):
    """Of every block: the state before it (B, h, n, p, p_v), and its u (B, h, n, C, p_v) and decays.

    ``fade`` is e^{c_i - c_j} for j <= i, 0 elsewhere, (B, h, n, C, C), and ``since`` is e^{c_i},
    (B, h, n, C, 1); None where nothing decays. ``last`` is the state after the sequence, (B, h, p, p_v).
    """

    before: Tensor
    updates: Tensor
    fade: Tensor | None
    since: Tensor | None
    last: Tensor


def delta_states(
    k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None, size: int | None = None
) -> DeltaStates:
    """The states that the delta rule goes through, in O(N p (C + p)) time, by products of Householder-like
    matrices (WY).

        W_i = alpha_i W_{i-1} + beta_i k_i (v_i - alpha_i W_{i-1}^T k_i)^T

    In a block of C tokens that starts from W_0, with c_i = log alpha_1 + .. + log alpha_i, every state is a
    sum of outer products, W_i = e^{c_i} W_0 + sum_{j <= i} e^{c_i - c_j} k_j u_j^T, whose u solve a
    triangular system:

        (I + tril_(beta_i e^{c_i - c_j} k_i . k_j)) U = beta (V - e^c K W_0)    (tril_: j < i)

    All systems are solved at once, for V and for e^c K; only the map from W_0 to the block's last state is
    applied block after block. Decays are differences of logarithms, never quotients of products.

    Args:
        k: keys, (B, h, N, p), of length 1 at most, in float32 or float64 like the other tensors.
        v: values, (B, h, N, p_v).
        beta: steps from 0 to 1, (B, h, N).
        log_decay: log alpha, (B, h, N), at most 0; None: alpha is 1.
        size: C; None: as was measured to be fast.
    """
    size = block_size(k.size(2), size)
    k, v, beta = in_blocks(k, size), in_blocks(v, size), in_blocks(beta[..., None], size)
    gram = (k * beta) @ k.mT
    fade = since = None
    until = k
    if log_decay is not None:
        total = in_blocks(log_decay[..., None], size).cumsum(dim=-2)
        fade = (total - total.mT).masked_fill(future(total), -torch.inf).exp()
        since, until = total.exp(), k * (total[..., -1:, :] - total).exp()
        gram = gram * fade
    both = torch.cat([v, k if since is None else k * since], dim=-1) * beta
    # The diagonal, taken for 1, is not read.
    both = torch.linalg.solve_triangular(gram, both, upper=False, unitriangular=True)
    new, of_state = both.split([v.size(-1), k.size(-1)], dim=-1)
    identity = torch.eye(k.size(-1), device=k.device, dtype=k.dtype)
    kept = identity if since is None else since[..., -1:, :] * identity
    before, last = recursion(kept - until.mT @ of_state, until.mT @ new)
    return DeltaStates(before, new - of_state @ before, fade, since, last)


def read_states(q: Tensor, k: Tensor, states: DeltaStates, size: int | None = None) -> Tensor:
    """q_i^T W_i, (B, h, N, p_v): every query (B, h, N, p) reads the state with its own token in it."""
    size = block_size(k.size(2), size)
    length = q.size(2)
    q, k = in_blocks(q, size), in_blocks(k, size)
    weights = q @ k.mT
    weights = weights.tril() if states.fade is None else weights * states.fade
    if states.since is not None:
        q = q * states.since
    return (q @ states.before + weights @ states.updates).flatten(2, 3)[:, :, :length]


def future(by_token: Tensor) -> Tensor:
    """True where the column comes after the row, (C, C), for by_token (.., C, 1)."""
    place = torch.arange(by_token.size(-2), device=by_token.device)
    return place > place[:, None]


def block_size(length: int, size: int | None) -> int:
    """C: at most the length, unless a compiler counts the blocks."""
    size = _BLOCK if size is None else size
    return size if torch.compiler.is_compiling() else min(size, length)


# W_{b+1} = T_b W_b + X_b from W_0 = 0, one step after another or, on accelerators, in groups of steps.
#
# A launch takes longer than such a step. So the maps of a group of steps are multiplied out, in all groups at
# once; the groups' ends follow by the same recursion, and every state by one product from the start of its
# group: three times the operations, in launches that grow with log n.

_GROUP = 8


def recursion(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The state before every step, (B, h, n, p, p_v), and the last one, (B, h, p, p_v).

    Args:
        maps: T_b, (B, h, n, p, p).
        steps: X_b, (B, h, n, p, p_v).
    """
    if only_formulas() or type(maps) is not Tensor or torch.compiler.is_compiling():
        return _formula(maps, steps)
    found: tuple[Tensor, Tensor] = _Recursion.apply(maps, steps)
    return found


def _formula(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    state, states = torch.zeros_like(steps[:, :, 0]), []
    for of_state, step in zip(maps.unbind(dim=2), steps.unbind(dim=2), strict=True):
        states.append(state)
        state = step + of_state @ state
    return torch.stack(states, dim=2), state


class _Recursion(torch.autograd.Function):
    """Its backward pass is the same backwards: dX_b = dW_{b+1}, dW_b = (what reads W_b) + T_b^T dW_{b+1}."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        order = None
        if has_groups(maps):
            after = by_groups(maps.flatten(0, 1), steps.flatten(0, 1)).view_as(steps)
            states, last = _shifted(after), after[:, :, -1]
            order = _backwards(maps)
        else:
            states, last = _formula(maps, steps)
        ctx.save_for_backward(maps, steps, states, order)
        return states, last

    @staticmethod
    def backward(ctx: Any, dstates: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        maps, steps, states, order = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((maps, steps), needed)
            return tuple(differentiable_gradients(_formula(*leaves), leaves, needed, [dstates, dlast]))
        reads = dlast[:, :, None], dstates[:, :, 1:]
        if order is None:
            dsteps = [dlast]
            for of_state, direct in zip(
                reversed(maps.unbind(dim=2)[1:]), reversed(reads[1].unbind(dim=2)), strict=True
            ):
                dsteps.append(direct + of_state.mT @ dsteps[-1])
            dstep = torch.stack(dsteps[::-1], dim=2)
        else:
            # From the last step to the first. The first map meets the start, 0.
            back = torch.cat(reads, dim=2).flatten(0, 1).index_select(1, order)
            dstep = by_groups(maps.flatten(0, 1).index_select(1, order).mT, back).view_as(steps).flip(2)
        return dstep @ states.mT, dstep


def has_groups(maps: Tensor) -> bool:
    """True where launches cost more than operations."""
    return maps.device.type != "cpu"


def _backwards(maps: Tensor) -> Tensor:
    """0, then the steps from the last one to the second."""
    count = maps.size(2)
    return kept_constant(("backwards", count), maps, lambda: -torch.arange(count, device=maps.device) % count)


def by_groups(maps: Tensor, steps: Tensor) -> Tensor:
    """The state after every step, (R, n, p, p_v), of recursions (R, n, p, p) and (R, n, p, p_v)."""
    rows, count, size, width = steps.shape
    if count <= _GROUP:
        after = torch.empty_like(steps)
        after[:, 0] = steps[:, 0]
        for b in range(1, count):
            torch.baddbmm(steps[:, b], maps[:, b], after[:, b - 1], out=after[:, b])
        return after
    rest = -count % _GROUP
    if rest:
        maps, steps = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)) for x in (maps, steps))
    maps, steps = (x.unflatten(1, (-1, _GROUP)).flatten(0, 1) for x in (maps, steps))  # (R m, G, ..)
    # Row b of a group: T_b .. T_0 and the state after b from a start of 0, side by side.
    added, met = steps.new_zeros(2, *steps.shape[:3], size + width)
    met[:, 0, :, :size] = maps[:, 0]
    added[..., size:] = steps
    met[:, 0, :, size:] = steps[:, 0]
    for b in range(1, _GROUP):
        torch.baddbmm(added[:, b], maps[:, b], met[:, b - 1], out=met[:, b])
    ends = met[:, -1].unflatten(0, (rows, -1)).split([size, width], dim=-1)
    starts = _shifted(by_groups(*ends)).flatten(0, 1)
    # met[..., size:] + met[..., :size] @ starts
    products, own = met.flatten(1, 2).split([size, width], dim=-1)
    after = torch.baddbmm(own, products, starts)
    return after.view(rows, -1, size, width)[:, :count]


def _shifted(after: Tensor) -> Tensor:
    """The state before every step, from those after it, (.., n, p, p_v)."""
    return torch.nn.functional.pad(after[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


_TERMS = 64  # of a sum in float32


def ridge_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor | float = 1.0,
    *,
    feature_map: FeatureMap = cosine,
    forgetting: Tensor | None = None,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    group: SequenceGroup | None = None,
) -> Tensor:
    """phi(q_i)^T (sum_j phi(k_j) phi(k_j)^T + lambda I)^-1 sum_j phi(k_j) v_j^T: ridge regression.

    It takes O(N m (m + p_v)) time and O(N m) memory, causal or not.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        lam: lambda, a number or (h,), positive. One that rounding would hide beside the sum is raised to what
            it does not hide: 1e-6 of the sum's trace in float32.
        feature_map: phi, from ``kernel_attention.features``; by default rows of unit length.
        forgetting: gamma, (h,), from 0.9 to 1: a pair counts gamma times less with each later one, and so
            does lambda, as in recursive least squares. The real keys come first then.
        attention_mask: (B, S), True = real token.
        query_mask: (B, N), for the feature maps that normalise over the sequence.
        is_causal: query i sees keys 0..i only.
        group: processes that hold the parts of every sequence, with a feature map that works token by token
            and without forgetting; the arguments are this part's.

    Returns:
        (B, h, N, p_v), in the precision of products with v. Everything in between is in float32 or better.
        A query that sees no key gets zeros.
    """
    dtype = product_dtype(v)
    with without_autocast(v):
        phi_q = feature_map(exactly(q), query_mask, is_causal)
        phi_k = zero_padding(feature_map(exactly(k), attention_mask, is_causal), attention_mask)
        v = zero_padding(exactly(v), attention_mask)
        ridge = torch.as_tensor(lam, dtype=phi_k.dtype, device=phi_k.device).expand(phi_k.size(1))
        forgetting = None if forgetting is None else forgetting.to(phi_k.dtype)
        if is_causal:
            before = None if group is None else PairSums(*(group.before(x) for x in sums_of(phi_k, v)))
            return prefix_ridge(phi_q, phi_k, v, ridge, forgetting=forgetting, before=before).to(dtype)
        if forgetting is not None:
            num_keys = _num_keys(phi_k, attention_mask)
            phi_k, v = faded(phi_k, v, forgetting, num_keys)
            ridge = ridge * forgetting.pow(num_keys)
        sums = sums_of(phi_k, v)
        if group is not None:
            sums = PairSums(*(group.total(x) for x in sums))
        return (phi_q @ ridge_map(sums, ridge)).to(dtype)


def sums_of(phi_k: Tensor, v: Tensor) -> PairSums:
    """The sums of phi(k_j) phi(k_j)^T and of phi(k_j) v_j^T."""
    keys = in_blocks(phi_k, _TERMS)
    # Equal terms round alike, and lambda may be far smaller than their sum.
    gram, target = (
        (keys.mT @ x).sum(dim=2, dtype=torch.float64).to(v.dtype) for x in (keys, in_blocks(v, _TERMS))
    )
    return PairSums(gram, target)


def ridge_map(sums: PairSums, ridge: Tensor) -> Tensor:
    """W = (gram + lambda I)^-1 target, (B, h, m, p_v); ``ridge`` is lambda, (h,) or (B, h)."""
    identity = torch.eye(sums.gram.size(-1), device=sums.gram.device, dtype=sums.gram.dtype)
    ridge = least_ridge(ridge[..., None, None], trace_of(sums.gram))
    factor, _ = torch.linalg.cholesky_ex(sums.gram + ridge * identity)
    return torch.cholesky_solve(sums.target, factor)


def faded(phi_k: Tensor, v: Tensor, forgetting: Tensor, num_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values scaled so that pair j of n counts gamma^(n - 1 - j); ``num_keys`` is n, (B or 1, 1)."""
    age = (num_keys[..., None] - 1 - torch.arange(phi_k.size(2), device=phi_k.device)).clamp_min(0)
    root = (age.to(phi_k.dtype) * (forgetting.log() / 2)[:, None]).exp()[..., None]
    return phi_k * root, v * root


def _num_keys(phi_k: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The real keys of every sequence, (B or 1, 1)."""
    if attention_mask is None:
        return torch.full((1, 1), phi_k.size(2), device=phi_k.device)
    return attention_mask.sum(dim=1, keepdim=True)


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    log_decay: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """q_i^T W, W the memory that the delta rule writes: each pair replaces a part of what its key recalls.

    W_j = alpha_j W_{j-1} + beta_j k_j (v_j - alpha_j W_{j-1}^T k_j)^T with queries and keys of unit length:
    one step of least mean squares on the newest pair (Widrow and Hoff 1960; Schlag et al. 2021; with the
    decay alpha Yang et al. 2025). It takes O(N p (p + p_v)) time and O(N (p + p_v)) memory.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p), in the order in which they are written.
        v: values, (B, h, S, p_v).
        step: beta, (B, h, S), from 0 to 1. The map of one step is then no longer than 1.
        log_decay: log alpha, (B, h, S), at most 0; None: alpha is 1.
        attention_mask: (B, S), True = real token; the others write nothing.
        is_causal: query i reads the memory with pair i in it, W_i; otherwise all read the last one, which is
            what the last token reads in the causal form.

    Returns:
        (B, h, N, p_v), in the precision of products with v. Everything in between is in float32 or better.
        A query that sees no key gets zeros.
    """
    dtype = product_dtype(v)
    with without_autocast(v):
        q, k = cosine(exactly(q)), cosine(zero_padding(exactly(k), attention_mask))
        v = zero_padding(exactly(v), attention_mask)
        step = exactly(step)
        if log_decay is not None:
            log_decay = exactly(log_decay)
            if attention_mask is not None:
                log_decay = log_decay.masked_fill(~attention_mask[:, None], 0.0)
        states = delta_states(k, v, step, log_decay)
        return (read_states(q, k, states) if is_causal else q @ states.last).to(dtype)
