"""The rank-s model of a kernel, as a module with its step-by-step form.

Legend as in ``kernel_attention.mechanisms.primal_values.functional``.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.decoding import Position, State
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device, draw_orthogonal, reset_submodules
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.linear.decoding import RunningSum, linear_step, read_sum
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal_values.functional import Readout, primal_value_attention
from kernel_attention.mechanisms.regression.decoding import RidgeMemory, read_ridge, ridge_step
from kernel_attention.mechanisms.regression.layer import inverse_softplus
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
    """The sum of r_j v_j^T, (B, h, s, p), and what the normalisation and the readout keep beside it.

    That of phi(k_j), (B, h, m, 1), where row sums divide; that of r_j (A v)_j^T where twicing reads it. Ridge
    regression keeps the sum of r_j r_j^T as well.
    """

    values: RunningSum | RidgeMemory
    features: RunningSum | None = None
    smoothed: RunningSum | None = None


class PrimalValueKernel(AttentionKernel):
    """The kernel (phi(q)^T W_e) Lambda (W_r^T phi(k)) / n, with the weights as parameters.

    Args:
        head_dim: p.
        num_heads: h.
        rank: s.
        feature_map: phi; works token by token.
        by_row_sums: divide by the row sums of phi's kernel and not by n.
        readout: see ``primal_value_attention``.
        lam: lambda of "ridge" at the start, learnt for each head.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        rank: int,
        feature_map: FeatureMapSpec = "cosine",
        *,
        by_row_sums: bool = False,
        readout: Readout = "correlation",
        lam: float,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.by_row_sums = by_row_sums
        self.readout: Readout = readout
        self.first_lambda = lam
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
        self.raw_lambda = nn.Parameter(torch.empty(num_heads, **where)) if readout == "ridge" else None
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
        if self.raw_lambda is not None:
            nn.init.constant_(self.raw_lambda, inverse_softplus(self.first_lambda))

    @property
    def lam(self) -> Tensor:
        """lambda of the ridge regression, (h,)."""
        assert self.raw_lambda is not None
        return nn.functional.softplus(exactly(self.raw_lambda))

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
        if self.readout == "ridge":
            with without_autocast(q):
                return self.feature_map(exactly(q), None, True), self.feature_map(exactly(k), None, True)
        q, k = (features_in_range(self.feature_map, x, None, True) for x in (q, k))
        return q, k

    def weigh(self, phi_q: Tensor, phi_k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """``primal_value_attention``, with its options, by the features of queries and keys.

        The outputs are in float32 in the place of float16.
        """
        cast = self._cast
        phi_q, phi_k, v = cast(phi_q), cast(phi_k), cast(v)
        w_e, w_r, root = cast(self.w_e), cast(self.w_r), cast(self.sqrt_lambda)
        features = (phi_q, phi_k) if self.by_row_sums else None
        with without_autocast(v):
            # Lambda costs less on the weights than on the scores of every token.
            if self.raw_lambda is not None:
                scores = PrimalScores(phi_q @ (w_e * root[:, None]), phi_k @ (w_r * root[:, None]))
                return primal_value_attention(scores, v, readout="ridge", lam=self.lam, **options)
            scores = PrimalScores(phi_q @ w_e, phi_k @ (w_r * root[:, None].square()))
            options = {"readout": self.readout, **options}
            return primal_value_attention(scores, v, features=features, **options)

    def empty_memory(self, like: Tensor) -> PrimalValueMemory:
        """The sums of no keys and values."""
        like = like.new_empty(*like.shape[:2], 0, like.size(3), dtype=accumulation_dtype(like.dtype))
        rank, width, p = self.w_r.size(2), self.w_r.size(1), like.size(3)
        if self.raw_lambda is not None:
            gram, target = (like.new_zeros(*like.shape[:2], rank, size) for size in (rank, p))
            return PrimalValueMemory(RidgeMemory(gram, target, None, None))

        def empty(rows: int, columns: int) -> RunningSum:
            return RunningSum(like.new_zeros(*like.shape[:2], rows, columns), None, None)

        return PrimalValueMemory(
            empty(rank, p),
            empty(width, 1) if self.by_row_sums else None,
            empty(rank, p) if self.readout == "twicing" else None,
        )

    def read_memory(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1
    ) -> PrimalValueMemory:
        """The sums over a prompt; q, k, v are (B, h, N, p)."""
        phi_q, phi_k = self.features(q, k)
        e, r = self._scores(phi_q, phi_k)
        if self.raw_lambda is not None:
            with without_autocast(v):
                e, r = self._by_root(e, r)
                return PrimalValueMemory(read_ridge(identity, None, e, r, v, lengths))
        features = smoothed = None
        if self.by_row_sums:
            features = read_sum(identity, False, phi_q, phi_k, torch.ones_like(v[..., :1]), lengths, factor)
        if self.readout == "twicing":
            once = self.weigh(phi_q, phi_k, v, is_causal=True, readout="correlation")
            smoothed = read_sum(identity, False, e, r, once, lengths, factor)
        return PrimalValueMemory(read_sum(identity, False, e, r, v, lengths, factor), features, smoothed)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: PrimalValueMemory, position: Position, factor: int = 1
    ) -> tuple[Tensor, PrimalValueMemory]:
        """Add one key and value to the sums and apply the query to them, (B, h, 1, p) each.

        The output is in float32 in the place of float16.
        """
        phi_q, phi_k = self.features(q, k)
        e, r = self._scores(phi_q, phi_k)
        phi_q, phi_k, v = self._cast(phi_q), self._cast(phi_k), self._cast(v)
        with without_autocast(v):
            if isinstance(memory.values, RidgeMemory):
                e, r = self._by_root(e, r)
                out, fitted = ridge_step(identity, self.lam, None, e, r, v, memory.values, position)
                return out, PrimalValueMemory(fitted)
            e = e * exactly(self.sqrt_lambda)[:, None].square().to(e.dtype)
            add = functools.partial(linear_step, identity, False, position=position, factor=factor)
            out, values = add(e, r, v, memory.values)
            if memory.features is None:
                features = None
                total = torch.as_tensor(position.tokens + 1, device=v.device).to(v.dtype).reshape(-1, 1, 1, 1)
            else:
                total, features = add(phi_q, phi_k, torch.ones_like(v[..., :1]), memory.features)
            out = out / total if features is None else divide(out, total)
            if memory.smoothed is None:
                return out, PrimalValueMemory(values, features)
            twice, smoothed = add(e, r, out, memory.smoothed)
            twice = twice / total if features is None else divide(twice, total)
            return 2 * out - twice, PrimalValueMemory(values, features, smoothed)

    def _by_root(self, e: Tensor, r: Tensor) -> PrimalScores:
        """Scores that share Lambda between them."""
        root = exactly(self.sqrt_lambda)[:, None].to(e.dtype)
        return PrimalScores(e * root, r * root)

    def _scores(self, phi_q: Tensor, phi_k: Tensor) -> PrimalScores:
        phi_q, phi_k = self._cast(phi_q), self._cast(phi_k)
        with without_autocast(phi_q):
            return PrimalScores(phi_q @ self._cast(self.w_e), phi_k @ self._cast(self.w_r))

    def _cast(self, x: Tensor) -> Tensor:
        """x in the precision of the scores: float32 or better for a regression on them."""
        return exactly(x) if self.readout == "ridge" else wide(x)

    def why_not_sharded(self) -> str | None:
        """None: the ranks add up their sums."""
        return None
