"""Dropout whose masks cost less than PyTorch's on a CPU.

PyTorch draws a random number for every entry there, which was a quarter of the training step of a small
encoder. Here one draw of 64 bits decides about four entries, by 16 bits each. The probability is therefore
rounded to a multiple of 2^-16. What stays is divided by the rounded probability of staying, which keeps the
mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.tensors.recompute import is_traced

_LEVELS = 2**16  # the values of the bits that decide about an entry
_PER_DRAW = 4  # entries that a draw decides about


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` by the masks of this module.

    Args:
        p: probability of dropping an entry.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape, with each entry either 0 or divided by 1 - p in training."""
        return dropout(x, self.p) if self.training else x


def dropout(x: Tensor, p: float) -> Tensor:
    """x with each entry 0 with probability p, and divided by 1 - p otherwise.

    This is ``torch.nn.functional.dropout`` itself on other devices, in 16-bit precision, and where a compiler
    or a transform of torch.func looks on.
    """
    dropped = round(p * _LEVELS)
    if dropped in (0, _LEVELS) or not draws_masks(x):
        return F.dropout(x, p)
    factors = torch.empty_like(x)  # dense, in the layout of x
    _draw(factors.as_strided((x.numel(),), (1,)), dropped)
    return x * factors


def keep_factors(shape: Sequence[int], p: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Factors of dropout on a CPU: 0 with probability p, and 1 / (1 - p) otherwise."""
    dropped = round(p * _LEVELS)
    if dropped in (0, _LEVELS):
        return torch.full(shape, float(dropped == 0), dtype=dtype)
    factors = torch.empty(shape, dtype=dtype)
    _draw(factors.view(-1), dropped, generator)
    return factors


def _draw(factors: Tensor, dropped: int, generator: torch.Generator | None = None) -> None:
    """Fill a vector with factors, of which the share ``dropped`` / 2^16 is 0."""
    draws = torch.empty(-(-factors.numel() // _PER_DRAW), dtype=torch.int64)
    levels = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: factors.numel()]
    torch.ge(levels, dropped - _LEVELS // 2, out=factors)
    factors.mul_(_LEVELS / (_LEVELS - dropped))


def draws_masks(x: Tensor) -> bool:
    """True where the masks for x are drawn here, and not by PyTorch."""
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and not is_traced()
    )
