"""Primal attention with values: the rank-s model of a kernel, applied to the tokens' values.

Primal-Attention's scores are the features of a low-rank model of its kernel, K = E Lambda R^T (theorem 3.2:
at the kernel SVD it is the best one). Its output joins the scores themselves, so that tokens meet only in a
few sampled rows. Here the model weighs values, o_i = sum_j kappa(x_i, x_j) v_j / n, at the cost of linear
attention with s features. The nested objective draws the model to the kernel's own SVD.

Legend: B batch, h heads, N queries, S keys, p head width, m features of phi, s rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.decoding import Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.objective import PenalizedAttention
from kernel_attention.core.parameters import Device, draw_orthogonal, reset_submodules
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.core.validation import require_positive, require_weight
from kernel_attention.errors import InputError
from kernel_attention.features.feature_maps import (
    FEATURE_MAPS,
    FeatureMapSpec,
    get_feature_map,
    identity,
    is_tokenwise,
)
from kernel_attention.mechanisms.linear.decoding import RunningSum, linear_step, read_sum
from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal.nested import kernel_grams, nested_objective
from kernel_attention.memory_limit import require_parameters
from kernel_attention.tensors.statistics import accumulation_dtype, exactly


def primal_value_attention(
    scores: PrimalScores,
    v: Tensor,
    sqrt_lambda: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    group: SequenceGroup | None = None,
) -> Tensor:
    """(1/n) sum_j (e_i . Lambda r_j) v_j over the n real keys that query i sees; O(N s p) time.

    The weights take both signs, so their sum may vanish and the number of keys divides instead.

    Args:
        scores: e (B, h, N, s) of the queries and r (B, h, S, s) of the keys.
        v: values, (B, h, S, p).
        sqrt_lambda: square root of Lambda's diagonal, (h, s).
        attention_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only.
        group: processes that hold the parts of every sequence; the arguments are this part's.

    Returns:
        (B, h, N, p). A query that sees no key gets zeros.
    """
    root = sqrt_lambda[:, None, :].to(v.dtype)
    out = linear_attention(
        scores.e * root, scores.r * root, v, feature_map=identity, normalize=False,
        attention_mask=attention_mask, is_causal=is_causal, group=group,
    )  # fmt: skip
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


class PrimalValueKernel(AttentionKernel):
    """The kernel (phi(q)^T W_e) Lambda (W_r^T phi(k)) / n, with the weights as parameters.

    Args:
        head_dim: p.
        num_heads: h.
        rank: s.
        feature_map: phi; works token by token.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = get_feature_map(feature_map, head_dim, device=device, dtype=dtype)
        if not is_tokenwise(self.feature_map):
            raise InputError(
                f"feature_map={feature_map!r} is not known to work token by token; accepted: cosine, elu, "
                "identity, relu, taylor"
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
        return PrimalScores(
            self.feature_map(q, None, True) @ self.w_e, self.feature_map(k, None, True) @ self.w_r
        )

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
        """``primal_value_attention`` by the scores. No weights are formed, so none are dropped."""
        return primal_value_attention(
            self.scores(q, k), v, self.sqrt_lambda, attention_mask=attention_mask, is_causal=is_causal,
            group=group,
        )  # fmt: skip

    def empty_memory(self, like: Tensor) -> RunningSum:
        """The sum of no keys and values, (B, h, s, p)."""
        sizes = (like.size(0), like.size(1), self.w_r.size(2), like.size(3))
        return RunningSum(like.new_zeros(sizes, dtype=accumulation_dtype(like.dtype)), None, None)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> RunningSum:
        """The sum over a prompt; q, k, v are (B, h, N, p)."""
        e, r = self.scores(q, k)
        return read_sum(identity, False, e, r, v, lengths, factor)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RunningSum, position: Position, factor: int = 1
    ) -> tuple[Tensor, RunningSum]:
        """Add one key and value to the sum and apply the query to it, (B, h, 1, p) each."""
        e, r = self.scores(q, k)
        out, memory = linear_step(
            identity, False, e * exactly(self.sqrt_lambda)[:, None].square().to(e.dtype), r, v, memory,
            position, factor,
        )  # fmt: skip
        seen = torch.as_tensor(position.tokens + 1, device=out.device).to(out.dtype)
        return out / seen.reshape(-1, 1, 1, 1), memory

    def why_not_sharded(self) -> str | None:
        """None: the ranks add up their sums."""
        return None


@register_attention(
    "primal_values",
    summary="values weighed by the low-rank kernel of the scores",
    paper="derived here from Chen et al. 2023",
    equation="E Lambda (R^T v) / n, E = phi(q) W_e, R = phi(k) W_r",
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
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(rank=rank)
        require_weight(eta=eta)
        self.rank = rank
        self.eta = eta
        self.kernel = PrimalValueKernel(
            self.head_dim, num_heads, rank, feature_map, device=device, dtype=dtype
        )
        self.add_projections(bias, device=device, dtype=dtype)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The attention on checked arguments, (B, N, d). In training it keeps the objective where eta > 0.

        The objective is that of the whole sequence, in the causal form too: no output depends on it.
        """
        if self.training and self.eta > 0:
            with torch.no_grad():
                q, k = self.queries_and_keys(x, x if context is None else context)
            self._keep_objective(q, k, attention_mask, attention_mask if context is None else None)
        return super().attend(x, context, attention_mask, is_causal)

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
        if self.training and self.eta > 0:
            query_mask = attention_mask if q.size(2) == k.size(2) else None
            self._keep_objective(q.detach(), k.detach(), attention_mask, query_mask)
        return super().attend_heads(q, k, v, attention_mask=attention_mask, is_causal=is_causal)

    def _keep_objective(self, q: Tensor, k: Tensor, mask: Tensor | None, query_mask: Tensor | None) -> None:
        feature_map = self.kernel.feature_map
        grams = kernel_grams(q, k, feature_map=feature_map, attention_mask=mask, query_mask=query_mask)
        weights = self.kernel.w_e, self.kernel.w_r, self.kernel.sqrt_lambda
        self.objective = nested_objective(grams, *weights)

    def penalty(self) -> Tensor | None:
        """eta times the nested objective of the last forward in training mode."""
        return None if self.objective is None else self.eta * self.objective.mean()

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
        return f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, eta={self.eta}"
