"""A call of RPC-Attention, as its engines see it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernel_attention.core.engine import Unsupported
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings


class Heads(NamedTuple):
    """Keys, values and queries, (B, h, N, p); without queries the cleaned keys attend to themselves."""

    k: Tensor
    v: Tensor
    q: Tensor | None


class PursuitCall(NamedTuple):
    """The input and options of a call, and its heads once an engine is chosen.

    Attributes:
        x: (B, N, d).
        head_dim: p.
        settings: as of ``principal_attention_pursuit``.
        has_dropout: whether weights of the last step are dropped.
        heads: what is attended; None while an engine is being chosen.
    """

    x: Tensor
    head_dim: int
    settings: PursuitSettings
    has_dropout: bool
    heads: Heads | None = None

    def why_not(self) -> Unsupported | None:
        """The reason why no engine serves the call; None: some do."""
        return Unsupported("the faster forms have no dropout") if self.has_dropout else None
