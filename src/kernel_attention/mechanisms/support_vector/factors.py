"""The downsampling factors of Attention-SH's heads."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_attention.errors import InputError

_PAPER_FACTORS = {2: (1, 2), 4: (1, 1, 2, 4), 8: (1, 1, 2, 2, 4, 4, 8, 8)}


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
