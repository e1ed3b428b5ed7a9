"""The ways in which a layer can be used, and why not; attention between given queries, keys and values."""

from __future__ import annotations

from torch import Tensor, nn

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError


class Capabilities(nn.Module):
    """The ways in which a layer can be used with its options. A mechanism overrides the reasons.

    Attributes:
        sequence_group: the processes that share every sequence, see ``shard_sequence``; None where this
            process holds whole sequences.
    """

    sequence_group: SequenceGroup | None = None

    def supports(
        self,
        *,
        causal: bool = False,
        context: bool = False,
        decoding: bool = False,
        sharding: bool = False,
        packing: bool = False,
    ) -> bool:
        """True where this layer, with its options, can be used in all of these ways.

        Args:
            causal: with ``is_causal=True``.
            context: with a ``context`` (cross-attention).
            decoding: token by token, through ``initial_state``, ``step`` and ``prefill``.
            sharding: on sequences divided among processes; see
                [`shard_sequence`][kernel_attention.shard_sequence].
            packing: on sequences end to end in one row, with ``cu_seqlens``.
        """
        ways = {"context": context, "decoding": decoding, "sharding": sharding, "packing": packing}
        return self.why_not(causal=causal, **ways) is None

    def why_not(
        self,
        *,
        causal: bool = False,
        context: bool = False,
        decoding: bool = False,
        sharding: bool = False,
        packing: bool = False,
    ) -> str | None:
        """The reasons where ``supports`` is False; None where it is True. The arguments are the same."""
        reasons = []
        if context:
            reasons.append(self.why_not_context())
            if causal or decoding:
                reasons.append("is_causal=True cannot be combined with context")
            if sharding:
                reasons.append("only self-attention is sharded")
        if causal or decoding:
            reasons.append(self.why_not_causal())
        if decoding:
            sharded = sharding or self.sequence_group is not None
            reasons.append("a sharded sequence does not decode" if sharded else self.why_not_decoding())
        if sharding:
            reasons.append(self.why_not_sharded(causal))
        if packing:
            if context:
                reasons.append("context cannot be combined with packed sequences")
            if decoding:
                reasons.append("packed sequences do not decode")
            if sharding or self.sequence_group is not None:
                reasons.append("sequences that are divided among processes cannot be packed")
            reasons.append(self.why_not_packed())
        return next((reason for reason in reasons if reason is not None), None)

    def why_not_causal(self) -> str | None:
        """Why the layer has no causal form with its options; None where it has one."""
        return None

    def why_not_context(self) -> str | None:
        """Why the layer has no cross-attention with its options; None where it has it."""
        return "this mechanism has no cross-attention"

    def why_not_decoding(self) -> str | None:
        """Why the layer's causal form has no step-by-step form; None where it has one."""
        return "this mechanism has no step-by-step form: call it with is_causal=True on the whole prefix"

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why the layer cannot read sequences divided among processes; None where it can."""
        return "its attention needs every token of the sequence on one rank"

    def why_not_packed(self) -> str | None:
        """Why the layer cannot read several sequences end to end; None where it can, as where it pads."""
        return None

    def why_not_heads(self) -> str | None:
        """Why the layer cannot attend with queries, keys and values made elsewhere; None where it can."""
        return "its outputs are no weighted values: it needs the features that queries and keys are made of"


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
