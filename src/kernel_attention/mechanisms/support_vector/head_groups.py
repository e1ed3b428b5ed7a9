"""Groups of neighbouring heads that attend to a sequence pooled by one factor (Attention-SH).

Source: Nguyen, Nguyen, Ho, Bertozzi, Baraniuk, Osher, "A Primal-Dual Framework for Transformers and Neural
Networks", ICLR 2023, eq. 25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.core.parameters import is_plain
from kernel_attention.errors import InputError
from kernel_attention.tensors.padding import is_exporting

_PAPER_FACTORS = {2: (1, 2), 4: (1, 1, 2, 4), 8: (1, 1, 2, 2, 4, 4, 8, 8)}


class HeadGroup(NamedTuple):
    """Neighbouring heads of one factor.

    Pooling commutes with the projections, so it comes first and leaves M rows to project.

    Attributes:
        factor: tokens per key.
        queries: (B, heads, N, p).
        project_keys: the keys of pooled tokens, (B, M, d) -> (B, heads, M, p).
        project_values: their values.
    """

    factor: int
    queries: Tensor
    project_keys: Callable[[Tensor], Tensor]
    project_values: Callable[[Tensor], Tensor]


def project_groups(
    x: Tensor, q_proj: nn.Linear, k_proj: nn.Linear, v_proj: nn.Linear, factors: Sequence[int]
) -> Iterator[HeadGroup]:
    """The groups of heads of these factors, with the queries of the tokens x (B, N, d).

    The parts of one split have one gradient, put together from theirs; slices would add up matrices of
    full size.
    """
    queries, groups = _by_heads(q_proj(x), len(factors)), head_groups(factors)
    if len(groups) == 1:
        k, v = (lambda x, p=p: _by_heads(p(x), len(factors)) for p in (k_proj, v_proj))
        yield HeadGroup(groups[0][1], queries, k, v)
        return
    sizes = [heads.stop - heads.start for heads, _ in groups]
    parts = (_projections(linear, [heads for heads, _ in groups]) for linear in (k_proj, v_proj))
    for (_, factor), *group in zip(groups, queries.split(sizes, dim=1), *parts, strict=True):
        yield HeadGroup(factor, *group)


def _projections(linear: nn.Linear, groups: Sequence[slice]) -> list[Callable[[Tensor], Tensor]]:
    """The projection to the heads of every group, (B, M, d) -> (B, heads, M, p)."""
    num_heads = groups[-1].stop
    if not is_plain(linear):  # an adapter or a hook knows the product of all heads only
        return [partial(_project_all, linear=linear, num_heads=num_heads, heads=heads) for heads in groups]
    sizes = [heads.stop - heads.start for heads in groups]
    rows = [size * linear.out_features // num_heads for size in sizes]
    biases = [None] * len(sizes) if linear.bias is None else linear.bias.split(rows)
    return [
        partial(_project, weight=weight, bias=bias, num_heads=size)
        for size, weight, bias in zip(sizes, linear.weight.split(rows), biases, strict=True)
    ]


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    """Project tokens to some heads: (B, M, d) -> (B, num_heads, M, p).

    Under torch.export it is a product per sequence: the exporter cannot prove that batch and tokens flatten
    to one dimension at length ceil(N / factor).
    """
    if not is_exporting():
        out = nn.functional.linear(x, weight, bias)
    else:
        out = torch.bmm(x, weight.mT.expand(x.size(0), -1, -1))
        out = out if bias is None else out + bias
    return _by_heads(out, num_heads)


def _project_all(x: Tensor, linear: nn.Module, num_heads: int, heads: slice) -> Tensor:
    """Project tokens to all heads by a call, and keep some: (B, M, d) -> (B, heads, M, p)."""
    return _by_heads(linear(x), num_heads)[:, heads]


def _by_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, M, h p) -> (B, h, M, p)."""
    if num_heads == 1:  # a transposed dimension of 1 has a stride that torch.export compares with the others
        return x.unsqueeze(1)
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def head_groups(factors: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of neighbouring heads with the same factor: [1, 1, 2] -> [(slice(0, 2), 1), (slice(2, 3), 2)]."""
    groups, start = [], 0
    for factor, run in groupby(factors):
        stop = start + len(list(run))
        groups.append((slice(start, stop), factor))
        start = stop
    return groups


def default_factors(num_heads: int) -> tuple[int, ...]:
    """The paper's factors for 2 (LRA), 4 (DeiT) and 8 heads (UEA); 1 and 2 for other numbers of heads.

    Half of the heads then have factor 1, and the rest have factor 2. An odd head has factor 1.
    """
    half = (num_heads + 1) // 2
    return _PAPER_FACTORS.get(num_heads, (1,) * half + (2,) * (num_heads - half))


def checked_factors(factors: int | Sequence[int] | None, num_heads: int) -> tuple[int, ...]:
    """One factor for each head; InputError for anything else."""
    if factors is None:
        return default_factors(num_heads)
    values = (factors,) * num_heads if isinstance(factors, int) else tuple(factors)
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values)
    if not whole or len(values) != num_heads:
        raise InputError(
            f"factors={factors!r} must be a whole number of at least 1, or a list of one for each of "
            f"num_heads={num_heads}"
        )
    return values
