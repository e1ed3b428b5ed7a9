"""Ridge regression on every prefix of a sequence, exactly, by blocks.

A block of C tokens starts from the sums over the tokens before it, A = lambda I + sum phi phi^T = L L^T and
H = sum phi v^T. With the features whitened, K~ = K L^-T and Q~ = Q L^-T, and H~ = L^-1 H,

    G G^T = I + K~ K~^T,    Y = G^-1 K~,    Z = G^-1 (V - K~ H~),    O = Q~ H~ + tril(Q~ Y^T) Z.

The leading i x i block of G factors the prefix of i tokens, so that one factorisation serves all prefixes of
a block; all blocks are computed at once. With a forgetting factor gamma the noise of token i of a block is
gamma^i in the place of 1.

Legend: B batch, h heads, n blocks, C tokens of a block, m features, p_v width of a value.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.padding import in_blocks, is_exporting
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_operator,
    only_formulas,
)
from kernel_attention.tensors.statistics import smallest

_GROUP = 64  # blocks whose decayed sums one product makes
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 128  # rounding grows where a block has more tokens than features
_FADING_BLOCK = 16  # rounding grows with gamma^-C


class PairSums(NamedTuple):
    """Sums over pairs of keys and values: phi phi^T, (B, h, m, m), and phi v^T, (B, h, m, p_v)."""

    gram: Tensor
    target: Tensor


def prefix_ridge(
    phi_q: Tensor,
    phi_k: Tensor,
    v: Tensor,
    ridge: Tensor,
    *,
    forgetting: Tensor | None = None,
    before: PairSums | None = None,
    size: int | None = None,
) -> Tensor:
    """phi_q_i^T (lambda I + sum_{j <= i} phi_k_j phi_k_j^T)^-1 sum_{j <= i} phi_k_j v_j^T, (B, h, N, p_v).

    It takes O(N m (C + m)) time and O(N (m + C)) memory, m up to C.

    Args:
        phi_q: features of the queries, (B, h, N, m), in float32 or float64 like the other tensors.
        phi_k: features of the keys, (B, h, N, m).
        v: values, (B, h, N, p_v).
        ridge: lambda, (h,).
        forgetting: gamma, (h,): pair j counts gamma^(i - j) at token i, lambda gamma^(i + 1). It must not be
            so small that gamma^C underflows.
        before: the sums over tokens ahead of these, without forgetting.
        size: C; None: as was measured to be fast.
    """
    if size is None:
        size = min(max(phi_k.size(3), _SMALLEST_BLOCK), _LARGEST_BLOCK)
        size = size if forgetting is None else _FADING_BLOCK
    if not is_exporting():  # an exported program serves all lengths
        size = min(size, phi_k.size(2))
    gram, target = (None, None) if before is None else before
    inputs = _Inputs(phi_q, phi_k, v, ridge, forgetting, gram, target)
    if only_formulas() or needs_operator(phi_q):
        return _forward(inputs, size)[0]
    out: Tensor = _PrefixRidge.apply(size, *inputs)
    return out


def least_ridge(ridge: Tensor, trace: Tensor) -> Tensor:
    """lambda, raised to what rounding hides in sums of this trace: a smaller one could leave no pivot.

    The gradient is that of lambda.
    """
    # Sums that nothing was added to for long fade to zero.
    least = (8 * torch.finfo(trace.dtype).eps * trace).clamp_min(smallest(trace.dtype))
    return ridge + (least - ridge).relu().detach()


def trace_of(matrix: Tensor) -> Tensor:
    """The sum of the diagonal, (.., m, m) -> (.., 1, 1)."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)[..., None, None]


def _sums_before(blocks: Tensor, log_decay: Tensor | None) -> Tensor:
    """The sum over the blocks before each, (B, h, n, ., .); each block decays it by ``log_decay`` (h,)."""
    if log_decay is not None:
        return _decayed_sums(blocks, log_decay)
    # Equal terms round alike, and lambda may be far smaller than their sum.
    sums = blocks[:, :, :-1].cumsum(dim=2, dtype=torch.float64).to(blocks.dtype)
    return torch.nn.functional.pad(sums, (0, 0, 0, 0, 1, 0))


def _sums_after(blocks: Tensor, log_decay: Tensor | None) -> Tensor:
    """The sum over the blocks after each."""
    return _sums_before(blocks.flip(2), log_decay).flip(2)


def _decayed_sums(blocks: Tensor, log_decay: Tensor) -> Tensor:
    """sum_{a < b} exp((b - 1 - a) log_decay) blocks_a in O(n), by groups of blocks and within them."""
    grouped = in_blocks(blocks.flatten(3), _GROUP)  # (B, h, groups, 64, .)
    before = _decay_before(_GROUP, log_decay, blocks.device)
    place = torch.arange(_GROUP, device=blocks.device, dtype=blocks.dtype)
    ends = ((_GROUP - 1 - place) * log_decay[:, None]).exp()[:, None, None, :]
    totals = (ends @ grouped).squeeze(3)
    carried = _decay_before(totals.size(2), _GROUP * log_decay, blocks.device) @ totals
    fade = (place[:, None] * log_decay[:, None, None, None]).exp()
    found = before[:, None] @ grouped + fade * carried[:, :, :, None]
    return found.flatten(2, 3)[:, :, : blocks.size(2)].unflatten(3, blocks.shape[3:])


def _decay_before(count: int, log_decay: Tensor, device: torch.device) -> Tensor:
    """exp((b - 1 - a) log_decay) for a < b, 0 elsewhere: (h, count, count)."""
    place = torch.arange(count, device=device, dtype=log_decay.dtype)
    steps = place[:, None] - 1 - place
    return (steps.clamp_min(0.0) * log_decay[:, None, None]).exp().masked_fill(steps < 0, 0.0)


class _Inputs(NamedTuple):
    """The tensors of a call."""

    phi_q: Tensor
    phi_k: Tensor
    v: Tensor
    ridge: Tensor
    forgetting: Tensor | None
    gram: Tensor | None
    target: Tensor | None


class _Passed(NamedTuple):
    """Tensors that the backward pass reads: the blocks' whitened queries, Y, Z and tril(Q~ Y^T).

    All are (B, h, n, C, .), but ``whiten`` L^-1 (B, h, n, m, m) and ``target`` H~ (B, h, n, m, p_v).
    """

    whiten: Tensor
    target: Tensor
    queries: Tensor
    innovations: Tensor
    residuals: Tensor
    weights: Tensor


def _forward(inputs: _Inputs, size: int) -> tuple[Tensor, _Passed]:
    phi_q, phi_k, v, ridge, forgetting, gram_before, target_before = inputs
    length = phi_q.size(2)
    q, k, v = (in_blocks(x, size) for x in (phi_q, phi_k, v))
    ridge = ridge[:, None, None, None]
    if forgetting is None:
        recent, noise, log_decay = k, torch.ones_like(k[..., :1]), None
    else:
        log_decay = forgetting.log()
        place = torch.arange(1, size + 1, device=k.device, dtype=k.dtype)[:, None]
        by_head = log_decay[:, None, None, None]
        noise = (place * by_head).exp()
        recent = k * ((size - place) * by_head).exp()
        block = torch.arange(k.size(2), device=k.device, dtype=k.dtype)[:, None, None]
        ridge = ridge * (block * size * by_head).exp()
        log_decay = log_decay * size
    gram, target = (_sums_before(recent.mT @ x, log_decay) for x in (k, v))
    if gram_before is not None and target_before is not None:
        gram, target = gram + gram_before[:, :, None], target + target_before[:, :, None]
    identity = torch.eye(k.size(-1), device=k.device, dtype=k.dtype)
    # The block's first key stands for all, which a token must not see.
    energy = trace_of(gram) + size * k[..., :1, :].square().sum(dim=-1, keepdim=True)
    factor, _ = torch.linalg.cholesky_ex(gram + least_ridge(ridge, energy) * identity)
    whiten = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
    target, keys, queries = whiten @ target, k @ whiten.mT, q @ whiten.mT
    products = keys @ keys.mT
    # A pair's noise is raised where rounding of the pairs so far would hide it.
    energy = products.diagonal(dim1=-2, dim2=-1)[..., None].cumsum(dim=-2)
    products = products + torch.diag_embed(least_ridge(noise, energy)[..., 0])
    factor, _ = torch.linalg.cholesky_ex(products)
    both = torch.cat([keys, v - keys @ target], dim=-1)
    both = torch.linalg.solve_triangular(factor, both, upper=False)
    innovations, residuals = both.split([k.size(-1), v.size(-1)], dim=-1)
    weights = (queries @ innovations.mT).tril()
    out = (queries @ target + weights @ residuals).flatten(2, 3)[:, :, :length]
    return out, _Passed(whiten, target, queries, innovations, residuals, weights)


class _PrefixRidge(torch.autograd.Function):
    """``_forward`` with a backward pass of products alone.

    With A_i the sums of prefix i, W_i = A_i^-1 H_i and dO the gradient of the output, dq_i = W_i do_i, and
    with x_i = A_i^-1 q_i the rest is that of linear attention:

        dv_j = sum_{i >= j} (x_i . k_j) do_i
        dk_j = sum_{i >= j} (do_i . v_j - dq_i . k_j) x_i - (x_i . k_j) dq_i
        dA   = - sum_i x_i dq_i^T,    dH = sum_i x_i do_i^T    (of the sums that the sequence starts from)

    A pair that is scaled by the root of its weight changes k and v alike. So the gradient of the logarithm of
    pair j's weight is (k_j . dk_j + v_j . dv_j) / 2.
    """

    @staticmethod
    def forward(ctx: Any, size: int, *inputs: Any) -> Tensor:
        out, passed = _forward(_Inputs(*inputs), size)
        ctx.size = size
        ctx.save_for_backward(*inputs, *passed)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, passed = _Inputs(*saved[:7]), _Passed(*saved[7:])
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            leaves = differentiable_leaves(inputs, needed)
            out = _forward(_Inputs(*leaves), ctx.size)[0]
            return None, *differentiable_gradients([out], leaves, needed, [grad])
        found = _pull_back(inputs, passed, ctx.size, grad)
        return None, *(x if want else None for x, want in zip(found, needed, strict=True))


def _pull_back(inputs: _Inputs, passed: _Passed, size: int, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs, from that of the output, (B, h, N, p_v)."""
    _, phi_k, values, _, forgetting, _, _ = inputs
    length = phi_k.size(2)
    whiten, target, queries, innovations, residuals, weights = passed
    k, v, do = (in_blocks(x, size) for x in (phi_k, values, grad))
    x = (queries - weights @ innovations) @ whiten
    dq = (do @ target.mT + (do @ residuals.mT).tril() @ innovations) @ whiten
    # In a block: sums over the queries i >= j; x is A^-1 q / gamma^i there.
    seen = (k @ x.mT).triu()
    dv = seen @ do
    dk = (v @ do.mT - k @ dq.mT).triu() @ x - seen @ dq
    log_decay = None
    recent = k
    if forgetting is not None:
        log_decay = size * forgetting.log()
        by_head = forgetting.log()[:, None, None, None]
        place = torch.arange(1, size + 1, device=k.device, dtype=k.dtype)[:, None]
        weight, recency = (-place * by_head).exp(), ((size - place) * by_head).exp()
        dv, dk, recent = dv * weight, dk * weight, k * recency
    # From the blocks after it.
    by_target, by_gram = x.mT @ do, x.mT @ dq
    target_after, gram_after = (_sums_after(total, log_decay) for total in (by_target, by_gram))
    dv = dv + recent @ target_after
    late = v @ target_after.mT - k @ (gram_after + gram_after.mT)
    dk = dk + (late if forgetting is None else late * recency)
    dq, dk, dv = (each.flatten(2, 3)[:, :, :length] for each in (dq, dk, dv))
    return dq, dk, dv, *_of_the_start(inputs, by_target, by_gram, dk, dv, size)


def _of_the_start(
    inputs: _Inputs, by_target: Tensor, by_gram: Tensor, dk: Tensor, dv: Tensor, size: int
) -> tuple[Tensor | None, ...]:
    """The gradients of lambda, gamma and the sums before the sequence."""
    _, phi_k, values, _, forgetting, gram_before, _ = inputs
    of_ridge = -trace_of(by_gram)[..., 0, 0]
    if forgetting is None:
        dridge = of_ridge.sum(dim=(0, 2))
        if gram_before is None:
            return dridge, None, None, None
        gram = by_gram.sum(dim=2)
        return dridge, None, -(gram + gram.mT) / 2, by_target.sum(dim=2)
    log_gamma = forgetting.log()[:, None]
    start = torch.arange(by_gram.size(2), device=by_gram.device, dtype=by_gram.dtype) * size
    of_ridge = (of_ridge * (start * log_gamma).exp()).sum(dim=(0, 2))
    # Relative to the first token, pair j = 0, 1, .. weighs gamma^-(j + 1).
    place = torch.arange(1, phi_k.size(2) + 1, device=phi_k.device, dtype=phi_k.dtype)
    of_weights = ((phi_k * dk).sum(dim=-1) + (values * dv).sum(dim=-1)) / 2
    dlog = -(of_weights * place).sum(dim=(0, 2))
    return of_ridge, dlog / forgetting, None, None
