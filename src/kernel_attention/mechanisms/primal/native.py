"""Primal-Attention in C++ (``native.cpp``), for float32 and float64 on CPUs, once it is built.

Every thread takes slices of its own from beginning to end, so threads wait for one another once a pass.
Between two matrix products bias, norm and scale are one sweep over a slice in the cache. ``folding`` is some
forty operations in PyTorch, each with a backward pass of its own; here it is one with one, because short
sequences would spend most of a step on calls.

Legend as in ``one_pass``.
"""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.engine import Engine, Unsupported
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.primal.map_operator import (
    FoldedReadout,
    MapOperator,
    Readout,
    Sums,
    TokenPass,
    Tokens,
    fold_readout,
)
from kernel_attention.mechanisms.primal.one_pass import PrimalCall, PrimalResult, primal_pass
from kernel_attention.native import TYPES, NativeLibrary, address, matrix_product
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_operator,
)

LIBRARY = NativeLibrary("primal", Path(__file__).with_suffix(".cpp"))
_LEAST = 256  # tokens of a unit of work; fewer are not worth sums of their own
_UNITS = 2  # of a thread at least, in long sequences: a thread that is held up leaves one to the others


class _Sizes(ctypes.Structure):
    """``Sizes`` of the C++ file."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "batch", "length", "width", "halves", "head", "groups", "outputs", "maps", "parts", "threads",
            "normalize",
        )
    ]  # fmt: skip


class TokenUnits(TokenPass):
    """The pass in C++, unit of work by unit of work."""

    def fold(
        self, x: Tensor, readout: Readout, rows: Tensor | None, group: SequenceGroup | None
    ) -> FoldedReadout:
        """As ``TokenPass.fold``; where a compiler looks on or ranks share the rows, that itself."""
        if group is not None or needs_operator(x):
            return super().fold(x, readout, rows, group)
        return FoldedReadout._make(_Fold.apply(rows, *readout))

    def map_tokens(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
        with_gram: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As ``TokenPass.map_tokens``."""
        sizes = _sizes(tokens, x, weight, maps)
        y = x.new_empty(x.size(0), x.size(1), sizes.groups * sizes.outputs)
        gram = None
        if with_gram:
            gram = x.new_zeros(x.size(0) * sizes.parts, sizes.halves, sizes.head, sizes.head)
        call_kernel("map_tokens", sizes, x, weight, bias, maps, tokens.mask, constant.to(x.dtype), y, gram)
        return y, None if gram is None else _of_sequences(gram, sizes).unflatten(1, (-1, 2))

    def pull_back(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor,
        pull: Tensor | None, grad_y: Tensor,
    ) -> Sums:  # fmt: skip
        """As ``TokenPass.pull_back``."""
        sizes = _sizes(tokens, x, weight, maps)
        units = x.size(0) * sizes.parts
        grad_x = x.new_empty(x.shape)
        shapes = (weight.shape, weight.shape[:1], maps.shape[1:], (sizes.groups * sizes.outputs,))
        sums = [x.new_zeros(units, *shape) for shape in shapes]
        call_kernel("pull_back", sizes, x, weight, bias, maps, tokens.mask, pull, grad_y, grad_x, *sums)
        own = _of_sequences(sums[2], sizes)
        return Sums(
            grad_x,
            sums[0].sum(dim=0),
            sums[1].sum(dim=0),
            own if sizes.maps == sizes.batch else own.sum(dim=0, keepdim=True),
            sums[3].sum(dim=0),
        )


def _sizes(tokens: Tokens, x: Tensor, weight: Tensor, maps: Tensor) -> _Sizes:
    """The sizes, and the division into units of work: parts of every sequence."""
    batch, length, width = x.shape
    halves, threads = 2 * tokens.num_heads, torch.get_num_threads()
    units = _UNITS * threads
    parts = min(units // math.gcd(batch, units), max(1, length // _LEAST))
    return _Sizes(
        batch, length, width, halves, weight.size(0) // halves, maps.size(1), maps.size(3), maps.size(0),
        parts, threads, tokens.normalize,
    )  # fmt: skip


def call_kernel(name: str, sizes: ctypes.Structure, *tensors: Tensor | None) -> None:
    """Run a function of the C++ file; it writes into its last tensors, which are contiguous."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    if len(dtypes) > 1:
        raise InputError(f"native kernels take one precision, not {', '.join(sorted(map(str, dtypes)))}")
    (dtype,) = dtypes
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    function = LIBRARY.function(f"{name}_{TYPES[dtype]}")
    function(matrix_product(dtype), ctypes.byref(sizes), *map(address, held))


def _of_sequences(sums: Tensor, sizes: _Sizes) -> Tensor:
    """Sums of every unit (U, ..) -> of every sequence (B, ..)."""
    return sums if sizes.parts == 1 else sums.unflatten(0, (-1, sizes.parts)).sum(dim=1)


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


UNITS = MapOperator("primal_native_map", TokenUnits())


class NativePass(Engine[PrimalCall, PrimalResult]):
    """One pass over the tokens in C++, but for the causal data-dependent layer."""

    name = "native"

    def why_not(self, call: PrimalCall, compiled: bool) -> Unsupported | None:
        """A reason where the library is not built, and for what it does not compute."""
        if call.is_causal and call.num_rows:
            return Unsupported("it has no data-dependent causal form")
        if (why := call.why_not()) is not None:
            return why
        reason = LIBRARY.why_not(call.x, product_dtype(call.x))
        return None if reason is None else Unsupported(reason)

    def pays_from(self, call: PrimalCall, compiled: bool) -> int | None:
        """Measured eagerly, on CPUs."""
        if call.x.device.type != "cpu" or compiled:
            return None
        width = call.embed_dim
        return 64 if width <= 128 else 4 * width

    def attend(self, call: PrimalCall) -> PrimalResult:
        """The pass by ``native.cpp``."""
        return primal_pass(call, call.samples(), UNITS)


NATIVE = NativePass()
