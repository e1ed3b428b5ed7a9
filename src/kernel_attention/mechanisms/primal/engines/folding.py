"""The maps after the feature maps of primal attention, multiplied out: the same matrices for every token.

Legend as in ``fused``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.tensors.padding import first_rows
from kernel_attention.tensors.statistics import exactly


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

    The head dimension comes first, so that all sequences of a head share one product.

    Args:
        after: the weights.
        rows: f(X), (B, M, d); None where the weights do not depend on the sequence.
        group: processes that hold rows of the same sequences.
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
