"""W_{b+1} = T_b W_b + X_b from W_0 = 0, one step after another or, on accelerators, in groups of steps.

A step of p x p matrices keeps an accelerator busy for less time than its launch takes. There the maps of a
group of steps are multiplied out, in all groups at once; the groups' ends follow by the same recursion, and
every state by one product from the start of its group. That is three times the operations, in launches that
grow with log n. No product of maps is longer than 1 where the maps are not.

Legend: B batch, h heads, n steps, p rows of the state, p_v columns, G steps of a group.
"""

from typing import Any

import torch
from torch import Tensor

from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    only_formulas,
)

_GROUP = 8


def recursion(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The state before every step, (B, h, n, p, p_v), and the last one, (B, h, p, p_v).

    Args:
        maps: T_b, (B, h, n, p, p).
        steps: X_b, (B, h, n, p, p_v).
    """
    if only_formulas() or type(maps) is not Tensor or torch.compiler.is_compiling():
        return _formula(maps, steps)
    found: tuple[Tensor, Tensor] = _Recursion.apply(maps, steps)
    return found


def _formula(maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    state, states = torch.zeros_like(steps[:, :, 0]), []
    for of_state, step in zip(maps.unbind(dim=2), steps.unbind(dim=2), strict=True):
        states.append(state)
        state = step + of_state @ state
    return torch.stack(states, dim=2), state


class _Recursion(torch.autograd.Function):
    """Its backward pass is the same backwards: dX_b = dW_{b+1}, dW_b = (what reads W_b) + T_b^T dW_{b+1}."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        order = None
        if has_groups(maps):
            after = by_groups(maps.flatten(0, 1), steps.flatten(0, 1)).view_as(steps)
            states, last = _shifted(after), after[:, :, -1]
            order = _backwards(maps)
        else:
            states, last = _formula(maps, steps)
        ctx.save_for_backward(maps, steps, states, order)
        return states, last

    @staticmethod
    def backward(ctx: Any, dstates: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        maps, steps, states, order = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((maps, steps), needed)
            return tuple(differentiable_gradients(_formula(*leaves), leaves, needed, [dstates, dlast]))
        reads = dlast[:, :, None], dstates[:, :, 1:]
        if order is None:
            dsteps = [dlast]
            for of_state, direct in zip(
                reversed(maps.unbind(dim=2)[1:]), reversed(reads[1].unbind(dim=2)), strict=True
            ):
                dsteps.append(direct + of_state.mT @ dsteps[-1])
            dstep = torch.stack(dsteps[::-1], dim=2)
        else:
            # From the last step to the first. The first map meets the start, 0.
            back = torch.cat(reads, dim=2).flatten(0, 1).index_select(1, order)
            dstep = by_groups(maps.flatten(0, 1).index_select(1, order).mT, back).view_as(steps).flip(2)
        return dstep @ states.mT, dstep


def has_groups(maps: Tensor) -> bool:
    """True where launches cost more than operations."""
    return maps.device.type != "cpu"


def _backwards(maps: Tensor) -> Tensor:
    """0, then the steps from the last one to the second."""
    count = maps.size(2)
    order = ("backwards", count), maps, lambda: -torch.arange(count, device=maps.device) % count
    return kept_constant(*order)


def by_groups(maps: Tensor, steps: Tensor) -> Tensor:
    """The state after every step, (R, n, p, p_v), of recursions (R, n, p, p) and (R, n, p, p_v)."""
    rows, count, size, width = steps.shape
    if count <= _GROUP:
        after = torch.empty_like(steps)
        after[:, 0] = steps[:, 0]
        for b in range(1, count):
            torch.baddbmm(steps[:, b], maps[:, b], after[:, b - 1], out=after[:, b])
        return after
    rest = -count % _GROUP
    if rest:
        maps, steps = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rest)) for x in (maps, steps))
    maps, steps = (x.unflatten(1, (-1, _GROUP)).flatten(0, 1) for x in (maps, steps))  # (R m, G, ..)
    # Row b of a group: T_b .. T_0 and the state after b from a start of 0, side by side.
    added, met = steps.new_zeros(2, *steps.shape[:3], size + width)
    met[:, 0, :, :size] = maps[:, 0]
    added[..., size:] = steps
    met[:, 0, :, size:] = steps[:, 0]
    for b in range(1, _GROUP):
        torch.baddbmm(added[:, b], maps[:, b], met[:, b - 1], out=met[:, b])
    ends = met[:, -1].unflatten(0, (rows, -1)).split([size, width], dim=-1)
    starts = _shifted(by_groups(*ends)).flatten(0, 1)
    # met[..., size:] + met[..., :size] @ starts
    products, own = met.flatten(1, 2).split([size, width], dim=-1)
    after = torch.baddbmm(own, products, starts)
    return after.view(rows, -1, size, width)[:, :count]


def _shifted(after: Tensor) -> Tensor:
    """The state before every step, from those after it, (.., n, p, p_v)."""
    return torch.nn.functional.pad(after[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
