"""Explicit features of the softmax kernel exp(x . y / sqrt(p)): random ones, and a truncated Taylor series.

Both are modules. Their constants are buffers, which move and are saved with the layer that owns them. They
are called like the functions of ``kernel_attention.tensors.features.feature_maps``.
"""

import functools
import itertools
import math

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.limits import require_memory
from kernel_attention.tensors.statistics import without_autocast

_BYTES_OF_MONOMIAL = 64  # for each of its factors, while the table is made


class SoftmaxPlusFeatures(nn.Module):
    """Positive random features phi(x) = exp(w_r . x' - ||x'||^2 / 2) / sqrt(m), x' = x / p^(1/4).

    <phi(x), phi(y)> is an unbiased estimate of exp(x . y / sqrt(p)) (Choromanski et al. 2021, Performer;
    KMLSVD thesis, eq. 2-35, there without the factor p^(1/4)). The exponentials are computed in float32 for
    16-bit inputs.

    Args:
        head_dim: width p of the inputs.
        num_features: m; None: p.
        seed: the features are a function of it, on every machine and device.
        orthogonal: directions orthogonal within each block of p features, lengths as of Gaussian vectors: the
            same mean, a smaller variance. False: independent Gaussian vectors.
        device: where the directions are kept; None: the default device.
        dtype: their precision; None: the default one.

    Attributes:
        projection: the directions w_r, (m, p); a buffer, saved with the layer, never trained.
    """

    projection: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int | None = None,
        *,
        seed: int = 0,
        orthogonal: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_features = head_dim if num_features is None else num_features
        if not isinstance(num_features, int) or num_features < 1:
            raise InputError(f"num_features={num_features!r} must be a whole number of at least 1")
        require_memory(
            f"SoftmaxPlusFeatures: drawing num_features={num_features} of width {head_dim}",
            8 * head_dim * (num_features + 2 * head_dim * math.ceil(num_features / head_dim)),
            "lower num_features",
        )
        self.num_features = num_features
        self.seed = seed
        self.orthogonal = orthogonal
        self.register_buffer("projection", torch.empty(num_features, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the directions from the seed, as in a new module."""
        self.redraw(self.seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new directions in place; None: from the next seed."""
        self.seed = self.seed + 1 if seed is None else seed
        num_features, head_dim = self.projection.shape
        generator = torch.Generator("cpu").manual_seed(self.seed)
        normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
        drawn = normal(num_features, head_dim)
        if self.orthogonal:
            blocks = math.ceil(num_features / head_dim)
            directions, triangle = torch.linalg.qr(normal(blocks, head_dim, head_dim))
            # The signs that a QR chooses are not those of a uniform rotation, and would bias the kernel.
            directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
            drawn = directions.flatten(0, 1)[:num_features] * drawn.norm(dim=1, keepdim=True)
        with torch.no_grad():
            self.projection.copy_(drawn)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """phi(x), token-wise: (B, h, N, p) -> (B, h, N, m)."""
        return (self._exponents(x).exp() / math.sqrt(self.num_features)).to(x.dtype)

    def normalized_pair(
        self, q: Tensor, k: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k), up to factors that normalised attention divides out.

        The factors, one per query and one for the keys of a head, make the largest feature 1, so that long
        vectors do not underflow. A causal call has no factor of the keys, which would depend on the future.
        """
        of_q, of_k = self._exponents(q), self._exponents(k)
        of_q = of_q - of_q.detach().amax(dim=-1, keepdim=True)
        if not is_causal:
            largest = of_k.detach()
            if attention_mask is not None:
                largest = largest.masked_fill(
                    ~attention_mask[:, None, :, None], torch.finfo(largest.dtype).min
                )
            # Padded keys could overflow. They are multiplied by zero later, and infinity times zero is NaN.
            of_k = (of_k - largest.amax(dim=(-2, -1), keepdim=True)).clamp_max(0.0)
        return of_q.exp().to(q.dtype), of_k.exp().to(k.dtype)

    def _exponents(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            dtype = torch.promote_types(x.dtype, torch.float32)
            x = x.to(dtype) * x.size(-1) ** -0.25
            return x @ self.projection.to(dtype).mT - 0.5 * x.square().sum(dim=-1, keepdim=True)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"num_features={self.num_features}, seed={self.seed}, orthogonal={self.orthogonal}"


class TaylorFeatures(nn.Module):
    """The features of the softmax kernel's Taylor series up to ``order`` (primal-dual paper, eq. 12).

    <phi(x), phi(y)> = sum over t <= order of (x . y / sqrt(p))^t / t!. There are binomial(p + order, order)
    features: 2145 at p = 64 and order 2. An even order gives a positive kernel, an odd order does not.

    Args:
        head_dim: width p of the inputs.
        order: highest degree t.
        device: of the tables of monomials.
        dtype: of their weights; None: float64.
    """

    def __init__(
        self,
        head_dim: int,
        order: int = 2,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(order, int) or order < 0:
            raise InputError(f"order={order!r} must be a whole number of at least 0")
        self.head_dim = head_dim
        self.order = order
        self.num_features = math.comb(head_dim + order, order)
        require_memory(
            f"TaylorFeatures: the monomials of order={order} in {head_dim} variables",
            _BYTES_OF_MONOMIAL * (order + 1) * self.num_features,
            "lower order",
        )
        for degree in range(1, order + 1):
            count = math.comb(head_dim + degree - 1, degree)
            index = torch.empty(degree, count, dtype=torch.int64, device=device)
            weight = torch.empty(count, dtype=torch.float64 if dtype is None else dtype, device=device)
            self.register_buffer(f"_index_{degree}", index, persistent=False)
            self.register_buffer(f"_weight_{degree}", weight, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables of monomials, as in a new module."""
        for degree in range(1, self.order + 1):
            monomials = list(itertools.combinations_with_replacement(range(self.head_dim), degree))
            weights = [
                1.0 / math.sqrt(math.prod(math.factorial(m.count(i)) for i in set(m))) for m in monomials
            ]
            self.get_buffer(f"_index_{degree}").copy_(torch.tensor(monomials, device="cpu").mT)
            self.get_buffer(f"_weight_{degree}").copy_(
                torch.tensor(weights, dtype=torch.float64, device="cpu")
            )

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """phi(x), token-wise: (B, h, N, p) -> (B, h, N, num_features), by ascending degree."""
        x = x * x.size(-1) ** -0.25
        features = [torch.ones_like(x[..., :1])]
        for degree in range(1, self.order + 1):
            index, weight = self.get_buffer(f"_index_{degree}"), self.get_buffer(f"_weight_{degree}")
            monomials = x[..., index[0]]
            for position in range(1, degree):
                monomials = monomials * x[..., index[position]]
            features.append(monomials * weight.to(x.dtype))
        return torch.cat(features, dim=-1)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"order={self.order}, num_features={self.num_features}"
