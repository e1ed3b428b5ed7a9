"""The sampled rows that a token has seen: sums over the blocks before its own, and its own block's rows.

Causal data-dependent weights are W_{e|X} = sum_{m: t_m <= i} x_m W_e[m]^T at token i. A block of T tokens
reads the rows before it in that sum, a p x s matrix, and the rows of its own one by one. So the time is
linear in N, however many rows there are, and no N x M products are formed.

Legend: B batch, h heads, N tokens, p head width, s rank, M sampled rows, T tokens of a block, C rows at most
that lie in one block.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.tensors.recompute import can_ask, only_formulas
from kernel_attention.tensors.statistics import accumulation_dtype

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


def block_tokens(length: int, num_rows: int) -> int:
    """Tokens of a block, a power of two.

    A token meets the rows of its block, and a block has sums of its own. The factor was measured.
    """
    return 1 << max(5, min(9, round(5 + 0.5 * math.log2(max(length, 1) / max(num_rows, 1)))))


class RowPlaces(NamedTuple):
    """Which of the M rows lie in each block.

    Attributes:
        which: (B or 1, blocks, C) int64.
        is_other: where a block has fewer rows, so that ``which`` is another's, (B or 1, blocks, C) bool.
        seen: which of them a token has come to, (B or 1, blocks, T, C): integers with all bits set or none.
    """

    which: Tensor
    is_other: Tensor
    seen: Tensor


def own_places(
    rank: Tensor, grid: Tensor, block: int, dtype: torch.dtype, *, evenly_spaced: bool = False
) -> RowPlaces:
    """The rows at the ranks ``grid`` (M,), by blocks of ``block`` tokens of the ranks ``rank`` (B or 1, N).

    ``seen`` is as wide as a number of ``dtype``, which must hold the ranks. On an accelerator ``grid`` must
    be ``evenly_spaced``, over N tokens or more: how many rows a block has is then known without a question.
    """
    # floor(m s) lies in a block of T ranks for at most ceil(T / s) numbers m, and s is at least N / M.
    most = min(grid.numel(), -(-block * grid.numel() // max(rank.size(1), 1)))
    missing = -rank.size(1) % block
    if missing:
        rank = torch.cat([rank, rank[:, -1:].expand(-1, missing)], dim=1)
    rank = rank.unflatten(1, (-1, block))
    after = torch.searchsorted(grid, rank[..., -1].contiguous(), right=True)
    first = pad(after, (1, -1))  # rows that the blocks before have seen
    own = after - first
    if can_ask(grid) or not evenly_spaced:
        most = int(own.max()) if own.numel() else 0
    most = max(1, most)  # no size is 0 where no token is real
    index = first[..., None] + torch.arange(most, device=grid.device)
    is_other = index >= after[..., None]
    index.clamp_max_(grid.numel() - 1)
    bits = _BITS[dtype.itemsize]
    seen = grid.to(bits)[index][..., None, :] - (rank.to(bits) + 1)[..., None]
    return RowPlaces(index, is_other, seen.clamp_(-1, 0))


class OwnRows(NamedTuple):
    """The rows that lie in each block.

    Attributes:
        rows: (B, h, blocks, C, p), zero where a block has fewer.
        which: (B or 1, 1, blocks, C), and ``seen``, (B or 1, 1, blocks, T, C), as in ``RowPlaces``.
    """

    rows: Tensor
    which: Tensor
    seen: Tensor


def own_rows(rank: Tensor, rows: Tensor, grid: Tensor, block: int, *, evenly_spaced: bool = False) -> OwnRows:
    """The rows (B, h, M, p) at the ranks ``grid`` (M,), by blocks of ``block`` tokens.

    The tokens have the ranks ``rank`` (B or 1, 1, N); ``evenly_spaced`` as in ``own_places``.
    """
    which, is_other, seen = own_places(
        rank.squeeze(1), grid, block, accumulation_dtype(rows.dtype), evenly_spaced=evenly_spaced
    )
    which = which[:, None]
    return OwnRows(_at(rows, which).masked_fill(is_other[:, None, ..., None], 0.0), which, seen[:, None])


def own_weights(own: OwnRows, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (h, M, s) of each block's rows, and the sums over the rows of the blocks before.

    Returns:
        (B or 1, h, blocks, C, s), and (B, h, blocks, p, s) in float32 or better.
    """
    weights = _at(weight[None], own.which)
    sums = own.rows.mT @ weights
    sums = sums.to(accumulation_dtype(sums.dtype))
    return weights, pad(sums, (0, 0, 0, 0, 1, -1)).cumsum(dim=2)


def block_scores(phi: Tensor, rows: Tensor, seen: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    """The scores of phi (B, h, N, p), (B, h, N, s), by the rows and weights of each block."""
    length, block = phi.size(2), seen.size(3)
    missing = -length % block
    phi = (pad(phi, (0, 0, 0, missing)) if missing else phi).unflatten(2, (-1, block))
    products = with_seen(phi @ rows.mT, seen)
    return (phi @ before.to(phi.dtype) + products @ weights).flatten(2, 3)[:, :, :length]


def with_seen(products: Tensor, seen: Tensor) -> Tensor:
    """The products with the rows that a token has seen; 0 for the others, whatever they hold."""
    if only_formulas():
        return products.masked_fill(seen == 0, 0.0)
    return _WithSeen.apply(products, seen)


def clear_unseen(products: Tensor, seen: Tensor) -> Tensor:
    """``with_seen`` in place, not differentiable."""
    bits = _BITS[products.element_size()]
    products.view(bits).bitwise_and_(seen.to(bits))
    return products


class _WithSeen(torch.autograd.Function):
    """Masking by bits costs a tenth of what filling by booleans does."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        bits = _BITS[products.element_size()]
        return (products.view(bits) & seen.to(bits)).view(products.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _WithSeen.apply(grad, *ctx.saved_tensors), None


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values (B or 1, h, M, w) at index (B or 1, 1, blocks, C): (B or 1, h, blocks, C, w)."""
    if index.size(0) == 1:
        return values.index_select(2, index.flatten()).unflatten(2, index.shape[2:])
    wide = index.flatten(2)[..., None].expand(-1, values.size(1), -1, values.size(-1))
    return values.expand(index.size(0), -1, -1, -1).gather(2, wide).unflatten(2, index.shape[2:])
