"""The support-vector layers: Attention-BN, Attention-SH, BN+SH, Conv1D and Conv2D, over three kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention import functional
from kernel_attention.attention.base import AttentionLayer, require_probability
from kernel_attention.attention.factors import checked_factors
from kernel_attention.attention.kernel_modules import KernelSpec, LinearKernel, get_kernel
from kernel_attention.attention.support_vector_decoding import SupportVectorDecoder
from kernel_attention.attention.token_convolution import ConvWeights, token_convolution
from kernel_attention.errors import InputError, unknown
from kernel_attention.functional.support_vector import EPSILON, head_groups
from kernel_attention.kernels import is_tokenwise
from kernel_attention.kernels.padding import Compaction, compaction, is_exporting
from kernel_attention.kernels.pooling import Pooling, pool, pool_mask, running_pool
from kernel_attention.memory_limit import require_parameters


class SupportVectorAttention(AttentionLayer):
    """Attention as a support vector expansion (Nguyen et al., ICLR 2023), with its three choices free.

    The **kernel** is softmax, linear or sparse. The **centring** (Attention-BN) subtracts beta times the
    keys' mean from queries and keys, and may divide by their standard deviation. The **training set** of head
    i (Attention-SH) is the sequence pooled by ``factors[i]``; or queries and keys are convolved
    (Attention-Conv1D, Conv2D).

    The class's own defaults are Attention-BN+SH. The mechanisms' names fix the choices that they leave out.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        kernel: "softmax", "linear", "sparse" or ``{name: options}``, the options being those of
            :mod:`kernel_attention.attention.kernel_modules`.
        beta: weight of the mean (eq. 26); the paper's tasks have 0.1 to 1.2.
        learn_beta: whether beta is learnt, from that start: one number per layer, as the paper prints one
            beta for all heads.
        normalize: whether to divide by the standard deviation too (eq. 22).
        eps: added to the variance.
        factors: tokens per key, for each head or for all; None: 1, 2 for two heads, 1, 1, 2, 4 for four and
            1, 1, 2, 2, 4, 4, 8, 8 for eight, as in the paper, otherwise 1 for half of the heads and 2 for the
            rest. Equal factors side by side are computed together.
        pooling: "average" (the paper's), "max", or "conv", a depth-wise strided convolution learnt per factor
            that starts as the average (remark 5).
        convolution: None, "1d" (definition 4) or "2d" (definition 3); goes with beta 0 and factors 1 only.
        kernel_size: of the convolution; None: 5 ("1d") or 2 ("2d"), the paper's.
        conv_weights: "shared", "separate" or "separable", see
            :class:`kernel_attention.attention.token_convolution.TokenConvolution`.
        grid_size: (H, W) of the tokens, which "2d" needs.
        class_tokens: tokens in front of the grid that the convolution leaves alone.
        max_len: longest sequence; read by the sparse kernel, for its default stride.
        dropout: probability of dropping an attention weight in training; the linear kernel has none to drop.
        bias: whether the four projections have biases.

    Attributes:
        pool_kernels: with pooling "conv", the kernel of every factor above 1, (d, factor).
    """

    beta: float | nn.Parameter

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kernel: KernelSpec = "softmax",
        beta: float = 1.0,
        learn_beta: bool = False,
        normalize: bool = False,
        eps: float = EPSILON,
        factors: int | Sequence[int] | None = None,
        pooling: Pooling = "average",
        convolution: Literal["1d", "2d"] | None = None,
        kernel_size: int | None = None,
        conv_weights: ConvWeights = "shared",
        grid_size: Sequence[int] | None = None,
        class_tokens: int = 0,
        max_len: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_probability(dropout=dropout)
        if not eps > 0:
            raise InputError(f"eps={eps!r} must be a positive number")
        if pooling not in ("average", "max", "conv"):
            raise unknown("pooling", pooling, ("average", "max", "conv"))
        self.kernel = get_kernel(kernel, self.head_dim, max_len)
        self.beta = nn.Parameter(torch.tensor([float(beta)])) if learn_beta else float(beta)
        self.normalize = normalize
        self.eps = eps
        self.factors = checked_factors(factors, num_heads)
        require_parameters(
            f"{type(self).__name__}: factors={list(self.factors)} with pooling={pooling!r}",
            embed_dim * sum(set(self.factors)) if pooling == "conv" else 0,
            "lower factors or choose another pooling",
        )
        self.pooling: Pooling = pooling
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        pooled = sorted({factor for factor in self.factors if factor > 1}) if pooling == "conv" else []
        kernels = {
            str(factor): nn.Parameter(torch.full((embed_dim, factor), 1 / factor)) for factor in pooled
        }
        self.pool_kernels = nn.ParameterDict(kernels) if kernels else None
        if convolution is not None and (self.is_centred or max(self.factors) > 1):
            raise InputError(
                f"convolution={convolution!r} goes with beta=0, normalize=False and factors=1 only, "
                f"got beta={beta}, normalize={normalize}, factors={self.factors}"
            )
        self.convolution = token_convolution(
            convolution, embed_dim, kernel_size, conv_weights, grid_size, class_tokens
        )

    @property
    def supports_context(self) -> bool:  # type: ignore[override]
        """Cross-attention: everywhere but where queries and keys are convolved."""
        return self.convolution is None

    @property
    def is_centred(self) -> bool:
        """Whether the keys' mean or deviation is used."""
        return self.normalize or isinstance(self.beta, Tensor) or self.beta != 0

    def attend(
        self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """See :class:`AttentionLayer`."""
        self._check_form(x.size(1), is_causal)
        moved = self._compaction(key_padding_mask, is_causal)
        source = x if context is None else context
        if moved is not None:
            source, key_padding_mask = moved.apply(source), moved.key_padding_mask
            x = source if context is None else x
        if is_causal and self.sequence_group is None:
            key_padding_mask = None  # the padding is on the right now, where no real token looks
        heads = [
            out.transpose(1, 2)
            for out in self._heads(x, source, key_padding_mask, is_causal, context is None)
        ]
        out = self.out_proj((heads[0] if len(heads) == 1 else torch.cat(heads, dim=2)).flatten(2))
        return out if moved is None or context is not None else moved.undo(out)

    def decoder(self) -> SupportVectorDecoder:
        """See :class:`AttentionLayer`."""
        if self.convolution is not None and self.convolution.grid_size is not None:
            raise InputError(
                "a convolution over a grid has no causal form, so nothing to decode; conv1d has one"
            )
        self._check_form(1, True)
        return SupportVectorDecoder(self)

    def kernel_matrix(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The attention over the tokens, (B, h, N, N), zero in padded rows and columns; for analysis, O(N^2).

        A pooled head's weight of a block is shared out equally among the block's tokens. With average pooling
        and without separable convolutions this is what multiplies the tokens' values.
        """
        self._check_form(x.size(1), False)
        moved = self._compaction(key_padding_mask, False)
        if moved is not None:
            x, key_padding_mask = moved.apply(x), moved.key_padding_mask
        matrix = torch.cat(list(self._heads(x, x, key_padding_mask, False, True, as_matrix=True)), dim=1)
        if key_padding_mask is not None:
            matrix = matrix * (key_padding_mask[:, None, :, None] & key_padding_mask[:, None, None, :])
        return matrix if moved is None else moved.undo_matrix(matrix)

    def _heads(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        is_self: bool,
        as_matrix: bool = False,
    ) -> Iterator[Tensor]:
        """Outputs of the heads of one factor after the other, (B, heads, N, p).

        ``as_matrix`` puts the identity in the place of the values, so that the weights come out.
        """
        options = {"query_padding_mask": mask if is_self else None, "is_causal": is_causal}
        if self.convolution is not None:
            for_q, for_k, for_v = self.convolution.before(x, mask, is_causal)
            queries, keys = self.convolution.after(self.q_proj(for_q), self.k_proj(for_k), mask, is_causal)
            q, k = self.split_heads(queries), self.split_heads(keys)
            v = _identity(k) if as_matrix else self.split_heads(self.v_proj(for_v))
            yield self._expand(q, k, v, key_padding_mask=mask, **options)
            return
        q = self.split_heads(self.q_proj(x))
        for heads, factor in head_groups(self.factors):
            pooled = self.pool_tokens(source, factor, mask, is_causal)
            k = self.project_heads(self.k_proj, pooled, heads)
            if as_matrix:
                v = pool(_identity(q[:, heads]), factor, mask=None if mask is None else mask[:, None])
            else:
                v = self.project_heads(self.v_proj, pooled, heads)
            mask_of_keys = None if mask is None else pool_mask(mask, factor)
            yield self._expand(q[:, heads], k, v, factor=factor, key_padding_mask=mask_of_keys, **options)

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """See :class:`AttentionLayer`."""
        if not isinstance(self.kernel, LinearKernel):
            return "a softmax needs every key on one rank; the kernel 'linear' does not"
        if not is_tokenwise(self.kernel.feature_map):
            return "its feature map is not known to work token by token, as cosine, elu, identity and relu do"
        if self.convolution is not None or max(self.factors) > 1:
            return "pooling and convolutions reach over a part's ends; factors=1 and convolution=None do not"
        return None

    def _expand(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return functional.support_vector_attention(
            q,
            k,
            v,
            group=self.sequence_group,
            attention=self.kernel,
            shift_invariant=self.kernel.shift_invariant,
            beta=self.beta,
            normalize=self.normalize,
            eps=self.eps,
            dropout_p=self.dropout if self.training else 0.0,
            **options,
        )

    def pool_tokens(self, x: Tensor, factor: int, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Tokens to blocks, (B, N, d) -> (B, M, d), or to the open block at every token, (B, N, d), if
        causal.
        """
        kernel = None if self.pool_kernels is None or factor == 1 else self.pool_kernels[str(factor)]
        if is_causal:
            return running_pool(x, factor, self.pooling, weight=kernel)
        return pool(x, factor, self.pooling, mask=mask, weight=kernel)

    def project_heads(self, projection: nn.Linear, x: Tensor, heads: slice) -> Tensor:
        """Keys or values of these heads only, from pooled tokens: (B, M, d) -> (B, heads, M, p).

        Pooling commutes with the projection, so it comes first and leaves M rows to project.
        """
        rows = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        if heads.stop - heads.start == self.num_heads:
            out = projection(x)
        else:
            bias = None if projection.bias is None else projection.bias[rows]
            out = _linear(x, projection.weight[rows], bias)
        return out.unflatten(-1, (heads.stop - heads.start, -1)).transpose(1, 2)

    def _compaction(self, key_padding_mask: Tensor | None, is_causal: bool) -> Compaction | None:
        """How to move the real tokens together where positions matter; a grid's tokens stay in place."""
        sequence = self.convolution is not None and self.convolution.grid_size is None
        if key_padding_mask is None or not (
            is_causal or sequence or self.kernel.reads_positions or max(self.factors) > 1
        ):
            return None
        return compaction(key_padding_mask)

    def _check_form(self, length: int, is_causal: bool) -> None:
        if self.convolution is not None:
            self.convolution.check(length, is_causal)
        if is_causal and self.is_centred and not self.kernel.shift_invariant:
            raise InputError(
                f"is_causal=True with kernel='linear' and beta={self._beta_text()}: each query would need "
                "keys centred for it, which has no linear form; kernels softmax and sparse have a causal form"
            )

    def _beta_text(self) -> str:
        return "learnt" if isinstance(self.beta, Tensor) else str(self.beta)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, beta={self._beta_text()}, normalize={self.normalize}, "
            f"factors={list(self.factors)}, pooling={self.pooling!r}"
        )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """nn.functional.linear, or under torch.export a product per sequence.

    The exporter cannot prove of a length ceil(N / factor) that batch and tokens flatten to one dimension.
    """
    if not is_exporting():
        return nn.functional.linear(x, weight, bias)
    out = torch.bmm(x, weight.mT.expand(x.size(0), -1, -1))
    return out if bias is None else out + bias


def _identity(x: Tensor) -> Tensor:
    """(B, h, N, p) -> (B, h, N, N)."""
    return torch.eye(x.size(2), dtype=x.dtype, device=x.device).expand(*x.shape[:2], -1, -1)
