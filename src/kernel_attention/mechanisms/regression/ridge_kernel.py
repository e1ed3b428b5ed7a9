"""Ridge regression of values on keys, as a module with its step-by-step form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.decoding import Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device, reset_submodules
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.regression.decoding import RidgeMemory, empty_ridge, read_ridge, ridge_step
from kernel_attention.mechanisms.regression.functional import ridge_attention
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, get_feature_map, is_tokenwise
from kernel_attention.tensors.statistics import exactly

LEAST_FORGETTING = 0.9  # a block of 16 tokens loses gamma^-16 of its digits, here less than one


class RidgeKernel(AttentionKernel):
    """phi(q) (phi(k)^T phi(k) + lambda I)^-1 phi(k)^T with lambda, and gamma where pairs fade, as parameters.

    Args:
        head_dim: p.
        num_heads: h.
        feature_map: phi, a name, ``{name: options}`` or a callable of `kernel_attention.features`.
        lam: lambda at the start.
        forgetting: gamma at the start; None: no pair fades.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "cosine",
        lam: float,
        forgetting: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = get_feature_map(feature_map, head_dim, device=device, dtype=dtype)
        self.first_lambda, self.first_forgetting = lam, forgetting
        self.reads_positions = forgetting is not None
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.raw_lambda = nn.Parameter(torch.empty(num_heads, **where))
        self.raw_forgetting = None if forgetting is None else nn.Parameter(torch.empty(num_heads, **where))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """lambda and gamma as at the start, in every head."""
        reset_submodules(self)
        nn.init.constant_(self.raw_lambda, inverse_softplus(self.first_lambda))
        if self.raw_forgetting is not None and self.first_forgetting is not None:
            share = (self.first_forgetting - LEAST_FORGETTING) / (1 - LEAST_FORGETTING)
            nn.init.constant_(self.raw_forgetting, math.log(share / (1 - share)))

    @property
    def lam(self) -> Tensor:
        """lambda, (h,)."""
        return nn.functional.softplus(exactly(self.raw_lambda))

    @property
    def forgetting(self) -> Tensor | None:
        """gamma, (h,)."""
        if self.raw_forgetting is None:
            return None
        return LEAST_FORGETTING + (1 - LEAST_FORGETTING) * exactly(self.raw_forgetting).sigmoid()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """``ridge_attention``, with its options. ``dropout_p`` is not read: no weights are formed."""
        return ridge_attention(
            q, k, v, self.lam, feature_map=self.feature_map, forgetting=self.forgetting, **options
        )

    def empty_memory(self, like: Tensor) -> RidgeMemory:
        """The sums of no pairs; ``like`` is (B, h, N, p)."""
        return empty_ridge(self.feature_map, like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> RidgeMemory:
        """The sums over a prompt; q, k, v are (B, h, N, p)."""
        return read_ridge(self.feature_map, self.forgetting, q, k, v, lengths)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: RidgeMemory, position: Position, factor: int = 1
    ) -> tuple[Tensor, RidgeMemory]:
        """Add one key and value to the sums, fit anew and read the query, (B, h, 1, p) each."""
        return ridge_step(self.feature_map, self.lam, self.forgetting, q, k, v, memory, position)

    def why_not_sharded(self) -> str | None:
        """A reason unless the ranks' sums add up: by a feature map of single tokens, without forgetting."""
        if self.raw_forgetting is not None:
            return "with forgetting the ranks' sums would have to fade on the way"
        if is_tokenwise(self.feature_map):
            return None
        return "its feature map is not known to work token by token, as cosine, elu, identity and relu do"

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name = getattr(self.feature_map, "__name__", type(self.feature_map).__name__)
        return f"feature_map={name}, lam={self.first_lambda}, forgetting={self.first_forgetting}"


def inverse_softplus(value: float) -> float:
    """x with log(1 + exp(x)) = value, which is above 0."""
    return value + math.log(-math.expm1(-value))


def require_start(lam: float, forgetting: float | None = None) -> None:
    """Raise InputError for a lambda or a gamma that a layer cannot start from."""
    if not (isinstance(lam, int | float) and not isinstance(lam, bool) and 0 < lam < math.inf):
        raise InputError(f"lam={lam!r} must be a number above 0")
    if forgetting is not None and not (isinstance(forgetting, float) and LEAST_FORGETTING < forgetting < 1):
        raise InputError(
            f"forgetting={forgetting!r} must be a number between {LEAST_FORGETTING} and 1, or None"
        )
