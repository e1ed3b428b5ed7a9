"""An objective whose minimum is the kernel SVD: nested low-rank approximation of the layer's own kernel.

With the features f = E Lambda^{1/2} and g = R Lambda^{1/2} of a head, f g^T is a rank-s model of its kernel K
(N x N), and

    ||K - f g^T||^2 - ||K||^2 = -2 sum_l <f_l, K g_l> + sum_{l,l'} <f_l, f_l'> <g_l, g_l'>.

By Eckart-Young its minimum is the truncated SVD, up to an invertible map of the s features. Nesting fixes
that map: the first l features alone are to minimise the same expression, for every l. Where the singular
values differ, the minimisers are f_l = a_l sigma_l^{1/2} u_l and g_l = sigma_l^{1/2} v_l / a_l, in order.

Source: Ryu et al. 2024, "Operator SVD with Neural Networks via Nested Low-Rank Approximation". Here the
kernel has rank p at most, K = phi_q G phi_k^T with G = f(X)^T f(X) or the identity, and so has every term:
all of them follow from the p x p Gram matrices C_q = phi_q^T phi_q, C_k = phi_k^T phi_k and G.

Legend: B batch, h heads, N tokens, p width of phi, M sampled rows, s features (rank).
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import unknown
from kernel_attention.tensors.features.feature_maps import FeatureMap, balancing, cosine
from kernel_attention.tensors.statistics import divide, exactly, running_mean, smallest, without_autocast

Nesting = Literal["sequential", "joint", "none"]


class KernelGrams(NamedTuple):
    """Gram matrices that the objective reads of a head's kernel; gradients do not flow into it.

    Attributes:
        queries: C_q = phi_q^T phi_q, (B, h, p, p).
        keys: C_k = phi_k^T phi_k, (B, h, p, p).
        rows: f(X), (B, h, M, p); None where it is the identity.
        crossed: phi_q^T K phi_k, (B, h, p, p), for a kernel K that is not phi's own; None: it is.
        squared_norm: ||K||^2 of that kernel, (B, h).
    """

    queries: Tensor
    keys: Tensor
    rows: Tensor | None
    crossed: Tensor | None = None
    squared_norm: Tensor | None = None


class KernelFactors(NamedTuple):
    """Features and a kernel that is not phi's own: what ``KernelGrams`` of them would follow from.

    They take fewer numbers than the Gram matrices where a sequence has fewer tokens than phi features.

    Attributes:
        queries: phi_q, (B, h, N, p).
        keys: phi_k, (B, h, S, p).
        target: the kernel K, (B, h, N, S), zero at padded tokens.
    """

    queries: Tensor
    keys: Tensor
    target: Tensor

    def grams(self) -> KernelGrams:
        """The Gram matrices of every sequence, in O(N S p) time and O(p^2) memory."""
        phi_q, phi_k, target = self
        return KernelGrams(
            phi_q.mT @ phi_q, phi_k.mT @ phi_k, None, phi_q.mT @ target @ phi_k,
            target.square().sum(dim=(-2, -1)),
        )  # fmt: skip

    def pooled_grams(self) -> tuple[Tensor, Tensor, Tensor]:
        """The means over the sequences of C_q, C_k and phi_q^T K phi_k, (h, p, p) each."""
        read = _rows(self.target @ self.keys)
        queries, keys = _rows(self.queries), _rows(self.keys)
        count = self.queries.size(0)
        return queries.mT @ queries / count, keys.mT @ keys / count, queries.mT @ read / count


def _rows(x: Tensor) -> Tensor:
    """The rows of all sequences of a head, (h, B N, p)."""
    return x.transpose(0, 1).flatten(1, 2)


@torch.no_grad()
def kernel_grams(
    q: Tensor,
    k: Tensor,
    *,
    rows: Tensor | None = None,
    running_means: bool = True,
    feature_map: FeatureMap = cosine,
    query_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    normalize: bool = False,
) -> KernelGrams:
    """The Gram matrices of the kernel's factors, in O(N p^2) time.

    Sums over the tokens: Gram matrices of parts of a sequence add up to those of the whole.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        rows: f(X), (B, h, M, p); None: the identity.
        running_means: with ``is_causal``, replace q and k by their means over the prefix first.
        feature_map: phi, from ``kernel_attention.features``.
        query_mask: (B, N), True = real token.
        attention_mask: (B, S), True = real token.
        is_causal: whether the features are those of a causal layer.
        normalize: divide every row of the kernel by its sum, for a phi whose kernel is never negative, and
            without ``rows``. Parts of the keys do not add up then.
    """
    # Forward-mode differentiation looks into a block without gradients too.
    q, k, rows = q.detach(), k.detach(), None if rows is None else rows.detach()
    with without_autocast(q):
        phi_q, phi_k = (
            _features(
                running_mean(x, mask) if is_causal and running_means else x, feature_map, mask, is_causal
            )
            for x, mask in ((q, query_mask), (k, attention_mask))
        )
        if normalize:
            phi_q = _by_row_sums(phi_q, phi_k)
        return KernelGrams(phi_q.mT @ phi_q, phi_k.mT @ phi_k, None if rows is None else exactly(rows))


@torch.no_grad()
def kernel_factors(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    *,
    feature_map: FeatureMap = cosine,
    query_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    normalize: bool = False,
) -> KernelFactors:
    """Features that are to be a model of another kernel than phi's own, ``target`` (B, h, N, S).

    The other arguments are those of ``kernel_grams``.
    """
    phi_q, phi_k = (
        # Every head's rows lie side by side, as products with its weights read them.
        _features(x, feature_map, mask, False).transpose(0, 1).contiguous().transpose(0, 1)
        for x, mask in ((q, query_mask), (k, attention_mask))
    )
    return KernelFactors(_by_row_sums(phi_q, phi_k) if normalize else phi_q, phi_k, exactly(target))


def _features(x: Tensor, feature_map: FeatureMap, mask: Tensor | None, is_causal: bool) -> Tensor:
    phi = exactly(feature_map(x, mask, is_causal))
    return phi if mask is None else phi.masked_fill(~mask[:, None, :, None], 0.0)


def _by_row_sums(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    return divide(phi_q, phi_q @ phi_k.sum(dim=2)[..., None])


def nested_objective(
    grams: KernelGrams | KernelFactors,
    w_e: Tensor,
    w_r: Tensor,
    sqrt_lambda: Tensor,
    *,
    nesting: Nesting = "sequential",
) -> Tensor:
    """(||K - E Lambda R^T||^2 - ||K||^2) / ||K||^2 of every sequence, a mean over the heads: (B,).

    The value is minus the share of ||K||^2 that the layer's s features explain. It is at least -1, and its
    least value is minus the share of the s largest squared singular values. Its gradient reaches ``w_e``,
    ``w_r`` and ``sqrt_lambda``, and not the kernel, whose size would otherwise grow without bound.

    Args:
        grams: of ``kernel_grams``, or the factors themselves where the kernel is another one.
        w_e: (h, p, s), or (h, M, s) where ``grams`` holds rows.
        w_r: as ``w_e``.
        sqrt_lambda: square root of Lambda's diagonal, (h, s).
        nesting: "sequential": feature l descends the objective of the first l features alone, and earlier
            features do not see it; "joint": the gradient is that of the mean over l = 1..s of the objectives
            of the first l features; "none": that of the value, whose minimisers are in no order.

    Raises:
        InputError: for an unknown nesting.
    """
    if nesting not in ("sequential", "joint", "none"):
        raise unknown("nesting", nesting, ("sequential", "joint", "none"))
    with without_autocast(w_e):
        root = exactly(sqrt_lambda)[:, None, :]
        left, right = exactly(w_e) * root, exactly(w_r) * root
        if isinstance(grams, KernelFactors):
            found = _factor_products(grams, left, right)
        else:
            found = _gram_products(grams, left, right)
        crossed, (f_gram, f_past), (g_gram, g_past), squared_norm = found
        value = (f_gram * g_gram).sum(dim=(-2, -1)) - 2 * crossed.sum(dim=-1)
        if nesting == "joint":
            value = _with_gradient_of(value, _joint(crossed, f_gram, g_gram))
        elif nesting == "sequential":
            value = _with_gradient_of(value, _sequential(crossed, f_gram, g_gram, f_past, g_past))
        return (value / squared_norm.clamp_min(smallest(value.dtype))).mean(dim=1)


class _Products(NamedTuple):
    """Terms of the objective. ``f`` and ``g`` have a Gram matrix and one whose rows are constants."""

    crossed: Tensor
    f: tuple[Tensor, Tensor]
    g: tuple[Tensor, Tensor]
    squared_norm: Tensor


def _gram_products(grams: KernelGrams, left: Tensor, right: Tensor) -> _Products:
    # Norms of the kernel are products of four matrices, and large inputs would leave the range.
    c_q, c_k, rows, target, squared_norm = _balanced(grams)
    if rows is not None:
        left, right = rows.mT @ left[:, : rows.size(2)], rows.mT @ right[:, : rows.size(2)]
    inner = None if rows is None else rows.mT @ rows
    c_q_left, c_k_right = c_q @ left, c_k @ right
    if target is not None:
        crossed = (left * (target @ right)).sum(dim=-2)  # <f_l, K g_l>
    else:
        crossed = (c_q_left * (c_k_right if inner is None else inner @ c_k_right)).sum(dim=-2)
    if squared_norm is None:
        squared_norm = _squared_norm(c_q, c_k, inner)
    f = left.mT @ c_q_left, left.detach().mT @ c_q_left
    return _Products(crossed, f, (right.mT @ c_k_right, right.detach().mT @ c_k_right), squared_norm)


def _factor_products(factors: KernelFactors, left: Tensor, right: Tensor) -> _Products:
    f, g = (
        (_rows(phi) @ weight).unflatten(1, (phi.size(0), -1)).transpose(0, 1)
        for phi, weight in ((factors.queries, left), (factors.keys, right))
    )
    crossed = (f * (factors.target @ g)).sum(dim=-2)
    grams = (f.mT @ f, f.detach().mT @ f), (g.mT @ g, g.detach().mT @ g)
    return _Products(crossed, *grams, factors.target.square().sum(dim=(-2, -1)))


def _balanced(grams: KernelGrams) -> KernelGrams:
    """The same with entries of about 1. No factor of the kernel, or of the rows, changes the objective."""
    c_q, c_k, rows, target, squared_norm = grams
    by_q, by_k = _scale(c_q), _scale(c_k)
    return KernelGrams(
        c_q * by_q,
        c_k * by_k,
        None if rows is None else rows * _scale(rows),
        None if target is None else target * by_q * by_k,
        None if squared_norm is None else squared_norm * (by_q * by_k)[..., 0, 0],
    )


def _scale(x: Tensor) -> Tensor:
    """One over the size of the largest entry of every head, a power of two, (B, h, 1, 1)."""
    return balancing(x.detach().abs().amax(dim=(-2, -1), keepdim=True), x.dtype)


def _joint(crossed: Tensor, f_gram: Tensor, g_gram: Tensor) -> Tensor:
    """The mean over l of the objective of the first l features: feature l is in s - l + 1 of them."""
    rank = crossed.size(-1)
    share = torch.arange(rank, 0, -1, dtype=crossed.dtype, device=crossed.device) / rank
    products = torch.minimum(share, share[:, None]) * f_gram * g_gram
    return products.sum(dim=(-2, -1)) - 2 * (share * crossed).sum(dim=-1)


def _sequential(crossed: Tensor, f_gram: Tensor, g_gram: Tensor, f_past: Tensor, g_past: Tensor) -> Tensor:
    """A function whose gradient at feature l is that of the objective of the first l features.

    ``f_past`` holds <f_l', f_l> at row l' and column l, where only f_l has a gradient; ``g_past`` likewise.
    """
    own = (f_gram * g_gram).diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return own + 2 * (f_past * g_past).triu(1).sum(dim=(-2, -1)) - 2 * crossed.sum(dim=-1)


def _with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    """``value``, with the gradient of ``surrogate``."""
    return value.detach() + (surrogate - surrogate.detach())


def _squared_norm(c_q: Tensor, c_k: Tensor, inner: Tensor | None) -> Tensor:
    """||K||^2 = tr(G C_k G C_q), (B, h)."""
    if inner is None:
        return (c_q * c_k).sum(dim=(-2, -1))
    return ((inner @ c_k) * (c_q @ inner)).sum(dim=(-2, -1))
