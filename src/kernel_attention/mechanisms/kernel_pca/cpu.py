"""RPC-Attention on CPUs, with one tensor kept of every step for its gradients: the low-rank part L_t.

Automatic differentiation of ``functional.pursuit_steps`` keeps three: the residual that is clipped, the
cleaned keys T_t, and L_t. Here the backward pass computes the rest from K and L_1, ..., L_n again, without an
attention. With E_t = Y_t/mu - L_t and clip(x) = min(max(x, -tau), tau) the recursion is ::

    C_t = clip(K + E_{t-1})
    T_t = C_t - 2 E_{t-1} - L_{t-1}
    L_t = softmax(T_t T_t^T / sqrt(p)) V
    E_t = C_t - 2 L_t + L_{t-1}

One tensor a step is the least that can be kept. A step maps the state (L_{t-1}, Y_{t-1}) to (L_t, Y_t) and
loses one number of every pair: L_{t-1} + C_t is left, and where C_t is +-tau it does not tell Y_{t-1}, where
it is K + E_{t-1} the sum is K + Y_{t-1}/mu and does not tell L_{t-1}. What is lost is either kept or comes
from another attention, two of the seven products of a step with the sequence.

Sequences do not meet in the recursion. So it runs on slices of the batch, or of the heads of one sequence,
each of which is a node of its own in the graph. The temporary tensors are those of a slice, and a slice's L_t
are freed as soon as its gradients are there.

What lies between the attentions is in ``shrinkage``.

A compiler does not look into an operator; an eager call takes the same functions without the operator. Where
the gradient itself is differentiated, it comes from the formulas.

Legend: B batch, h heads, N tokens, p head width, d = h p.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.engine import Engine, Unsupported
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings, pursuit_gradients
from kernel_attention.mechanisms.kernel_pca.steps import (
    PursuitCall,
    clean,
    clean_again,
    following,
    pull_back,
)
from kernel_attention.tensors.affine import autocast
from kernel_attention.tensors.padding import compaction, zero_padding
from kernel_attention.tensors.recompute import eager_twin, needs_gradient, needs_operator
from kernel_attention.tensors.softmax.attention import (
    attention_gradients,
    attention_with_lse,
    empty_by_token,
    has_cpu_kernel,
)
from kernel_attention.tensors.softmax.dropped import additive_mask
from kernel_attention.tensors.statistics import exactly, without_autocast

_SLICE = 2**15  # the least numbers of K in a slice: below, the calls would weigh


def fused_rpc_attention(
    k: Tensor, v: Tensor, settings: PursuitSettings, *, q: Tensor | None = None
) -> Tensor:
    """``rpc_attention`` on a CPU without dropout, with n + 2 tensors of the size of K kept for its gradients.

    Outputs of padded tokens are zero where it is causal.
    """
    mask = settings.attention_mask
    v, q = autocast(v), None if q is None else autocast(q)
    with without_autocast(k):
        k = zero_padding(k, mask)
        if mask is None or not settings.is_causal:
            return _in_slices(q, k, v, settings.threshold(k), settings)
        # Right padding lies in the future of all real tokens, so that the causal form needs no mask.
        v, q = zero_padding(v, mask), None if q is None else zero_padding(q, mask)
        moved = compaction(mask)
        if moved is not None:
            k, v, q = moved.apply(k), moved.apply(v), None if q is None else moved.apply(q)
            settings = settings._replace(attention_mask=moved.attention_mask)
        out = _in_slices(q, k, v, settings.threshold(k), settings._replace(attention_mask=None))
        return zero_padding(out if moved is None else moved.undo(out), mask)


def _in_slices(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, settings: PursuitSettings
) -> Tensor:
    """L_n of queries or None, keys that are zero at padded tokens, values and tau."""
    iterations, _, _, mask, is_causal = settings
    if needs_operator(k):
        return _pursuit(q, k, v, threshold, mask, iterations, is_causal)[0]
    sequences, heads = _slice_size(k, iterations)
    # Token by token, as the heads come from their projection and go to the next.
    rows = []
    for *row, own_mask in zip(*(_split(x, sequences, 0) for x in (q, k, v, threshold, mask)), strict=False):
        parts = [
            _pursued(*part, own_mask, iterations, is_causal).transpose(1, 2)
            for part in zip(*(_split(x, heads, 1) for x in row), strict=False)
        ]
        rows.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).transpose(1, 2)


def _pursued(q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, *options: Any) -> Tensor:
    """L_n; what a backward pass needs is kept where there will be one."""
    if needs_gradient(q, k, v, threshold):
        return _eager_pursuit(q, k, v, threshold, *options)
    return _pursue(q, k, v, threshold, *options, keep=False)[0]


def _split(x: Tensor | None, size: int, dim: int) -> Iterable[Tensor | None]:
    if x is None:
        return itertools.repeat(None)
    return (x,) if size >= x.size(dim) else x.split(size, dim)


def _slice_size(k: Tensor, iterations: int) -> tuple[int, int]:
    """The sequences, and of each the heads, of a slice. There are as many slices as steps.

    The temporary tensors, some ten of a slice's size, then take less the more is kept. A thread of the
    attention works on one head at a time, so the heads of a slice are a multiple of the threads.
    """
    batch, heads, length, width = k.shape
    threads = torch.get_num_threads()
    size = max(batch * heads // iterations, math.ceil(_SLICE / (length * width)), threads)
    part = math.ceil(size / threads) * threads
    if part < heads and heads % part == 0:
        return 1, part
    alone = threads // math.gcd(threads, heads)
    return math.ceil(size / (alone * heads)) * alone, heads


def _forward(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None, iterations: int,
    is_causal: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """L_n, and L_1, ..., L_{n-1} followed by the n logsumexps of the logits."""
    return _pursue(q, k, v, threshold, mask, iterations, is_causal, keep=True)


def _pursue(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None, iterations: int,
    is_causal: bool, *, keep: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """As ``_forward``; without ``keep`` the list is empty."""
    data, scale, added = exactly(k), k.size(3) ** -0.5, additive_mask(_of_keys(mask), v)
    low: Tensor | None = None
    before: Tensor | None = None
    clipped: Tensor | None = None
    lows, sums = [], []
    for _ in range(iterations):
        keys, clipped = clean(data, clipped, low, before, threshold, v.dtype)
        before = low
        low, lse = attention_with_lse(keys if q is None else q, keys, v, added, is_causal, scale)
        del keys
        if keep:
            lows.append(low)
            sums.append(lse)
    assert low is not None
    return low, [*lows[:-1], *sums]


def _gradients(
    grad: Tensor, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None,
    low: Tensor, kept: Sequence[Tensor], is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By queries (empty without), keys, values and threshold; ``kept`` is ``_forward``'s list."""
    steps = (len(kept) + 1) // 2
    lows, sums = [*kept[: steps - 1], low], kept[steps - 1 :]
    data, scale, added = exactly(k), k.size(3) ** -0.5, additive_mask(_of_keys(mask), v)
    d_queries = d_data = d_values = d_offset = None
    d_threshold = torch.zeros_like(threshold)
    d_low: Tensor | None = grad
    for step, offset in _offsets_backwards(data, threshold, lows):
        before = lows[step - 1] if step else None
        keys, kept_of_step = clean_again(data, offset, before, threshold, v.dtype)
        del offset, before
        assert d_low is not None
        to_queries, to_keys, to_values = attention_gradients(
            d_low.to(v.dtype), keys if q is None else q, keys, v, lows[step], sums[step], added, is_causal,
            scale,
        )  # fmt: skip
        del keys
        d_low = None
        d_values = to_values if d_values is None else d_values.add_(to_values)
        d_cleaned = [exactly(to_keys)]
        if q is None:
            d_cleaned.append(to_queries)
        else:
            d_queries = to_queries if d_queries is None else d_queries.add_(to_queries)
        del to_queries, to_keys, to_values
        pulled = pull_back(data, threshold, kept_of_step, d_cleaned, d_offset, d_data, is_first=step == 0)
        d_low, d_offset, d_data = pulled.d_low, pulled.d_offset, pulled.d_data
        d_threshold += pulled.d_threshold
        del d_cleaned, kept_of_step, pulled
    assert d_data is not None and d_values is not None  # noqa: PT018
    if d_queries is None:
        d_queries = k.new_empty(0)
    return d_queries, d_data.to(k.dtype), d_values, d_threshold


def _offsets_backwards(
    data: Tensor, threshold: Tensor, lows: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor | None]]:
    """(t, E_t) for t = n - 1, ..., 0. At most 2 sqrt(n) of them exist at a time, and each is made twice."""
    stride = math.ceil(math.sqrt(len(lows)))

    def after(step: int, offset: Tensor | None) -> Tensor:
        return following(data, offset, threshold, lows[step], lows[step - 1] if step else None)

    firsts: list[Tensor | None] = [None]
    for start in range(0, len(lows) - stride, stride):
        offset = firsts[-1]
        for step in range(start, start + stride):
            offset = after(step, offset)
        firsts.append(offset)
    offset = None
    for start in reversed(range(0, len(lows), stride)):
        offsets = [firsts.pop()]
        last = min(start + stride, len(lows)) - 1
        for step in range(start, last):
            offsets.append(after(step, offsets[-1]))
        for step in range(last, start - 1, -1):
            yield step, offsets.pop()


def _of_keys(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, None, None, :]


_pursuit = torch.library.custom_op("kernel_attention::rpc_attention", _forward, mutates_args=())
_pursuit_backward = torch.library.custom_op(
    "kernel_attention::rpc_attention_backward", _gradients, mutates_args=()
)


_pursuit.register_fake(_forward)


@_pursuit_backward.register_fake
def _(
    grad: Tensor, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_queries = k.new_empty(0) if q is None else empty_by_token(q)
    return d_queries, empty_by_token(k), empty_by_token(v), torch.empty_like(threshold)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    *tensors, ctx.iterations, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, output[0], *output[1])
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any, grad: Tensor | None, *_: object, gradients: Callable[..., Any] = _pursuit_backward
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    q, k, v, threshold, mask, low, *kept = ctx.saved_tensors
    with without_autocast(k):
        if torch.is_grad_enabled():
            found = pursuit_gradients(
                (q, k, v, threshold), ctx.needs_input_grad[:4], grad, iterations=ctx.iterations,
                attention_mask=mask, is_causal=ctx.is_causal,
            )  # fmt: skip
            return *found, None, None, None
        found = gradients(grad, q, k, v, threshold, mask, low, kept, ctx.is_causal)
    return (None if q is None else found[0], *found[1:], None, None, None)


_pursuit.register_autograd(_pull_back, setup_context=_keep)


_eager_pursuit = eager_twin(_forward, _keep, partial(_pull_back, gradients=_gradients), only_first=True)


class FusedPursuit(Engine[PursuitCall, Tensor]):
    """One tensor kept of every step."""

    name = "fused"

    def why_not(self, call: PursuitCall, compiled: bool) -> Unsupported | None:
        """A reason for dropout, and where PyTorch has no fused attention of its own for CPUs."""
        if (why := call.why_not()) is not None:
            return why
        if call.x.device.type in ("cpu", "meta") and has_cpu_kernel():
            return None
        return Unsupported("the fused form needs PyTorch's fused attention for CPUs")

    def pays_from(self, call: PursuitCall, compiled: bool) -> int | None:
        """Measured on CPUs, eagerly, where it keeps less at every length."""
        return 1 if call.x.device.type == "cpu" and not compiled else None

    def attend(self, call: PursuitCall) -> Tensor:
        """``fused_rpc_attention``."""
        assert call.heads is not None
        k, v, q = call.heads
        return fused_rpc_attention(k, v, call.settings, q=q)


FUSED = FusedPursuit()
