"""``folding`` in C++ (``native_kernels.cpp``), for float32 and float64 on CPUs.

By PyTorch it is some forty operations, each with a backward pass of its own. Here it is one with one, because
short sequences would spend most of a step on calls.

Legend as in ``fused``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.engines.folding import FoldedReadout, Readout, fold_readout
from kernel_attention.mechanisms.primal.engines.native import call_kernel
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves


def native_fold(readout: Readout, rows: Tensor | None) -> FoldedReadout:
    """As ``folding.fold_readout``, on tensors that have values."""
    return FoldedReadout._make(_Fold.apply(rows, *readout))


class _Fold(torch.autograd.Function):
    """The formulas in C++. Where the gradient itself is differentiated, it comes from the formulas."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor | None, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        readout = Readout._make(weights)
        folded, kept = _fold(rows, readout)
        ctx.save_for_backward(rows, *readout, *kept)
        return folded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        rows, *weights = saved[:8]
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((rows, *weights), ctx.needs_input_grad)
            found = fold_readout(Readout._make(leaves[1:]), leaves[0])
            return tuple(differentiable_gradients(found, leaves, ctx.needs_input_grad, grads))
        return _pull_back(rows, Readout._make(weights), saved[8:], grads)


class _FoldSizes(ctypes.Structure):
    """``FoldSizes`` of the C++ file."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("batch", "heads", "head", "rank", "rows", "stored", "outputs", "threads")
    ]


def _fold(rows: Tensor | None, readout: Readout) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor]]:
    """The tensors of ``FoldedReadout``, and what the backward pass needs of them."""
    w_e, w_r, scale, concat, concat_bias, out, out_bias = readout
    sizes = _fold_sizes(rows, readout)
    shape = (sizes.batch, sizes.heads, 2, sizes.head)
    w, heads = w_e.new_empty(*shape, sizes.rank), w_e.new_empty(*shape, sizes.head)
    maps = None if out is None else w_e.new_empty(*shape, sizes.outputs)
    energy = None if scale is None else w_e.new_empty(*shape, sizes.head)
    call_kernel("fold", sizes, w_e, w_r, rows, concat, out, scale, w, heads, maps, energy)
    bias = w_e.new_zeros(sizes.head) if concat_bias is None else concat_bias
    constant = bias.repeat(sizes.heads)
    if out is None or maps is None:
        return (heads.flatten(2, 3), constant, energy), (w, heads)
    constant = out.mv(constant) if out_bias is None else torch.addmv(out_bias, out, constant)
    return (maps.flatten(1, 3)[:, None], constant, energy), (w, heads)


def _pull_back(
    rows: Tensor | None, readout: Readout, kept: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``rows`` and of every weight, from those of the tensors of ``FoldedReadout``."""
    w_e, w_r, scale, concat, concat_bias, out, out_bias = readout
    sizes = _fold_sizes(rows, readout)
    of_maps, of_constant, of_energy = grads
    assert of_constant is not None
    inputs = (rows, w_e, w_r, scale, out)
    of_rows, of_e, of_r, of_scale, of_out = (None if x is None else x.new_zeros(x.shape) for x in inputs)
    of_concat = concat.new_zeros(sizes.heads, *concat.shape)
    call_kernel(
        "fold_back", sizes, w_e, w_r, rows, concat, out, scale, *kept, of_maps, of_energy, of_e, of_r,
        of_rows, of_concat, of_out, of_scale,
    )  # fmt: skip
    of_out_bias = None if out_bias is None else of_constant
    if out is not None and of_out is not None:  # the constant is O (c, .., c) + b
        if concat_bias is not None:
            of_out.addr_(of_constant, concat_bias.repeat(sizes.heads))
        of_constant = of_constant @ out
    of_concat_bias = None if concat_bias is None else of_constant.view(sizes.heads, -1).sum(dim=0)
    return of_rows, of_e, of_r, of_scale, of_concat.sum(dim=0), of_concat_bias, of_out, of_out_bias


def _fold_sizes(rows: Tensor | None, readout: Readout) -> _FoldSizes:
    heads, stored, rank = readout.w_e.shape
    batch, used = (1, 0) if rows is None else rows.shape[:2]
    outputs = 0 if readout.out is None else readout.out.size(0)
    threads = torch.get_num_threads()
    return _FoldSizes(batch, heads, readout.concat.size(0), rank, used, stored, outputs, threads)
