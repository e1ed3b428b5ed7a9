"""The interface between a kernel of queries and keys and the layers that attend with it."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from kernel_attention.core.decoding import Position


class AttentionKernel(nn.Module, ABC):
    """A kernel between queries and keys that weighs the values.

    Attributes:
        shift_invariant: whether adding a constant to all logits of a query changes nothing.
        reads_positions: whether the kernel depends on the positions of the tokens.
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
        """The values, weighted by the kernel.

        Args:
            q: queries, (B, h, N, p).
            k: keys, (B, h, S, p), one for each block of ``factor`` tokens. With ``is_causal``, row i is the
                open block at token i (see ``kernel_attention.tensors.blocks``).
            v: values, (B, h, S, p_v), pooled like the keys.
            factor: tokens per key.
            attention_mask: (B, S), True = real key; right padding with ``is_causal`` and where the kernel
                reads positions.
            query_mask: (B, N), for kernels that normalise over the sequence.
            is_causal: token i sees the completed blocks before its own block, and its own block up to itself.
            dropout_p: probability of dropping a weight, for kernels that form weights.
            options: further arguments of one kernel.

        Returns:
            (B, h, N, p_v).
        """

    @abstractmethod
    def empty_memory(self, like: Tensor) -> Any:
        """The memory before the first token; ``like`` (B, h, N, p) gives sizes, precision and device."""

    @abstractmethod
    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> Any:
        """The memory after a prompt: q, k, v (B, h, N, p); row i of k and v is the open block at token i."""

    @abstractmethod
    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: Any, position: Position, factor: int = 1
    ) -> tuple[Tensor, Any]:
        """The output of one token, (B, h, 1, p), and the memory with it; q, k, v (B, h, 1, p)."""

    def why_not_sharded(self) -> str | None:
        """Why the kernel needs every key on one rank; None where ranks can add up their sums."""
        return "a softmax needs every key on one rank; the kernel 'linear' does not"
