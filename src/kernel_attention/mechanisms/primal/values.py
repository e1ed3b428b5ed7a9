"""Primal attention with values: the rank-s model of a kernel, applied to the tokens' values.

Primal-Attention's scores are the features of a low-rank model of its kernel, K = E Lambda R^T (theorem 3.2:
at the kernel SVD it is the best one). Its output joins the scores themselves, so that tokens meet only in a
few sampled rows. Here the model weighs values, o_i = sum_j kappa(x_i, x_j) v_j, at the cost of linear
attention with s features. The nested objective draws the model to the kernel's own SVD.

A mean of n values with signed weights shrinks as n grows, so that it hardly counts beside a residual stream.
The output of every head is therefore scaled to one size, as in the retention of Sun et al. 2023 ("Retentive
Network") and the NormAttention of Qin et al. 2022 ("The Devil in Linear Transformer"). The other
normalisations are options.

Legend: B batch, h heads, N queries, S keys, p head width, m features of phi, s rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.decoding import Position, State
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device, draw_orthogonal, reset_submodules
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.core.query_key_value import QueryKeyValueAttention, QueryKeyValueState
from kernel_attention.core.registry import register_attention
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.core.validation import require_positive, require_weight
from kernel_attention.errors import InputError, unknown
from kernel_attention.features.feature_maps import (
    FEATURE_MAPS,
    FeatureMapSpec,
    cosine,
    features_in_range,
    get_feature_map,
    identity,
    is_positive,
    is_tokenwise,
)
from kernel_attention.mechanisms.linear.decoding import RunningSum, linear_step, read_sum
from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal.nested import kernel_grams, nested_objective
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.affine import product_dtype, wide
from kernel_attention.tensors.statistics import (
    accumulation_dtype,
    divide,
    exactly,
    mean_or_zero,
    without_autocast,
)

Normalization = Literal["output", "keys", "rows"]


def primal_value_attention(
    scores: PrimalScores,
    v: Tensor,
    sqrt_lambda: Tensor | None = None,
    *,
    features: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    group: SequenceGroup | None = None,
) -> Tensor:
    """sum_j (e_i . Lambda r_j) v_j over the n real keys that query i sees, divided by n; O(N s p) time.

    The weights take both signs, so their own sum may vanish and does not divide them. The row sums of phi's
    kernel, whose model the weights are, do with ``features``.

    Args:
        scores: e (B, h, N, s) of the queries and r (B, h, S, s) of the keys.
        v: values, (B, h, S, p).
        sqrt_lambda: square root of Lambda's diagonal, (h, s); None: Lambda is 1, or part of the scores.
        features: phi of the queries (B, h, N, m) and of the keys (B, h, S, m), whose kernel is never
            negative: sum_j phi(q_i) . phi(k_j) divides in the place of n.
        attention_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only.
        group: processes that hold the parts of every sequence; the arguments are this part's.

    Returns:
        (B, h, N, p). A query that sees no key gets zeros.
    """
    e, r = scores
    if sqrt_lambda is not None:
        root = sqrt_lambda[:, None, :].to(v.dtype)
        e, r = e * root, r * root
    options: dict[str, Any] = {
        "feature_map": identity, "normalize": False, "attention_mask": attention_mask,
        "is_causal": is_causal, "group": group,
    }  # fmt: skip
    out = linear_attention(e, r, v, **options)
    if features is not None:
        return divide(out, linear_attention(*features, torch.ones_like(v[..., :1]), **options))
    return out / _seen_keys(v, attention_mask, is_causal, group).clamp_min(1).to(out.dtype)


def _seen_keys(
    v: Tensor, attention_mask: Tensor | None, is_causal: bool, group: SequenceGroup | None
) -> Tensor:
    """How many real keys each query sees, (B or 1, 1, S or 1, 1)."""
    real = torch.ones(1, v.size(2), dtype=torch.bool, device=v.device)
    real = real if attention_mask is None else attention_mask
    counts = real.cumsum(dim=1) if is_causal else real.sum(dim=1, keepdim=True)
    if group is not None:
        before, total = group.places(real.sum(dim=1).expand(v.size(0)))
        counts = before[:, None] + counts if is_causal else total[:, None]
    return counts[:, None, :, None]


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


@register_attention(
    "primal_values",
    summary="values weighed by the low-rank kernel of the scores",
    paper="derived here from Chen et al. 2023",
    equation="E Lambda (R^T v), E = phi(q) W_e, R = phi(k) W_r",
    time="N p s",
    memory="N (p + s)",
    state="constant",
)
class PrimalValueAttention(QueryKeyValueAttention, PenalizedAttention):
    """Primal attention with values: o_i = (1/n) sum_j kappa(x_i, x_j) v_j, kappa of rank s; O(N p s) time.

    kappa(x_i, x_j) = e_i^T Lambda r_j with the data-independent scores of Primal-Attention, e_i = W_e^T
    phi(q_i) and r_j = W_r^T phi(k_j). With eta > 0 the nested objective pulls E Lambda R^T to the truncated
    SVD of phi's own kernel phi(q_i) . phi(k_j).

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        rank: number of directions s per head. From phi's number of features on the model is exact.
        eta: weight of the nested objective in ``auxiliary_loss``, see
            ``kernel_attention.functional.nested_objective``.
        feature_map: phi: "cosine", "elu", "identity", "relu" or "taylor" (of p (p + 1) / 2 and more
            features, which the rank compresses).
        normalize: "output": a head's output o_i is scaled to root mean square 1, so that no factor of its
            weights matters; "keys": the sum is divided by the number of keys that the query sees; "rows": by
            the sum of phi(q_i) . phi(k_j) over them, for "elu", "relu" and "taylor" of even order.
        bias: whether the four projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

    Attributes:
        kernel: a module with the weights ``w_e`` and ``w_r`` (h, m, s), and ``sqrt_lambda`` (h, s).
    """

    kernel: PrimalValueKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 20,
        eta: float = 0.0,
        feature_map: FeatureMapSpec = "cosine",
        normalize: Normalization = "output",
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(rank=rank)
        require_weight(eta=eta)
        if normalize not in ("output", "keys", "rows"):
            raise unknown("normalize", normalize, ("output", "keys", "rows"))
        self.rank = rank
        self.eta = eta
        self.normalize = normalize
        self.kernel = PrimalValueKernel(
            self.head_dim, num_heads, rank, feature_map, by_row_sums=normalize == "rows",
            device=device, dtype=dtype,
        )  # fmt: skip
        self.add_projections(bias, device=device, dtype=dtype)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """The attention on checked arguments, (B, N, d); the objective in training where eta > 0.

        The objective is that of the whole sequence, in the causal form too: no output depends on it.
        """
        source = x if context is None else context
        q, k = self.queries_and_keys(x, source)
        v = self.split_heads(self.v_proj(source))
        heads, objective = self._heads(q, k, v, attention_mask, is_causal, context is None)
        return self.out_proj(self.merge_heads(heads)), objective

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The same with given queries, keys and values."""
        heads, objective = self._heads(q, k, v, attention_mask, is_causal, q.size(2) == k.size(2))
        if objective is not None:
            self.record_objective(objective)
        return heads

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, is_self: bool
    ) -> tuple[Tensor, Objective | None]:
        """The heads' outputs, (B, h, N, p), and the objective in training where eta > 0."""
        phi_q, phi_k = self.kernel.features(q, k)
        objective = None
        if self.training and self.eta > 0:
            grams = kernel_grams(
                phi_q, phi_k, feature_map=identity, attention_mask=mask, query_mask=mask if is_self else None,
                normalize=self.kernel.by_row_sums,
            )  # fmt: skip
            weights = self.kernel.w_e, self.kernel.w_r, self.kernel.sqrt_lambda
            objective = Objective(nested_objective(grams, *weights))
        group = self.sequence_group
        heads = self.kernel.weigh(phi_q, phi_k, v, attention_mask=mask, is_causal=is_causal, group=group)
        return self.scale_heads(heads).to(product_dtype(v)), objective

    def decode_token(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Add the token's key and value to the kernel's memory, then read the memory with its query."""
        q, k = self.queries_and_keys(x, x)
        v = self.split_heads(self.v_proj(x))
        out, memory = self.kernel.step(q, k, v, state.memory, state.position)
        y = self.out_proj(self.merge_heads(self.scale_heads(out).to(v.dtype)))
        return y, QueryKeyValueState(state.position.next(), memory)

    def scale_heads(self, heads: Tensor) -> Tensor:
        """The heads' outputs (B, h, N, p), each at root mean square 1 with ``normalize="output"``."""
        return cosine(heads) * self.head_dim**0.5 if self.normalize == "output" else heads

    @property
    def has_penalty(self) -> bool:
        """True where eta > 0."""
        return self.eta > 0

    def weigh_objective(self, objective: Objective) -> Tensor:
        """eta times the nested objective."""
        return self.eta * mean_or_zero(objective.value)

    def named_scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> dict[str, Tensor]:
        """The scores under the names "e" and "r", (B, h, N, s) each."""
        return self.kernel.scores(*self.queries_and_keys(x, x))._asdict()

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """A reason where the objective is wanted: it reads the whole sequence."""
        return "the nested objective reads the whole sequence on one rank" if self.eta > 0 else None

    def option_value(self, name: str) -> Any:
        """An option's value; the feature map is kept by the kernel."""
        if name != "feature_map":
            return super().option_value(name)
        value = self.kernel.feature_map
        return next((known for known, function in FEATURE_MAPS.items() if function is value), value)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        sizes = f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, eta={self.eta}"
        return f"{sizes}, normalize={self.normalize!r}"
