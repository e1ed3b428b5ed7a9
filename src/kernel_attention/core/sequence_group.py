"""Sums over sequences that are divided into parts, one part for each process of a group.

Every sum here is differentiable. Its gradient is that of the *sum of all ranks' losses* with respect to this
rank's contribution. DistributedDataParallel averages a parameter's gradients over the ranks. The result is
therefore the gradient of the mean of the ranks' losses, however much of the computation they share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernel_attention.tensors.convolution import last_rows
from kernel_attention.tensors.padding import real_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SequenceGroup:
    """The processes that hold the parts of every sequence, in the order of their ranks.

    A copy of a layer shares it. A pickle leaves it out, because another process has groups of its own.

    Args:
        group: the process group; None: the default one.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, for x of any shape that all share; one all-reduce each way."""
        return _Total.apply(x, self)

    def before(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks before this one, zero on the first; one all-gather each way."""
        return _Others.apply(x, self, True)

    def places(self, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of counts (B,) int64 over the ranks before this one, and over all ranks."""
        counts = self._gather(num_tokens)
        return counts[: self.rank].sum(dim=0), counts.sum(dim=0)

    def neighbours(
        self, x: Tensor, attention_mask: Tensor | None, before: int, after: int
    ) -> tuple[Tensor, Tensor]:
        """The ``before`` and ``after`` real tokens next to this rank's part x (B, N, d), zeros beyond the
        sequence.

        All ranks ask for as many. ``attention_mask`` (B, N), True = real token; None: all. The results are
        (B, before, d) and (B, after, d). Every rank sends the ends of its part, of whatever length.
        """
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        real = real if attention_mask is None else attention_mask
        own, count = _together(x, real)
        counts = self._gather(count)[..., None]  # (ranks, B, 1)
        ends = torch.cat([last_rows(own, count, before), _first_rows(own, count, after)], dim=1)
        zeros = torch.zeros_like(ends)  # every rank adds its own ends to the zeros of the others
        slots = torch.stack([ends if rank == self.rank else zeros for rank in range(self.size)])
        lasts, firsts = self.total(slots).split([before, after], dim=2)
        rank = torch.arange(self.size, device=x.device)[:, None, None]
        place = torch.arange(max(before, after), device=x.device)
        earlier = (rank < self.rank) & (place[:before] >= before - counts)
        later = (rank > self.rank) & (place[:after] < counts)
        lasts, firsts, earlier, later = (
            each.transpose(0, 1).flatten(1, 2) for each in (lasts, firsts, earlier, later)
        )
        return last_rows(*_together(lasts, earlier), before), _first_rows(*_together(firsts, later), after)

    def _reduce(self, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def _gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.stack(parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()


def _together(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, N, d) with the real tokens first and zeros behind them, and their number (B,)."""
    order, _ = real_first(real)
    moved = x.masked_fill(~real[..., None], 0.0).gather(1, order[..., None].expand_as(x))
    return moved, real.sum(dim=1)


def _first_rows(x: Tensor, count: Tensor, size: int) -> Tensor:
    """The first ``size`` of the ``count`` (B,) real rows, zeros behind them: (B, N, d) -> (B, size, d)."""
    index = torch.arange(size, device=x.device).expand(x.size(0), -1)
    rows = x.gather(1, index.clamp_max(x.size(1) - 1)[..., None].expand(-1, -1, x.size(2)))
    return rows.masked_fill((index >= count[:, None])[..., None], 0.0)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group._reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grad, ctx.group), None


class _Others(torch.autograd.Function):
    """Sum over the ranks before this one, or over those after it; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, before: bool) -> Tensor:
        ctx.group, ctx.before = group, before
        parts = group._gather(x)
        return (parts[: group.rank] if before else parts[group.rank + 1 :]).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Others.apply(grad, ctx.group, not ctx.before), None, None
