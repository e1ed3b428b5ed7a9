"""The delta rule over a sequence, by blocks, in the WY form of products of Householder-like matrices.

    W_i = alpha_i W_{i-1} + beta_i k_i (v_i - alpha_i W_{i-1}^T k_i)^T

In a block that starts from W_0, with c_i = log alpha_1 + .. + log alpha_i, every state is a sum of outer
products, W_i = e^{c_i} W_0 + sum_{j <= i} e^{c_i - c_j} k_j u_j^T, whose u solve a triangular system:

    (I + tril_(beta_i e^{c_i - c_j} k_i . k_j)) U = beta (V - e^c K W_0)    (tril_: j < i)

All systems are solved at once, for V and for e^c K; only the map from W_0 to the block's last state is
applied block after block. Decays are differences of logarithms, never quotients of products.

Legend: B batch, h heads, N tokens, n blocks, C tokens of a block, p head width, p_v width of a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.padding import in_blocks
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_operator,
    only_formulas,
)

_BLOCK = 32


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
    """The states that the delta rule goes through, in O(N p (C + p)) time.

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
    before, last = _states(kept - until.mT @ of_state, until.mT @ new)
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


def _states(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """W_{b+1} = T_b W_b + X_b from W_0 = 0: the state before every block, and the last one."""
    if only_formulas() or needs_operator(maps):
        return _recursion(maps, steps)
    found: tuple[Tensor, Tensor] = _Recursion.apply(maps, steps)
    return found


def _recursion(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    state, states = torch.zeros_like(steps[:, :, 0]), []
    for of_state, step in zip(maps.unbind(dim=2), steps.unbind(dim=2), strict=True):
        states.append(state)
        state = step + of_state @ state
    return torch.stack(states, dim=2), state


class _Recursion(torch.autograd.Function):
    """``_recursion``, whose backward pass is the same backwards."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        states, last = _recursion(maps, steps)
        ctx.save_for_backward(maps, steps, states)
        return states, last

    @staticmethod
    def backward(ctx: Any, dstates: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        maps, steps, states = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((maps, steps), needed)
            return tuple(differentiable_gradients(_recursion(*leaves), leaves, needed, [dstates, dlast]))
        # dX_b = dW_{b+1},  dW_b = (what reads W_b) + T_b^T dW_{b+1},  dT_b = dW_{b+1} W_b^T
        dsteps, later = [], dlast
        for of_state, direct in zip(
            reversed(maps.unbind(dim=2)), reversed(dstates.unbind(dim=2)), strict=True
        ):
            dsteps.append(later)
            later = direct + of_state.mT @ later
        dstep = torch.stack(dsteps[::-1], dim=2)
        return dstep @ states.mT, dstep
