"""Attention between queries, keys and values that are made elsewhere: in a host's layer, say."""

from __future__ import annotations

from torch import Tensor

from kernel_attention.core.capabilities import Capabilities
from kernel_attention.errors import InputError


class GivenHeads(Capabilities):
    """The mechanism between the projections.

    A mechanism that weighs values by queries and keys overrides ``attend_heads`` and ``why_not_heads``.
    """

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The mechanism between the projections: q (B, h, N, p), k and v (B, h, S, p) -> (B, h, N, p).

        Symmetric attention takes the queries for keys.

        Args:
            q: queries.
            k: keys.
            v: values.
            attention_mask: bool over the keys, (B, S); True = real token.
            is_causal: output i depends on the tokens up to i only; S = N then.
        """
        raise InputError(f"{type(self).__name__} cannot attend with given heads: {self.why_not_heads()}")

    def reads_queries_alone(self) -> bool:
        """True where a causal output needs no query but its own: a cache of keys and values will do."""
        return False

    def drop_projections(self) -> None:
        """Remove what ``attend_heads`` does not use. The layer cannot be called afterwards."""
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, None)
