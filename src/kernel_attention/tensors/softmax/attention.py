"""Fused softmax attention whose gradients hold at logits of any size.

PyTorch's fused kernel on CPU keeps lse_i = logsumexp_j(S_ij). The backward pass forms the weights again,
P_ij = exp(S_ij - lse_i). It computes S_ij by another order of additions, so S_ij differs from the logit that
entered lse_i by a rounding error of the size of u L. Here u is the unit roundoff and L bounds the logits:
|q_i . k_j| / sqrt(p) <= L = max_i ||q_i|| max_j ||k_j|| / sqrt(p). The weights are then wrong by the factor
exp(c u L) with a constant c. In float32 that factor is harmless at L = 1e3 and infinite at L = 1e10.

A softmax of its own logits has no such factor: its rows sum to 1 whatever the rounding of the logits. So the
backward pass looks at L. Up to L = 1 / sqrt(eps), the error u L is below sqrt(eps), and the backward pass is
the fused kernel's. Above, it forms the weights by a softmax, for a slice of queries at a time, so that the
memory does not grow with N^2. It does this in float64, where the products of float32 numbers are exact: two
keys then tie where q and k say so, and not where float32 cannot tell 1e9 from 1e9 + 30.

The forward pass is the fused kernel in both cases. Its running maximum makes it safe, and the outputs of
past tokens must not depend on the size of future ones.

The decision is made inside an operator, where compilers do not look. An eager call takes the same functions
without the operator. Where the gradient itself is differentiated, it comes from the formula, in float64 too,
which holds all the weights.

PyTorch's kernel and its backward pass have no public names. Where a release does not have them as they are
called here, everything is ``scaled_dot_product_attention``.

Legend: B batch, h heads, N queries, S keys, p head width, p_v width of the values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention.tensors.dropout import draws_masks, dropout
from kernel_attention.tensors.padding import is_exporting
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    eager_twin,
    is_forward_mode,
    is_transformed,
    needs_gradient,
)
from kernel_attention.tensors.softmax.dropped import (
    additive_mask,
    logit_gradients,
    softmax_dropout_attention,
    softmax_weights,
)
from kernel_attention.tensors.statistics import accumulation_dtype, exactly

_SLICE = 2**22  # the number of weights that the backward pass holds at a time

_FORWARD = "query key value dropout_p is_causal attn_mask scale"
_BACKWARD = "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"


def _takes(operator: str, arguments: str) -> bool:
    """True where this release of PyTorch has the operator, with these arguments in this order."""
    overloads = getattr(torch.ops.aten, operator, None)
    if overloads is None or "default" not in overloads.overloads():
        return False
    return [argument.name for argument in overloads.default._schema.arguments] == arguments.split()


_EXISTS = _takes("_scaled_dot_product_flash_attention_for_cpu", _FORWARD) and _takes(
    "_scaled_dot_product_flash_attention_for_cpu_backward", _BACKWARD
)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q k^T) v through PyTorch's fused kernels, with correct gradients at large logits.

    This is ``torch.nn.functional.scaled_dot_product_attention`` itself where no gradient is wanted, and where
    PyTorch uses no fused kernel of the CPU: with values of another width, in exported programs, under the
    transforms of torch.func, and on GPUs. It can be differentiated any number of times, and in forward mode,
    where the formula holds all weights. With dropout on a CPU it is ``softmax_dropout_attention``.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        mask: bool, True = seen; broadcasts to (B, h, N, S). None with ``is_causal``.
        is_causal: query i sees keys 0..i only.
        dropout_p: probability of dropping an attention weight.
        scale: replaces 1/sqrt(p).

    Returns:
        (B, h, N, p_v). A query that sees no key gets zeros.
    """
    if dropout_p > 0.0 and draws_masks(q) and q.dtype == v.dtype and not torch.is_autocast_enabled("cpu"):
        scale = q.size(3) ** -0.5 if scale is None else scale
        return softmax_dropout_attention(q, k, v, additive_mask(mask, q), is_causal, dropout_p, scale)
    if is_forward_mode():  # of which PyTorch's kernels have no derivative
        return _by_formula(q, k, v, mask, is_causal, dropout_p, scale)
    if not _is_ours(q, k, v, dropout_p):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    scale = q.size(3) ** -0.5 if scale is None else scale
    # A subclass may have no values to decide by, as the tensors have that only stand for sizes. A dispatch
    # mode, which counts operations, say, is to see the operator.
    is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    is_eager = type(q) is Tensor and not is_watched
    arguments = q, k, v, additive_mask(mask, q), is_causal, scale
    return _eager_attention(*arguments) if is_eager else _attention(*arguments)[0]


def _by_formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """``fused_attention`` in differentiable operations, which hold all weights."""
    scale = q.size(3) ** -0.5 if scale is None else scale
    weights = softmax_weights(exactly(q) * scale, exactly(k), additive_mask(mask, exactly(q)), is_causal)
    return dropout(weights.to(v.dtype), dropout_p) @ v


def _is_ours(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> bool:
    """True where a gradient is wanted and PyTorch would use its fused kernel for CPUs."""
    return (
        needs_gradient(q, k, v)
        and q.device.type == "cpu"
        and dropout_p == 0.0
        and q.size(3) == v.size(3)
        and not is_exporting()
        and has_cpu_kernel()
        and (torch.compiler.is_compiling() or not is_transformed())
    )


def has_cpu_kernel() -> bool:
    """True where PyTorch has the kernel for CPUs, and no sdpa_kernel context asks for another one."""
    # flash_sdp_enabled is the switch of sdpa_kernel, for CPUs too.
    return _EXISTS and (torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled())


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs (B, h, N, p_v) and lse (B, h, N)."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients with respect to q, k and v."""
    if _has_small_logits(q, k, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    return _by_slices(grad, q, k, v, mask, is_causal, scale)


_attention = torch.library.custom_op(
    "kernel_attention::softmax_attention", attention_with_lse, mutates_args=()
)
_attention_backward = torch.library.custom_op(
    "kernel_attention::softmax_attention_backward", attention_gradients, mutates_args=()
)


def _has_small_logits(q: Tensor, k: Tensor, scale: float) -> bool:
    """True where L is at most 1 / sqrt(eps).

    The norm of a token bounds those of its heads. Where the heads lie side by side, as a projection leaves
    them, the tokens' norms take a fraction of the time, and settle nearly every call.
    """
    limit = torch.finfo(accumulation_dtype(q.dtype)).eps ** -0.5
    lies_by_token = q.stride(1) < q.stride(2) and k.stride(1) < k.stride(2)
    if lies_by_token and _largest_logit(q, k, scale, (1, 3)) <= limit:
        return True
    return _largest_logit(q, k, scale) <= limit


def _largest_logit(q: Tensor, k: Tensor, scale: float, row: int | tuple[int, int] = 3) -> float:
    """L, an upper bound of |scale q_i . k_j|, from the norms over ``row``: of heads, or of whole tokens."""
    if q.numel() == 0:  # no sequences
        return 0.0
    dtype = accumulation_dtype(q.dtype)
    k_norm = torch.linalg.vector_norm(k, dim=row, dtype=dtype).amax().item()
    q_norm = k_norm if q is k else torch.linalg.vector_norm(q, dim=row, dtype=dtype).amax().item()
    return scale * q_norm * k_norm


def _by_slices(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to q, k and v, from a slice of queries at a time, in float64."""
    dtype = torch.float64
    keys, values = k.to(dtype), v.to(dtype)
    grad_q, grad_k, grad_v = empty_by_token(q), torch.zeros_like(keys), torch.zeros_like(values)
    rows = max(1, _SLICE // (q.size(0) * q.size(1) * k.size(2)))
    for start in range(0, q.size(2), rows):
        here = slice(start, start + rows)
        queries, slope = q[:, :, here].to(dtype) * scale, grad[:, :, here].to(dtype)
        own_mask = mask if mask is None or mask.size(2) == 1 else mask[:, :, here]
        weights = softmax_weights(queries, keys, own_mask, is_causal, start)
        grad_v += weights.mT @ slope
        change = logit_gradients(weights, slope @ values.mT)
        grad_q[:, :, here] = change @ keys * scale
        grad_k += change.mT @ queries
    return grad_q, empty_by_token(k).copy_(grad_k), empty_by_token(v).copy_(grad_v)


def empty_by_token(x: Tensor) -> Tensor:
    """An empty (B, h, N, p) in the layout of the fused kernel's outputs and gradients, token by token."""
    return torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=x.device)


_attention.register_fake(attention_with_lse)


@_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return empty_by_token(q), empty_by_token(k), empty_by_token(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any, grad: Tensor | None, *_: object, gradients: Callable[..., Any] = _attention_backward
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    q, k, v, out, lse, mask = ctx.saved_tensors
    if torch.is_grad_enabled():
        needed = ctx.needs_input_grad[:3]
        leaves = differentiable_leaves((q, k, v), needed)
        queries, keys, values = (leaf.double() for leaf in leaves)
        y = softmax_weights(queries * ctx.scale, keys, mask, ctx.is_causal) @ values
        first = differentiable_gradients((y.to(q.dtype),), leaves, needed, (grad,))
        return (*first, None, None, None)
    grads = gradients(grad, q, k, v, out, lse, mask, ctx.is_causal, ctx.scale)
    return (*grads, None, None, None)


_attention.register_autograd(_pull_back, setup_context=_keep)


_eager_attention = eager_twin(
    attention_with_lse, _keep, partial(_pull_back, gradients=attention_gradients), only_first=True
)
