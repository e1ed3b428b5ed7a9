"""RPC-Attention on GPUs by ``triton_kernels``: one launch a step, and a backward pass of its own.

It is an operator of PyTorch, into which a compiler does not look. An eager call takes the same functions
without the operator. Where the gradient itself is differentiated, it comes from the formulas.

Legend: B batch, h heads, N tokens, p head width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.engine import Engine, Unsupported
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings, pursuit_gradients
from kernel_attention.mechanisms.kernel_pca.steps import PursuitCall
from kernel_attention.tensors.gpu import why_not_measured
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.recompute import eager_twin, needs_gradient, needs_operator
from kernel_attention.tensors.statistics import without_autocast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_HEAD = 128
_WIDEST_MEASURED = 64  # head width


def rpc_attention_by_kernels(
    k: Tensor, v: Tensor, settings: PursuitSettings, *, q: Tensor | None = None
) -> Tensor:
    """``rpc_attention`` in Triton, with zeros at padded tokens; L of every step is kept, and the rest
    computed again.

    Products are in the precision of the input and accumulate in float32; those of float32 are exact unless
    PyTorch allows TF32. k, v and q are (B, h, N, p) in float32, bfloat16 or float16, p at most 128; without
    queries the cleaned keys attend to themselves.

    Raises:
        InputError: for another precision, or wider heads.
    """
    if k.dtype not in _DTYPES:
        raise InputError(f"impl='triton': x has dtype {k.dtype}, it takes float32, bfloat16 and float16")
    if k.size(3) > _LARGEST_HEAD:
        raise InputError(f"impl='triton': head width {k.size(3)} exceeds {_LARGEST_HEAD}")
    iterations, _, _, mask, is_causal = settings
    inputs = q, k, v, settings.threshold(k), mask, iterations, is_causal
    if needs_operator(k):
        low_rank = _pursuit(*inputs)[0]
    elif needs_gradient(*inputs[:4]):
        low_rank = _eager_pursuit(*inputs)
    else:
        low_rank = _pursue(*inputs, keep=False)[0]
    return low_rank.transpose(1, 2)


def _forward(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None, iterations: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """L_n (B, N, h, p), L_1, .., L_{n-1} (n - 1, B, N, h, p), and the row statistics (n, B, h, N)."""
    return _pursue(q, k, v, threshold, mask, iterations, is_causal, keep=True)


def _pursue(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None, iterations: int,
    is_causal: bool, *, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``_forward``; without ``keep`` nothing is left of the earlier steps."""
    from kernel_attention.mechanisms.kernel_pca import (
        triton_kernels,  # only where its kernels are asked for
    )

    with torch.cuda.device_of(k):
        found = triton_kernels.pursue(
            *_arguments(q, k, v, threshold, mask), iterations=iterations, is_causal=is_causal, keep=keep
        )
    return found.low_rank, found.kept, found.lse


def _gradients(
    grad: Tensor, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None,
    low_rank: Tensor, kept: Tensor, lse: Tensor, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By queries (empty without), keys, values and the threshold of every row (B, h, N), in float32.

    ``grad`` and the first three are (B, N, h, p).
    """
    from kernel_attention.mechanisms.kernel_pca import triton_kernels

    with torch.cuda.device_of(k):
        found = triton_kernels.pull_back(
            _by_token(grad.to(k.dtype).transpose(1, 2), mask),
            triton_kernels.KeptSteps(kept, low_rank, lse),
            *_arguments(q, k, v, threshold, mask), is_causal=is_causal,
        )  # fmt: skip
    by_queries = lse.new_empty(0) if found.queries is None else found.queries
    return by_queries, found.data, found.values, found.threshold


def _arguments(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, data, values, threshold and mask as the kernels read them."""
    queries = None if q is None else _by_token(q, mask)
    numbers = None if mask is None else mask.to(torch.uint8).contiguous()
    return queries, _by_token(k, mask), _by_token(v, mask), threshold.flatten(2).contiguous(), numbers


def _by_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, h, N, p) -> (B, N, h, p), contiguous, zero at padded tokens."""
    return zero_padding(x, mask).transpose(1, 2).contiguous()


_pursuit = torch.library.custom_op("kernel_attention::rpc_triton", _forward, mutates_args=())
_pursuit_backward = torch.library.custom_op(
    "kernel_attention::rpc_triton_backward", _gradients, mutates_args=()
)


@_pursuit.register_fake
def _(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None, iterations: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, length, width = k.shape
    sizes = batch, length, heads, width
    lse = k.new_empty(iterations, batch, heads, length, dtype=torch.float32)
    return k.new_empty(sizes), k.new_empty(iterations - 1, *sizes), lse


@_pursuit_backward.register_fake
def _(
    grad: Tensor, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None,
    low_rank: Tensor, kept: Tensor, lse: Tensor, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    queries, data, values = (lse.new_empty(low_rank.shape) for _ in range(3))
    return lse.new_empty(0) if q is None else queries, data, values, lse.new_empty(lse.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.iterations, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any, grad: Tensor | None, *_: object, gradients: Callable[..., Any] = _pursuit_backward
) -> tuple[Tensor | None, ...]:
    others = (None,) * 3
    if grad is None:
        return (None,) * 4 + others
    q, k, v, threshold, mask, *kept = ctx.saved_tensors
    with without_autocast(k):
        if torch.is_grad_enabled():
            by_formulas = pursuit_gradients(
                (q, k, v, threshold), ctx.needs_input_grad[:4], zero_padding(grad.transpose(1, 2), mask),
                iterations=ctx.iterations, attention_mask=mask, is_causal=ctx.is_causal,
            )  # fmt: skip
            return *by_formulas, *others
        queries, data, values, by_row = gradients(grad, q, k, v, threshold, mask, *kept, ctx.is_causal)
    by_row = by_row[..., None]
    return (
        None if q is None else queries.transpose(1, 2).to(q.dtype),
        data.transpose(1, 2).to(k.dtype),
        values.transpose(1, 2).to(v.dtype),
        by_row if ctx.is_causal else by_row.sum(dim=2, keepdim=True),
        *others,
    )


_pursuit.register_autograd(_pull_back, setup_context=_keep)


_eager_pursuit = eager_twin(_forward, _keep, partial(_pull_back, gradients=_gradients), only_first=True)


class TritonPursuit(Engine[PursuitCall, Tensor]):
    """One launch a step."""

    name = "triton"

    def why_not(self, call: PursuitCall, compiled: bool) -> Unsupported | None:
        """A reason for dropout."""
        return call.why_not()

    def pays_from(self, call: PursuitCall, compiled: bool) -> int | Unsupported | None:
        """Measured on a Hopper GPU in 16 bits, eagerly, not causal, with heads of width up to 64."""
        if not call.x.is_cuda or compiled:
            return None
        if call.settings.is_causal or call.head_dim > _WIDEST_MEASURED:
            return Unsupported(
                f"the kernels were measured without is_causal, in heads up to {_WIDEST_MEASURED} wide"
            )
        reason = why_not_measured(call.x)
        return 1024 if reason is None else Unsupported(reason)

    def attend(self, call: PursuitCall) -> Tensor:
        """``rpc_attention_by_kernels``."""
        assert call.heads is not None
        k, v, q = call.heads
        return rpc_attention_by_kernels(k, v, call.settings, q=q)


TRITON = TritonPursuit()
