"""What a kernel of queries and keys is to the layers that attend with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from kernel_attention.core.decoding import Position


class AttentionKernel(nn.Module, ABC):
    """A kernel between queries and keys, and what it makes of the values.

    Attributes:
        shift_invariant: whether what is added to all logits of a query changes nothing.
        reads_positions: whether the kernel depends on where a token stands.
    """

    shift_invariant = False
    reads_positions = False

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        factor: int = 1,
        attention_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> Tensor:
        """The values weighed.

        Args:
            q: queries, (B, h, N, p).
            k: keys, (B, h, S, p): blocks of ``factor`` tokens, or with ``is_causal`` row i the open block at
                token i ([`blocks`][kernel_attention.tensors.blocks]).
            v: values likewise, (B, h, S, p_v).
            factor: tokens per key.
            attention_mask: (B, S), True = real key; right padding with ``is_causal`` and where the kernel
                reads positions.
            query_mask: (B, N), for kernels that normalise over the sequence.
            is_causal: token i sees the completed blocks before its own, and its own up to itself.
            dropout_p: probability of dropping a weight, where weights are formed.
            options: what only one kernel takes.

        Returns:
            (B, h, N, p_v).
        """

    @abstractmethod
    def empty_memory(self, like: Tensor) -> Any:
        """What decoding remembers before the first token; ``like`` (B, h, N, p) says sizes and precision."""

    @abstractmethod
    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> Any:
        """What it remembers of a prompt: q, k, v (B, h, N, p), rows of k and v the open block at token i."""

    @abstractmethod
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: Any, position: Position, factor: int = 1
    ) -> tuple[Tensor, Any]:
        """One token's output (B, h, 1, p), and the memory with it; q, k, v (B, h, 1, p)."""

    def why_not_sharded(self) -> str | None:
        """Why the kernel needs every key in one place; None where its sums can be shared."""
        return "a softmax needs every key on one rank; the kernel 'linear' does not"
