"""The pass over the tokens as an operator of PyTorch, whatever runs it.

A compiler does not look into an operator. So ``torch.compile``, ``torch.export`` and activation checkpointing
keep the hand-written pass, and need only the sizes of its results and the formula of its gradients. An eager
call takes the same functions without the operator, because its dispatch would cost a short sequence a tenth
of its training step. Where the gradient itself is differentiated, it comes from the formulas, which keep z.

Legend as in ``one_pass``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.tensors.features.feature_maps import cosine
from kernel_attention.tensors.padding import first_rows
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    eager_twin,
    needs_operator,
)
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, without_autocast


class Readout(NamedTuple):
    """The weights that follow the feature maps.

    ``sqrt_lambda`` is None where no energy is wanted, ``out`` where the output projection is applied later.
    """

    w_e: Tensor
    w_r: Tensor
    sqrt_lambda: Tensor | None
    concat: Tensor
    concat_bias: Tensor | None
    out: Tensor | None
    out_bias: Tensor | None


class FoldedReadout(NamedTuple):
    """A ``Readout`` multiplied out; B is 1 where the weights do not depend on the sequence.

    ``maps`` (B, k, 2d / k, o) and ``constant`` (k o,) give the output. ``energy`` (B, h, 2, p, p) is S for
    queries and keys; None where no energy is wanted.
    """

    maps: Tensor
    constant: Tensor
    energy: Tensor | None


def fold_readout(after: Readout, rows: Tensor | None, group: SequenceGroup | None = None) -> FoldedReadout:
    """G = [W_{e|X} C_e^T ; W_{r|X} C_r^T] (times O^T where it is folded) and S = W Lambda W^T / h.

    The head dimension comes first, so that all sequences of a head share one product. ``rows`` are f(X), (B,
    M, d); None where the weights do not depend on the sequence. The processes of ``group`` hold rows of the
    same sequences.
    """
    after = Readout._make(None if tensor is None else exactly(tensor) for tensor in after)
    num_heads, rank = after.w_e.size(0), after.w_e.size(-1)
    w = torch.cat([after.w_e, after.w_r], dim=-1)  # (h, M or p, 2s)
    if rows is not None:
        by_head = exactly(rows).unflatten(-1, (num_heads, -1)).permute(2, 1, 0, 3)  # (h, M', B, p)
        own = by_head.flatten(2).mT @ first_rows(w, rows.size(1))  # (h, B p, 2s)
        w = own.unflatten(1, by_head.shape[2:])
        w = w if group is None else group.total(w)  # every rank read its own rows
    else:
        w = w[:, None]
    w = w.unflatten(-1, (2, rank)).movedim(-2, 0)  # (2, h, B, p, s)
    concat = after.concat.unflatten(1, (2, rank)).permute(1, 2, 0)  # (2, s, p)
    maps = (w.flatten(1, 3) @ concat).view(w.shape[:-1] + concat.shape[-1:])
    maps = maps.permute(1, 2, 0, 3, 4)  # (h, B, 2, p, p)
    bias = concat.new_zeros(concat.size(-1)) if after.concat_bias is None else after.concat_bias
    constant = bias.expand(num_heads, -1).flatten()
    if after.out is None:
        maps = maps.transpose(0, 1).flatten(2, 3)  # (B, h, 2p, p)
    else:
        folded = maps.flatten(1, 3) @ after.out.mT.unflatten(0, (num_heads, -1))  # (h, B 2p, d)
        maps = folded.unflatten(1, (maps.size(1), -1)).transpose(0, 1).flatten(1, 2)[:, None]  # (B, 1, 2d, d)
        constant = after.out @ constant + (0.0 if after.out_bias is None else after.out_bias)
    energy = None
    if after.sqrt_lambda is not None:
        scaled = (w * after.sqrt_lambda[:, None, None, :]).permute(2, 1, 0, 3, 4)  # (B, h, 2, p, s)
        energy = scaled @ scaled.mT / num_heads
    return FoldedReadout(maps, constant, energy)


class Tokens(NamedTuple):
    """The inputs of z."""

    num_heads: int
    normalize: bool
    mask: Tensor | None


class Sums(NamedTuple):
    """The gradients of the tokens (B, N, d), and of the shared tensors as sums in float32 or better."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    maps: Tensor
    constant: Tensor


class TokenPass(ABC):
    """The pass over the tokens, forward and backward, by one engine."""

    def fold(
        self, x: Tensor, readout: Readout, rows: Tensor | None, group: SequenceGroup | None
    ) -> FoldedReadout:
        """``folding.fold_readout``; x are the tokens."""
        return fold_readout(readout, rows, group)

    @abstractmethod
    def map_tokens(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
        with_gram: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """y (B, N, k o) = z maps + constant, and Z^T Z of every head's halves, (B, h, 2, p, p), or None."""

    @abstractmethod
    def pull_back(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor,
        pull: Tensor | None, grad_y: Tensor,
    ) -> Sums:  # fmt: skip
        """The gradients of ``map_tokens``; ``pull`` (B, h, 2, p, p) is twice the gradient of Z^T Z."""


class MapOperator:
    """``kernel_attention::NAME`` and its eager twin.

    Args:
        name: of the operator.
        token_pass: what it runs.
    """

    def __init__(self, name: str, token_pass: TokenPass) -> None:
        self.token_pass = token_pass
        self.operator = torch.library.custom_op(f"kernel_attention::{name}", self._map, mutates_args=())
        self.backward = torch.library.custom_op(
            f"kernel_attention::{name}_backward", self._gradients, mutates_args=()
        )
        self.operator.register_fake(_sizes_of_map)
        self.backward.register_fake(_sizes_of_gradients)
        self.operator.register_autograd(partial(_pull_back, self.backward), setup_context=_keep)
        self.eager = eager_twin(self._map, _keep, partial(_pull_back, self._gradients))

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor, tokens: Tokens,
        *, with_gram: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """y = z maps + constant, (B, N, k o), and Z^T Z of every head's two halves, (B, h, 2, p, p), or None.

        z is phi of the projections of x, and zero at padded tokens, whose y is ``constant``. It is not kept:
        the backward pass computes it again.

        Args:
            x: (B, N, d).
            weight: (h * 2 * p, d), in the precision of x; a head's query and key lie side by side.
            bias: (h * 2 * p,) or None.
            maps: (B or 1, k, 2d / k, o), in float32 or better.
            constant: (k o,), in float32 or better.
            tokens: heads, feature map and mask.
            with_gram: whether Z^T Z is wanted; it is in float32 or better.
        """
        inputs = x, weight, bias, maps, constant, tokens.mask, tokens.num_heads, tokens.normalize, with_gram
        y, gram = self.operator(*inputs) if needs_operator(x) else self.eager(*inputs)
        return y, gram if with_gram else None

    def _map(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
        mask: Tensor | None, num_heads: int, normalize: bool, with_gram: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y (B, N, k o) and Z^T Z (B, h, 2, p, p); empty where it is not wanted: operators return no None."""
        tokens = Tokens(num_heads, normalize, mask)
        with without_autocast(x):
            y, gram = self.token_pass.map_tokens(
                tokens, x, weight, bias, maps.to(x.dtype), constant, with_gram
            )
        return y, x.new_empty(0) if gram is None else gram

    def _gradients(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None,
        grad_y: Tensor, mask: Tensor | None, num_heads: int, normalize: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """By x, weight, bias, maps and constant; ``pull`` (B, h, 2, p, p) is twice the gradient of Z^T Z."""
        tokens = Tokens(num_heads, normalize, mask)
        with without_autocast(x):
            sums = self.token_pass.pull_back(tokens, x, weight, bias, maps.to(x.dtype), pull, grad_y)
        return sums.x, sums.weight.to(weight.dtype), sums.bias.to(weight.dtype), sums.maps, sums.constant


def _sizes_of_map(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor, mask: Tensor | None,
    num_heads: int, normalize: bool, with_gram: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(x.size(0), x.size(1), maps.size(1) * maps.size(3))
    if not with_gram:
        return y, x.new_empty(0)
    size = weight.size(0) // (2 * num_heads)
    return y, x.new_empty(x.size(0), num_heads, 2, size, size, dtype=accumulation_dtype(x.dtype))


def _sizes_of_gradients(
    x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None, grad_y: Tensor,
    mask: Tensor | None, num_heads: int, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    exact = accumulation_dtype(x.dtype)
    return (
        x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.size(0)),
        x.new_empty(maps.shape, dtype=exact), x.new_empty(grad_y.size(2), dtype=exact),
    )  # fmt: skip


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, maps, constant, mask, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, maps, constant, mask)
    ctx.set_materialize_grads(False)


def _pull_back(
    gradients: Callable[..., Any], ctx: Any, grad_y: Tensor | None, grad_gram: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, maps, constant, mask = ctx.saved_tensors
    num_heads, normalize, with_gram = ctx.options
    others = (None,) * 4
    if torch.is_grad_enabled():
        needed = ctx.needs_input_grad[:5]
        leaves = differentiable_leaves((x, weight, bias, maps, constant), needed)
        with without_autocast(x):
            outputs = _formulas(Tokens(num_heads, normalize, mask), *leaves, with_gram=with_gram)
            return (*differentiable_gradients(outputs, leaves, needed, (grad_y, grad_gram)), *others)
    if grad_y is None:
        grad_y = x.new_zeros(x.size(0), x.size(1), constant.size(0))
    pull = None
    if with_gram and grad_gram is not None:
        pull = (grad_gram + grad_gram.mT).to(x.dtype)
    found = gradients(x, weight, bias, maps, pull, grad_y, mask, num_heads, normalize)
    return (*found[:2], None if bias is None else found[2], *found[3:], *others)


def _formulas(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    *, with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The results of the operator, from differentiable operations that keep z."""
    z = differentiable_features(tokens, x, weight, bias)
    maps = maps.to(x.dtype)
    by_group = z.flatten(2).unflatten(-1, (maps.size(1), -1)).transpose(1, 2)  # (B, k, N, 2d / k)
    y = (by_group @ maps).transpose(1, 2).flatten(2) + constant.to(x.dtype)
    if not with_gram:
        return y, None
    halves = exactly(z).transpose(1, 2).unflatten(1, (-1, 2))  # (B, h, 2, N, p)
    return y, halves.mT @ halves


def differentiable_features(tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z by differentiable operations, (B, N, 2h, p)."""
    if tokens.mask is not None:
        x = x.masked_fill(~tokens.mask[..., None], 0.0)
    z = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2 * tokens.num_heads, -1))
    if tokens.normalize:
        z = cosine(z)
    if tokens.mask is not None:
        z = z.masked_fill(~tokens.mask[..., None, None], 0.0)
    return z


def add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into += left @ right, of matrices or of batches of them."""
    if into.dtype != left.dtype:  # 16-bit products, summed in float32
        into += left @ right
    elif into.dim() == 2:
        into.addmm_(left, right)
    else:
        into.baddbmm_(left, right)


def add_rows(into: Tensor, rows: Tensor) -> None:
    """into (m,) += the sum of rows (n, m)."""
    if into.dtype == rows.dtype:
        into.addmv_(rows.mT, rows.new_ones(rows.size(0)))
    else:
        into += rows.sum(dim=0, dtype=into.dtype)
