"""The ways in which a layer can be used, and why not: with given queries, keys and values; step by step."""

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError, require_positive
from kernel_attention.tensors.padding import compaction


class Capabilities(nn.Module):
    """The ways in which a layer can be used with its options. A mechanism overrides the reasons.

    ``sequence_group`` are the processes that share every sequence, see ``shard_sequence``; None: whole
    sequences are here.
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


class StepByStep(Capabilities):
    """The step-by-step form of a causal layer.

    A mechanism that has one overrides ``start_decoding``, ``decode_token`` and ``read_prompt`` together.
    """

    embed_dim: int

    def start_decoding(self, batch_size: int) -> Any:
        """The state before the first token."""
        raise InputError(f"{type(self).__name__} does not decode step by step")

    def decode_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One token: x (B, 1, d) -> output (B, 1, d), and the state with it."""
        raise InputError(f"{type(self).__name__} does not decode step by step")

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> Any:
        """The state after a prompt x (B, N, d), in parallel.

        ``lengths`` (B,) int64 is the number of real tokens of each sequence. They come first, and the rest of
        x is zero. None: all tokens are real.
        """
        raise InputError(f"{type(self).__name__} does not decode step by step")

    @torch.no_grad()
    def initial_state(self, batch_size: int) -> Any:
        """The state of causal decoding before the first token, in the weights' precision and on their device.

        Raises:
            InputError: for a mechanism, or options, without a step-by-step form.
        """
        require_positive(batch_size=batch_size)
        self._require_decoding()
        return self.start_decoding(batch_size)

    @torch.no_grad()
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Decode one token: the output that ``forward`` with ``is_causal=True`` gives it in evaluation mode.

        Gradients and dropout are off.

        Args:
            x: the token, (B, d).
            state: the state after the tokens before. The call may write into it. You can go back to it. To
                continue it in two ways, copy it with ``kernel_attention.functional.reorder``.

        Returns:
            The output (B, d), and the state after the token.

        Raises:
            InputError: for a wrong shape, or a mechanism without a step-by-step form.
        """
        if x.dim() != 2 or x.size(-1) != self.embed_dim:
            raise InputError(
                f"{type(self).__name__}.step: x has shape {tuple(x.shape)}, expected (B, {self.embed_dim})"
            )
        self._require_decoding()
        y, state = self.decode_token(x[:, None], state)
        return y[:, 0], state

    @torch.no_grad()
    def prefill(self, x: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Read a prompt in parallel: the causal output, and the state after each sequence's real tokens.

        Args:
            x: (B, N, d).
            attention_mask: (B, N), True = real token; prompts may differ in length.

        Returns:
            y (B, N, d), and the state to continue from.
        """
        self._require_decoding()
        y = self(x, attention_mask=attention_mask, is_causal=True)
        return y, self.state_after(x, attention_mask)

    @torch.no_grad()
    def state_after(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        """The state that ``prefill`` returns, without the output: x (B, N, d), attention_mask (B, N)."""
        self._require_decoding()
        if attention_mask is None:
            return self.read_prompt(x, None)
        x = x.masked_fill(~attention_mask[..., None], 0.0)
        moved = compaction(attention_mask)
        return self.read_prompt(x if moved is None else moved.apply(x), attention_mask.sum(dim=1))

    def _require_decoding(self) -> None:
        reason = self.why_not(decoding=True)
        if reason is not None:
            raise InputError(f"{type(self).__name__} does not decode step by step: {reason}")

    def why_not_decoding(self) -> str | None:
        """The reason of a mechanism without the form; None where it has it."""
        has_form = type(self).decode_token is not StepByStep.decode_token
        return None if has_form else super().why_not_decoding()
