"""Attention by a kernel of queries and keys that weighs the values. Most mechanisms are of this kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.decoding import Position, State, position_after, whole_lengths
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.parameters import Device, TensorLinear, can_join, joint_heads, joint_linear
from kernel_attention.tensors.padding import Compaction, compaction


@dataclass(frozen=True)
class QueryKeyValueState(State):
    """The number of tokens read, and what the kernel remembers of their keys and values."""

    position: Position
    memory: Any


class QueryKeyValueAttention(AttentionLayer):
    """Queries, keys and values of the input, a kernel, and the heads' output projection.

    A subclass sets ``kernel`` and calls ``add_projections``.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
    """

    kernel: AttentionKernel
    k_proj: nn.Linear | None
    dropout: float = 0.0
    symmetric: bool = False

    def add_projections(
        self,
        bias: bool,
        *,
        symmetric: bool = False,
        linear: type[nn.Linear] = nn.Linear,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make ``q_proj``, ``k_proj`` (None where queries serve as keys), ``v_proj`` and ``out_proj``.

        ``linear`` is the type of the first three.
        """
        width = self.embed_dim
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = linear(width, width, **options)
        self.k_proj = None if symmetric else linear(width, width, **options)
        self.v_proj = linear(width, width, **options)
        self.out_proj = TensorLinear(width, width, **options)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """Project the input, weigh the values by the kernel, and project what the heads give, (B, N, d)."""
        moved = self._compaction(attention_mask, is_causal)
        source = x if context is None else context
        if moved is not None:
            source, attention_mask = moved.apply(source), moved.attention_mask
            x = source if context is None else x
        if is_causal and self.sequence_group is None:
            attention_mask = None  # the padding is on the right now, where no real token attends
        heads = [
            out.transpose(1, 2)
            for out in self.head_outputs(x, source, attention_mask, is_causal, context is None)
        ]
        out = self.out_proj((heads[0] if len(heads) == 1 else torch.cat(heads, dim=2)).flatten(2))
        return (out if moved is None or context is not None else moved.undo(out)), None

    def head_outputs(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        is_self: bool,
        as_matrix: bool = False,
    ) -> Iterator[Tensor]:
        """The outputs of the heads, one group after the other, (B, heads, N, p) each.

        With ``as_matrix`` the identity replaces the values, so that the outputs are the weights.
        """
        yield self.weigh(*self.projected(x, source, as_matrix), mask, is_causal, is_self)

    def projected(self, x: Tensor, source: Tensor, as_matrix: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x (B, N, d), keys and values of ``source`` (B, S, d), by heads; see ``head_outputs``."""
        if source is x and not as_matrix and self.is_joint(x):
            return self._joint_heads(x)
        q, k = self.queries_and_keys(x, source)
        return q, k, identity_values(k) if as_matrix else self.split_heads(self.v_proj(source))

    def _maps(self) -> list[nn.Linear]:
        return [part for part in (self.q_proj, self.k_proj, self.v_proj) if part is not None]

    def is_joint(self, x: Tensor, *, on_cpu: bool = False) -> bool:
        """True where one product gives queries, keys and values of x sooner; ``on_cpu``: also there."""
        return (on_cpu or x.device.type != "cpu") and can_join(x, *self._maps(), on_cpu=on_cpu)

    def joint_projection(self, x: Tensor) -> Tensor:
        """Queries, keys (where they are not the queries) and values side by side, (B, N, 3 d)."""
        return joint_linear(x, *self._maps())

    def _joint_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x (B, N, d), (B, h, N, p) each, by one product."""
        q, *k, v = joint_heads(x, self.num_heads, *self._maps())
        return q, k[0] if k else q, v

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, is_self: bool
    ) -> Tensor:
        """The kernel's outputs of all heads, (B, h, N, p)."""
        return self.kernel(
            q,
            k,
            v,
            attention_mask=mask,
            query_mask=mask if is_self else None,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            **({} if self.sequence_group is None else {"group": self.sequence_group}),
        )

    def why_not_heads(self) -> str | None:
        """None: the kernel weighs the values."""
        return None

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The kernel between given queries and keys; symmetric attention takes the queries for keys."""
        is_self = q.size(2) == k.size(2)
        k = q if self.symmetric else k
        moved = self._compaction(attention_mask, is_causal) if is_self else None
        if moved is not None:
            q, k, v, attention_mask = *map(moved.apply, (q, k, v)), moved.attention_mask
        out = self.weigh(q, k, v, None if is_causal else attention_mask, is_causal, is_self)
        return out if moved is None else moved.undo(out)

    def queries_and_keys(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, h, N, p) of x and keys (B, h, S, p) of ``source``."""
        q = self.split_heads(self.q_proj(x))
        return q, q if self.k_proj is None else self.split_heads(self.k_proj(source))

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The matrix that multiplies the values, (B, h, N, N), zero in padded rows and columns; O(N^2)."""
        moved = self._compaction(attention_mask, False)
        if moved is not None:
            x, attention_mask = moved.apply(x), moved.attention_mask
        heads = list(self.head_outputs(x, x, attention_mask, False, True, as_matrix=True))
        matrix = heads[0] if len(heads) == 1 else torch.cat(heads, dim=1)
        if attention_mask is not None:
            matrix = matrix * (attention_mask[:, None, :, None] & attention_mask[:, None, None, :])
        return matrix if moved is None else moved.undo_matrix(matrix)

    def reads_positions(self) -> bool:
        """True where the outputs depend on the positions of the real tokens, apart from causality."""
        return self.kernel.reads_positions

    def _compaction(self, attention_mask: Tensor | None, is_causal: bool) -> Compaction | None:
        """How to move the real tokens together; None where positions do not matter."""
        if attention_mask is None or not (is_causal or self.reads_positions()):
            return None
        return compaction(attention_mask)

    def why_not_context(self) -> str | None:
        """A reason where the queries serve as keys too: a context has no keys of its own then."""
        return None if self.k_proj is not None else "queries that serve as keys have no cross-attention"

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """The kernel's own reason, causal or not."""
        return self.kernel.why_not_sharded()

    def no_elements(self) -> Tensor:
        """An empty tensor where the layer is, in its dtype; a quantized weight cannot make others like it."""
        weight = self.out_proj.weight
        return torch.empty(0, device=weight.device, dtype=weight.dtype)

    def start_decoding(self, batch_size: int) -> Any:
        """No tokens read, and the kernel's empty memory."""
        like = self.no_elements().new_empty(batch_size, self.num_heads, 0, self.head_dim)
        return QueryKeyValueState(Position(), self.kernel.empty_memory(like))

    def decode_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Add the token's key and value to the kernel's memory, then read the memory with its query."""
        q, k = self.queries_and_keys(x, x)
        v = self.split_heads(self.v_proj(x))
        out, memory = self.kernel.step(q, k, v, state.memory, state.position)
        return self.out_proj(self.merge_heads(out)), QueryKeyValueState(state.position.next(), memory)

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> Any:
        """Put the keys and values of the whole prompt into the kernel's memory at once."""
        q, k = self.queries_and_keys(x, x)
        v = self.split_heads(self.v_proj(x))
        memory = self.kernel.read_memory(q, k, v, whole_lengths(x, lengths))
        return QueryKeyValueState(position_after(x, lengths), memory)


def identity_values(x: Tensor) -> Tensor:
    """The identity, to be used as values: (B, h, N, p) -> (B, h, N, N)."""
    return torch.eye(x.size(2), dtype=x.dtype, device=x.device).expand(*x.shape[:2], -1, -1)
