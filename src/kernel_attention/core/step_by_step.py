"""Causal decoding, one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.capabilities import Capabilities
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError
from kernel_attention.tensors.padding import compaction


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
