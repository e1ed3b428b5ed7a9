"""Ridge attention as a layer."""

from __future__ import annotations

from typing import Any

import torch

from kernel_attention.core.parameters import Device
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.mechanisms.regression.ridge_kernel import RidgeKernel, require_start
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, frobenius, named_feature_map


@register_attention(
    "ridge",
    summary="kernel ridge regression of values on keys",
    paper="von Oswald et al. 2025; block form derived here",
    equation="phi(q) (phi(k)^T phi(k) + lambda I)^-1 phi(k)^T v",
    time="N p^2",
    memory="N p",
    state="constant",
)
class RidgeAttention(QueryKeyValueAttention):
    """Ridge attention: the map from keys to values, fitted anew to what a query sees; O(N p^2) time.

    o_i = phi(q_i)^T (sum_j phi(k_j) phi(k_j)^T + lambda I)^-1 sum_j phi(k_j) v_j^T, in the causal form over
    j <= i, exactly. lambda is learnt, one for each head.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        lam: lambda at the start, above 0. A large one starts near linear attention (docs: Ridge attention).
        feature_map: phi: "cosine" (x / ||x||), "elu", "relu", "frobenius", "identity", "softmax_plus",
            "taylor", ``{name: options}`` for the last two, or a callable of ``kernel_attention.features``.
        forgetting: gamma at the start, between 0.9 and 1; it is learnt, one for each head. Each later pair
            lowers the weight of a pair, and lambda, by this factor. None: all pairs count alike.
        bias: whether the four projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

    Attributes:
        kernel: a module with the parameters ``raw_lambda`` (h,), whose softplus is lambda, and
            ``raw_forgetting`` (h,), and with lambda and gamma themselves as ``lam`` and ``forgetting``.
    """

    kernel: RidgeKernel

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        lam: float = 10.0,
        feature_map: FeatureMapSpec = "cosine",
        forgetting: float | None = None,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_start(lam, forgetting)
        self.lam = lam
        self.forgetting = forgetting
        self.kernel = RidgeKernel(
            self.head_dim, num_heads, feature_map=feature_map, lam=lam, forgetting=forgetting,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.add_projections(bias, device=device, dtype=dtype)

    def reads_queries_alone(self) -> bool:
        """Unless the feature map normalises over the sequence."""
        return self.kernel.feature_map is not frobenius

    def option_value(self, name: str) -> Any:
        """An option's value; the feature map is kept by the kernel."""
        if name != "feature_map":
            return super().option_value(name)
        return named_feature_map(self.kernel.feature_map)
