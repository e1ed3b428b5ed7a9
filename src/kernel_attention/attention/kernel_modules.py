"""The kernels of the support-vector layers as modules: softmax, linear and sparse, behind one call.

A kernel takes queries (B, h, N, p), keys and values (B, h, S, p), and the keywords ``factor``,
``key_padding_mask`` (B, S), ``query_padding_mask`` (B, N), ``is_causal`` and ``dropout_p``; see
:func:`kernel_attention.functional.support_vector_attention` for their meaning.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor, nn

from kernel_attention import functional
from kernel_attention.attention.base import require_positive
from kernel_attention.errors import InputError, unknown
from kernel_attention.functional.blocks import softmax_over_blocks
from kernel_attention.functional.sparse import IMPLEMENTATIONS, Implementation, PatternName, SparsePattern
from kernel_attention.kernels import FeatureMapSpec, get_feature_map, is_positive
from kernel_attention.specs import Spec, SpecReader

KernelSpec = Spec
"""A kernel: "softmax", "linear" or "sparse", or ``{name: options}``."""

_DEFAULT_STRIDE = 16


class SoftmaxKernel(nn.Module):
    """softmax(q k^T / sqrt(p)), through PyTorch's fused attention."""

    shift_invariant = True
    reads_positions = False

    def __init__(self, head_dim: int, max_len: int | None = None) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, query_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """See the module's text."""
        return softmax_over_blocks(q, k, v, **options)


class LinearKernel(nn.Module):
    """phi(q) phi(k)^T, its rows divided by their sums where ``normalize``.

    Args:
        head_dim: p.
        max_len: not read.
        feature_map: phi, a name, ``{name: options}`` or a callable of :mod:`kernel_attention.kernels`.
        normalize: None: where the feature map's kernel is never negative.
    """

    shift_invariant = False
    reads_positions = False

    def __init__(
        self,
        head_dim: int,
        max_len: int | None = None,
        *,
        feature_map: FeatureMapSpec = "elu",
        normalize: bool | None = None,
    ) -> None:
        super().__init__()
        self.feature_map = get_feature_map(feature_map, head_dim)
        positive = is_positive(self.feature_map)
        if normalize and not positive:
            raise InputError(
                f"normalize=True with feature_map={feature_map!r}: its kernel takes both signs, a row's sum "
                "may vanish; leave normalize out, or choose elu, relu, softmax_plus or taylor of even order"
            )
        self.normalize = positive if normalize is None else normalize

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, **options: Any) -> Tensor:
        """See the module's text; ``dropout_p`` is not read, for no weights are formed."""
        return functional.linear_attention(
            q, k, v, feature_map=self.feature_map, normalize=self.normalize, **options
        )

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name = getattr(self.feature_map, "__name__", type(self.feature_map).__name__)
        return f"feature_map={name}, normalize={self.normalize}"


class SparseKernel(nn.Module):
    """Softmax over the positions of a pattern of Child et al. (2019).

    Args:
        head_dim: p; not read.
        max_len: longest sequence, for the default stride.
        pattern: "strided" or "fixed", see :class:`kernel_attention.functional.SparsePattern`.
        stride: l; None: sqrt(max_len) rounded, as the paper advises, or 16 where ``max_len`` is not given.
        summary: columns that every query of the fixed pattern sees, per block.
        impl: "auto", "blocked" or "dense", see :func:`kernel_attention.functional.sparse_attention`.
    """

    shift_invariant = True
    reads_positions = True

    def __init__(
        self,
        head_dim: int,
        max_len: int | None = None,
        *,
        pattern: PatternName = "strided",
        stride: int | None = None,
        summary: int = 1,
        impl: Implementation = "auto",
    ) -> None:
        super().__init__()
        if max_len is not None:
            require_positive(max_len=max_len)
        if stride is None:
            stride = _DEFAULT_STRIDE if max_len is None else max(1, round(math.sqrt(max_len)))
        if impl not in IMPLEMENTATIONS:
            raise unknown("impl", impl, IMPLEMENTATIONS)
        self.pattern = SparsePattern(pattern, stride, summary).check()
        self.impl: Implementation = impl

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, query_padding_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """See the module's text."""
        return functional.sparse_attention(q, k, v, self.pattern, impl=self.impl, **options)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name, stride, summary = self.pattern
        return f"pattern={name!r}, stride={stride}, summary={summary}, impl={self.impl!r}"


Kernel = SoftmaxKernel | LinearKernel | SparseKernel
KERNELS: dict[str, type[Kernel]] = {"softmax": SoftmaxKernel, "linear": LinearKernel, "sparse": SparseKernel}


def get_kernel(kernel: KernelSpec, head_dim: int, max_len: int | None = None) -> Kernel:
    """The kernel of that spec; InputError for an unknown name, option or value."""
    name, options = KERNEL_SPECS.read(kernel)
    return KERNELS[name](head_dim, max_len, **options)


def _options_of(name: str) -> list[str]:
    accepted = inspect.signature(KERNELS[name]).parameters
    return [option for option in accepted if option not in ("head_dim", "max_len")]


KERNEL_SPECS = SpecReader(argument="kernel", kind="kernel", names=KERNELS, options_of=_options_of)
