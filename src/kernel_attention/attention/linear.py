"""Linear attention as a layer."""

from __future__ import annotations

from kernel_attention.attention.support_vector import SupportVectorAttention
from kernel_attention.kernels import FeatureMapSpec


class LinearAttention(SupportVectorAttention):
    """Linear attention (Katharopoulos et al. 2020): O(N) time and memory, causal or not.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j).

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        feature_map: phi: "elu" (elu(x) + 1), "relu", "cosine", "frobenius", "identity", "softmax_plus"
            (positive random features of the softmax kernel), "taylor" (its truncated series), ``{name:
            options}`` for the last two, or a callable of :mod:`kernel_attention.kernels`.
        normalize: whether to divide by the sum; None: where the feature map's kernel is never negative.
        bias: whether the four projections have biases.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "elu",
        normalize: bool | None = None,
        bias: bool = True,
    ) -> None:
        kernel = {"linear": {"feature_map": feature_map, "normalize": normalize}}
        super().__init__(embed_dim, num_heads, kernel=kernel, beta=0.0, factors=1, bias=bias)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.embed_dim}, {self.num_heads}"
