"""A kernel with explicit features, as a module."""

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.linear.decoding import RunningSum, empty_sum, linear_step, read_sum
from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.tensors.features.feature_maps import (
    FeatureMapSpec,
    get_feature_map,
    is_positive,
    is_tokenwise,
)


class LinearKernel(AttentionKernel):
    """phi(q) phi(k)^T, its rows divided by their sums where ``normalize``; None: where the kernel is never
    negative.

    ``feature_map`` is a name, ``{name: options}`` or a callable of `kernel_attention.features`, and
    ``device`` and ``dtype`` are those of its buffers. ``max_len`` is not read.
    """

    def __init__(
        self,
        head_dim: int,
        max_len: int | None = None,
        *,
        feature_map: FeatureMapSpec = "elu",
        normalize: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = get_feature_map(feature_map, head_dim, device=device, dtype=dtype)
        positive = is_positive(self.feature_map)
        if normalize and not positive:
            raise InputError(
                f"normalize=True with feature_map={feature_map!r}: its kernel takes both signs, so the sum "
                "of a row may vanish; leave normalize out, or choose elu, relu, softmax_plus, or taylor of "
                "even order"
            )
        self.normalize = positive if normalize is None else normalize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """Linear attention by the feature map. ``dropout_p`` is not read: no weights are formed."""
        return linear_attention(q, k, v, feature_map=self.feature_map, normalize=self.normalize, **options)

    def empty_memory(self, like: Tensor) -> RunningSum:
        """The sum of no keys and values; ``like`` is (B, h, N, p)."""
        return empty_sum(self.feature_map, self.normalize, like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> RunningSum:
        """The sum over a prompt; q, k, v are (B, h, N, p)."""
        return read_sum(self.feature_map, self.normalize, q, k, v, lengths, factor)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RunningSum, position: Position, factor: int = 1
    ) -> tuple[Tensor, RunningSum]:
        """Add one key and value to the sum and apply the query to it, (B, h, 1, p) each."""
        return linear_step(self.feature_map, self.normalize, q, k, v, memory, position, factor)

    def why_not_sharded(self) -> str | None:
        """A reason unless the feature map works token by token: then the sums over the ranks suffice."""
        if is_tokenwise(self.feature_map):
            return None
        return "its feature map is not known to work token by token, as cosine, elu, identity and relu do"

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name = getattr(self.feature_map, "__name__", type(self.feature_map).__name__)
        return f"feature_map={name}, normalize={self.normalize}"
