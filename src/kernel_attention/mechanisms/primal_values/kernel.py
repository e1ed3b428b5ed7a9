"""The rank-s model of a kernel, as a module with its step-by-step form.

Legend as in ``kernel_attention.mechanisms.primal_values.functional``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.decoding import Position, State
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device, draw_orthogonal, reset_submodules
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.linear.decoding import RunningSum, linear_step, read_sum
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal_values.functional import primal_value_attention
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.affine import product_dtype, wide
from kernel_attention.tensors.features.feature_maps import (
    FeatureMapSpec,
    features_in_range,
    get_feature_map,
    identity,
    is_positive,
    is_tokenwise,
)
from kernel_attention.tensors.statistics import accumulation_dtype, divide, exactly, without_autocast


@dataclass(frozen=True)
class PrimalValueMemory(State):
    """The sum of r_j v_j^T, (B, h, s, p), and that of phi(k_j), (B, h, m, 1), where row sums divide."""

    values: RunningSum
    features: RunningSum | None


class PrimalValueKernel(AttentionKernel):
    """The kernel (phi(q)^T W_e) Lambda (W_r^T phi(k)) / n, with the weights as parameters.

    Args:
        head_dim: p.
        num_heads: h.
        rank: s.
        feature_map: phi; works token by token.
        by_row_sums: divide by the row sums of phi's kernel and not by n.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        rank: int,
        feature_map: FeatureMapSpec = "cosine",
        *,
        by_row_sums: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.by_row_sums = by_row_sums
        self.feature_map = get_feature_map(feature_map, head_dim, device=device, dtype=dtype)
        if not is_tokenwise(self.feature_map):
            raise InputError(
                f"feature_map={feature_map!r} is not known to work token by token; accepted: cosine, elu, "
                "identity, relu, taylor"
            )
        if by_row_sums and not is_positive(self.feature_map):
            raise InputError(
                f"normalize='rows' with feature_map={feature_map!r}: its kernel takes both signs, so the sum "
                "of a row may vanish; accepted: elu, relu, and taylor of even order"
            )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        num_features = self.feature_map(torch.zeros(1, 1, 1, head_dim, **where), None, True).size(-1)
        require_parameters(
            f"rank={rank} with {num_features} features of feature_map={feature_map!r}",
            2 * num_heads * num_features * rank,
            "lower rank",
        )
        self.w_e = nn.Parameter(torch.empty(num_heads, num_features, rank, **where))
        self.w_r = nn.Parameter(torch.empty(num_heads, num_features, rank, **where))
        self.sqrt_lambda = nn.Parameter(torch.empty(num_heads, rank, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """W_e = W_r with orthonormal columns in each head, Lambda = 1: phi's kernel in a random subspace.

        Where the rank reaches the number of features, this is phi's kernel itself.
        """
        reset_submodules(self)
        for part in self.w_e:
            draw_orthogonal(part)
        self.w_r.copy_(self.w_e)
        nn.init.ones_(self.sqrt_lambda)

    def scores(self, q: Tensor, k: Tensor) -> PrimalScores:
        """e (B, h, N, s) and r (B, h, S, s) of queries and keys, (B, h, N, p) and (B, h, S, p)."""
        return self._scores(*self.features(q, k))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        group: SequenceGroup | None = None,
        **_: Any,
    ) -> Tensor:
        """``weigh`` by the features of q and k. No weights are formed, so none are dropped."""
        return self.weigh(
            *self.features(q, k), v, attention_mask=attention_mask, is_causal=is_causal, group=group
        ).to(product_dtype(v))

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """phi of queries and keys, (B, h, N, m) and (B, h, S, m)."""
        q, k = (features_in_range(self.feature_map, x, None, True) for x in (q, k))
        return q, k

    def weigh(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """``primal_value_attention``, with its options, by the features of queries and keys.

        The outputs are in float32 in the place of float16.
        """
        phi_q, phi_k, v = wide(phi_q), wide(phi_k), wide(v)
        w_e, w_r, root = wide(self.w_e), wide(self.w_r), wide(self.sqrt_lambda)
        with without_autocast(v):
            # Lambda costs less on the weights than on the scores of every token.
            scores = PrimalScores(phi_q @ w_e, phi_k @ (w_r * root[:, None].square()))
            return primal_value_attention(
                scores, v,
                features=(phi_q, phi_k) if self.by_row_sums else None, **options,
            )  # fmt: skip

    def empty_memory(self, like: Tensor) -> PrimalValueMemory:
        """The sums of no keys and values."""
        sizes = like.size(0), like.size(1)
        dtype = accumulation_dtype(like.dtype)
        values = like.new_zeros(*sizes, self.w_r.size(2), like.size(3), dtype=dtype)
        features = like.new_zeros(*sizes, self.w_r.size(1), 1, dtype=dtype)
        return PrimalValueMemory(
            RunningSum(values, None, None), RunningSum(features, None, None) if self.by_row_sums else None
        )

    def read_memory(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1
    ) -> PrimalValueMemory:
        """The sums over a prompt; q, k, v are (B, h, N, p)."""
        phi_q, phi_k = self.features(q, k)
        e, r = self._scores(phi_q, phi_k)
        features = None
        if self.by_row_sums:
            features = read_sum(identity, False, phi_q, phi_k, torch.ones_like(v[..., :1]), lengths, factor)
        return PrimalValueMemory(read_sum(identity, False, e, r, v, lengths, factor), features)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: PrimalValueMemory, position: Position, factor: int = 1
    ) -> tuple[Tensor, PrimalValueMemory]:
        """Add one key and value to the sums and apply the query to them, (B, h, 1, p) each.

        The output is in float32 in the place of float16.
        """
        phi_q, phi_k = self.features(q, k)
        e, r = self._scores(phi_q, phi_k)
        phi_q, phi_k, v = wide(phi_q), wide(phi_k), wide(v)
        with without_autocast(v):
            e = e * exactly(self.sqrt_lambda)[:, None].square().to(e.dtype)
            out, values = linear_step(identity, False, e, r, v, memory.values, position, factor)
            if memory.features is None:
                seen = torch.as_tensor(position.tokens + 1, device=out.device).to(out.dtype)
                return out / seen.reshape(-1, 1, 1, 1), PrimalValueMemory(values, None)
            ones = torch.ones_like(v[..., :1])
            total, features = linear_step(
                identity, False, phi_q, phi_k, ones, memory.features, position, factor
            )
            return divide(out, total), PrimalValueMemory(values, features)

    def _scores(self, phi_q: Tensor, phi_k: Tensor) -> PrimalScores:
        phi_q, phi_k = wide(phi_q), wide(phi_k)
        with without_autocast(phi_q):
            return PrimalScores(phi_q @ wide(self.w_e), phi_k @ wide(self.w_r))

    def why_not_sharded(self) -> str | None:
        """None: the ranks add up their sums."""
        return None
