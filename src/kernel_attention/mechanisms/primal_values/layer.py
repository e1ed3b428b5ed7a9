"""Primal attention with values, as a layer."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kernel_attention.core.calls import Objective
from kernel_attention.core.parameters import Device
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.core.query_key_value import QueryKeyValueAttention, QueryKeyValueState
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_positive, require_weight, unknown
from kernel_attention.mechanisms.nested_objective.functional import kernel_grams, nested_objective
from kernel_attention.mechanisms.primal_values.functional import Readout
from kernel_attention.mechanisms.primal_values.gpu import (
    ValueOptions,
    causal_values_launches,
    has_value_form,
    primal_values_launches,
)
from kernel_attention.mechanisms.primal_values.kernel import PrimalValueKernel
from kernel_attention.mechanisms.regression.layer import require_start
from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.features.feature_maps import (
    FeatureMapSpec,
    cosine,
    get_feature_map,
    identity,
    is_positive,
    named_feature_map,
)
from kernel_attention.tensors.statistics import mean_or_zero

Normalization = Literal["output", "keys", "rows", "none"]


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
        feature_map: phi: "cosine", "elu", "hedgehog", "identity", "relu" or "taylor" (of p (p + 1) / 2 and
            more features, which the rank compresses).
        normalize: "output": a head's output o_i is scaled to root mean square 1, so that no factor of its
            weights matters; "keys": the sum is divided by the number of keys that the query sees; "rows": by
            the sum of phi(q_i) . phi(k_j) over them, for "elu", "hedgehog", "relu" and "taylor" of even
            order. The ridge regression divides by itself: with it "output", or "none", which leaves it.
        readout: "correlation": the values are weighed by the kernel; "ridge": by the ridge regression on its
            features, which separates similar keys; "twicing": what the kernel left over of the values is
            weighed once more and added, in self-attention.
        lam: lambda of "ridge" at the start, above 0; it is learnt, one for each head.
        bias: whether the four projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        kernel: a module with the weights ``w_e`` and ``w_r`` (h, m, s), and ``sqrt_lambda`` (h, s); with
            "ridge" also ``raw_lambda`` (h,), whose softplus is lambda.
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
        readout: Readout = "correlation",
        lam: float = 10.0,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(rank=rank)
        require_weight(eta=eta)
        require_start(lam)
        if readout not in ("correlation", "ridge", "twicing"):
            raise unknown("readout", readout, ("correlation", "ridge", "twicing"))
        accepted = ("output", "none") if readout == "ridge" else ("output", "keys", "rows")
        if normalize not in accepted:
            raise unknown("normalize", normalize, accepted)
        self.rank = rank
        self.eta = eta
        self.normalize = normalize
        self.readout = readout
        self.lam = lam
        self.kernel = PrimalValueKernel(
            self.head_dim, num_heads, rank, feature_map, by_row_sums=normalize == "rows", readout=readout,
            lam=lam, device=device, dtype=dtype,
        )  # fmt: skip
        self.add_projections(bias, device=device, dtype=dtype)

    @classmethod
    def replacement_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The normalisation that keeps a head's output near a mean of the values, unlike "output"."""
        if "normalize" in options:
            return {}
        if options.get("readout") == "ridge":
            return {"normalize": "none"}
        phi = get_feature_map(options.get("feature_map", "cosine"), head_dim=1)
        return {"normalize": "rows" if is_positive(phi) else "keys"}

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """The attention on checked arguments, (B, N, d); the objective in training where eta > 0.

        The objective is that of the whole sequence, in the causal form too: no output depends on it.
        """
        source = x if context is None else context
        is_few = (
            context is None and self.sequence_group is None and not (is_causal and attention_mask is not None)
            and self.readout == "correlation" and self.normalize != "rows"
        )  # fmt: skip
        if is_few and has_value_form(self.kernel.feature_map) and self.is_joint(x):
            z = self.joint_projection(x).unflatten(-1, (3, self.num_heads, -1))
            weights = self.kernel.w_e, self.kernel.w_r, self.kernel.sqrt_lambda
            options = ValueOptions(
                self.kernel.feature_map, attention_mask, self.normalize == "output", self._wants_objective
            )
            launches = causal_values_launches if is_causal else primal_values_launches
            heads, value = launches(z, *weights, options)
            return self.out_proj(heads.to(z.dtype)), None if value is None else Objective(value)
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
        if self.readout == "twicing" and q.size(2) != k.size(2):
            raise InputError(f"{q.size(2)} queries and {k.size(2)} keys, but {self.why_not_context()}")
        heads, objective = self._heads(q, k, v, attention_mask, is_causal, q.size(2) == k.size(2))
        if objective is not None:
            self.record_objective(objective)
        return heads

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, is_self: bool
    ) -> tuple[Tensor, Objective | None]:
        """The heads' outputs, (B, h, N, p), and the objective in training where eta > 0."""
        phi_q, phi_k = self.kernel.features(q, k)
        objective = self._nested(phi_q, phi_k, mask, is_self)
        group = self.sequence_group
        heads = self.kernel.weigh(phi_q, phi_k, v, attention_mask=mask, is_causal=is_causal, group=group)
        return self.scale_heads(heads).to(product_dtype(v)), objective

    @property
    def _wants_objective(self) -> bool:
        return self.training and self.eta > 0

    def _nested(self, phi_q: Tensor, phi_k: Tensor, mask: Tensor | None, is_self: bool) -> Objective | None:
        """The objective of features (B, h, N, m) in training where eta > 0."""
        if not self._wants_objective:
            return None
        grams = kernel_grams(
            phi_q, phi_k, feature_map=identity, attention_mask=mask, query_mask=mask if is_self else None,
            normalize=self.kernel.by_row_sums,
        )  # fmt: skip
        weights = self.kernel.w_e, self.kernel.w_r, self.kernel.sqrt_lambda
        return Objective(nested_objective(grams, *weights))

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

    is_squared = False

    def weigh_objective(self, objective: Objective) -> Tensor:
        """eta times the nested objective."""
        return self.eta * mean_or_zero(objective.value)

    def named_scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> dict[str, Tensor]:
        """The scores under the names "e" and "r", (B, h, N, s) each."""
        return self.kernel.scores(*self.queries_and_keys(x, x))._asdict()

    def why_not_context(self) -> str | None:
        """A reason with twicing: it weighs what the queries of the keys' own tokens read."""
        if self.readout != "twicing":
            return super().why_not_context()
        return "readout='twicing' reads the outputs of the keys' own tokens; 'correlation' and 'ridge' do not"

    def reads_queries_alone(self) -> bool:
        """Unless twicing reads the outputs of the tokens before."""
        return self.readout != "twicing" and super().reads_queries_alone()

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """A reason where the objective is wanted: it reads the whole sequence."""
        return "the nested objective reads the whole sequence on one rank" if self.eta > 0 else None

    def option_value(self, name: str) -> Any:
        """An option's value; the feature map is kept by the kernel."""
        if name != "feature_map":
            return super().option_value(name)
        return named_feature_map(self.kernel.feature_map)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        sizes = f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, eta={self.eta}"
        return f"{sizes}, normalize={self.normalize!r}, readout={self.readout!r}"
