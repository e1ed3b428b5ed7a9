"""The causal data-dependent layer in few launches, for accelerators.

As in ``seen_rows``, a block of tokens shares the sum over the rows of the blocks before, and meets the few
rows of its own one by one; queries and keys do so together. The concat map is multiplied into the rows'
weights first, so that nothing of the rank's size grows with the tokens. Which rows lie in which block depends
on sizes alone where no token is padding, and is kept from step to step.

Legend: B batch, N tokens, h heads, p head width, M sampled rows, T tokens of a block, K blocks, C rows of a
block at most. The first dimension of what queries and keys share is 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.mechanisms.primal.one_pass import PrimalCall, PrimalResult, PrimalWeights
from kernel_attention.tensors.affine import apply_affine, autocast, joint_affine
from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.features.feature_maps import cosine
from kernel_attention.tensors.padding import real_first
from kernel_attention.tensors.sampling import causal_grid, required_max_len, rows_before
from kernel_attention.tensors.statistics import (
    accumulation_dtype,
    exactly,
    running_mean,
    token_ranks,
    without_autocast,
)
from kernel_attention.tensors.unit_rows import unit_by_head


class _Places(NamedTuple):
    """Where the blocks' rows lie.

    Attributes:
        tokens: of the sequence, (B or 1, K C) int64.
        which: of the M rows, (B or 1, K C) int64.
        present: which of them exist, (B or 1, K, C, 1), 0 and 1 in float32.
        seen: which of them a token has come to, (B or 1, K, T, C), likewise.
    """

    tokens: Tensor
    which: Tensor
    present: Tensor
    seen: Tensor


def causal_primal_launches(call: PrimalCall) -> PrimalResult:
    """The output of the causal data-dependent layer, up to rounding that of the formulas; no energy."""
    weights, x, heads = call.weights, call.x, call.num_heads
    assert isinstance(weights, PrimalWeights)
    batch, length, width = x.shape
    size, rank = width // heads, weights.w_e.size(-1)
    reached = rows_before(length, call.num_rows, required_max_len(call.max_len, length))
    block = seen_rows.block_tokens(length, reached)
    places = _places(call, block)
    mean = x
    if call.running_means:  # an affine map of the mean is the mean of the map
        mean = running_mean(x[:, None], call.attention_mask).squeeze(1)
    elif call.attention_mask is not None:
        mean = x.masked_fill(~call.attention_mask[..., None], 0.0)  # padding may hold any value, also NaN
    missing = -length % block
    mean = autocast(pad(mean, (0, 0, 0, missing)) if missing else mean)
    z = joint_affine(mean, [weights.q_proj, weights.k_proj]).unflatten(-1, (2, heads, size))
    with without_autocast(z):
        # (2, B, h, M T, p), which is (2, B h K, T, p)
        unit = unit_by_head(z.permute(0, 3, 1, 2, 4), (4,) if call.feature_map is cosine else None)
        unit = unit.view(-1, block, size)
        by_head = exactly(x).unflatten(-1, (heads, size)).transpose(1, 2)
        rows = _at(by_head.expand(2, -1, -1, -1, -1), places.tokens)
        joint = torch.stack([exactly(weights.w_e), exactly(weights.w_r)]).flatten(1, 2)
        concat = exactly(weights.concat[0]).unflatten(1, (2, rank)).permute(1, 2, 0)
        own = torch.bmm(joint, concat).unflatten(1, (heads, -1))[:, None]  # (2, 1, h, M, p)
        own = _at(own.expand(-1, places.which.size(0), -1, -1, -1), places.which)
        shape = (2, -1, heads, *places.present.shape[1:3], size)
        own = (own.view(shape) * places.present[:, None]).expand(-1, batch, -1, -1, -1, -1)
        own, rows = (each.reshape(-1, *each.shape[-2:]) for each in (own, rows.view(shape)))
        sums = torch.bmm(rows.mT, own).view(2 * batch * heads, -1, size, size)
        before = pad(sums, (0, 0, 0, 0, 1, -1)).cumsum(dim=1).flatten(0, 1).to(unit.dtype)
        products = torch.bmm(unit, rows.mT.to(unit.dtype)).view(2, batch, heads, *places.seen.shape[1:])
        products = (products * places.seen[:, None].to(unit.dtype)).view(-1, *places.seen.shape[2:])
        found = torch.baddbmm(torch.bmm(products, own.to(unit.dtype)), unit, before)
        out = found.view(2, batch, heads, -1, size).sum(dim=0)[:, :, :length]
        if weights.concat[1] is not None:
            out = out + weights.concat[1].to(out.dtype)
        out = out.transpose(1, 2).flatten(2)
    return PrimalResult(apply_affine(out, weights.out_proj), None, None)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values (2, B, h, n, p) at index (B or 1, m): (2, B, h, m, p)."""
    if index.size(0) == 1:
        return values.index_select(3, index[0])
    return values.gather(3, index[None, :, None, :, None].expand(2, -1, values.size(2), -1, values.size(4)))


def _places(call: PrimalCall, block: int) -> _Places:
    x, mask = call.x, call.attention_mask
    if mask is None:
        key = "places", call.num_rows, call.max_len, x.size(1), block, x.dtype
        return kept_constant(key, x, lambda: _made(call, block))
    return _made(call, block)


def _made(call: PrimalCall, block: int) -> _Places:
    x, mask = call.x, call.attention_mask
    grid = causal_grid(x, call.num_rows, call.max_len)
    rank = token_ranks(x.size(1), mask, x.device).squeeze(1)
    dtype = accumulation_dtype(x.dtype)
    which, is_other, seen = seen_rows.own_places(rank, grid, block, dtype, evenly_spaced=True)
    tokens = grid[which].flatten(1)
    if mask is not None:
        tokens = real_first(mask)[0].gather(1, tokens)
    return _Places(tokens, which.flatten(1), (~is_other).to(dtype)[..., None], (seen != 0).to(dtype))
