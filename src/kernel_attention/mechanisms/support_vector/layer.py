"""The support-vector layers: Attention-BN, Attention-SH, BN+SH, Conv1D and Conv2D, over three kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.decoding import Position, position_after, whole_lengths
from kernel_attention.core.parameters import Device, TensorLinear
from kernel_attention.core.query_key_value import QueryKeyValueAttention, identity_values
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_probability, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.softmax.kernel import SoftmaxKernel
from kernel_attention.mechanisms.support_vector.decoding import (
    HeadsState,
    SupportVectorState,
    add_to_block,
    empty_moments,
    read_moments,
    read_open_block,
    recentre_step,
)
from kernel_attention.mechanisms.support_vector.functional import (
    EPSILON,
    support_vector_attention,
)
from kernel_attention.mechanisms.support_vector.gpu import pooled_launches
from kernel_attention.mechanisms.support_vector.head_groups import (
    HeadGroup,
    checked_factors,
    head_groups,
    project_groups,
)
from kernel_attention.mechanisms.support_vector.kernels import KernelSpec, attention_kernel
from kernel_attention.mechanisms.support_vector.token_convolution import ConvWeights, token_convolution
from kernel_attention.tensors.convolution import last_rows
from kernel_attention.tensors.pooling import Pooling, pool, pool_mask, running_pool
from kernel_attention.tensors.statistics import accumulation_dtype

_PAPER = "Nguyen et al. 2023, primal-dual framework"
_NO_CENTRING = {"beta": 0.0, "learn_beta": False, "normalize": False, "eps": EPSILON}
_NO_POOLING = {"factors": 1, "pooling": "average"}
_NO_GRID = {"grid_size": None, "class_tokens": 0}
_NO_CONVOLUTION = {"convolution": None, "kernel_size": None, "conv_weights": "shared", **_NO_GRID}


@register_attention(
    "conv2d",
    summary="queries and keys convolved over a token grid",
    paper=_PAPER,
    equation="the same over a grid of tokens",
    time="N^2 p",
    memory="N p",
    preset={**_NO_CENTRING, **_NO_POOLING, "convolution": "2d"},
    example={"grid_size": (2, 5), "class_tokens": 1},
)
@register_attention(
    "conv1d",
    summary="queries and keys convolved over time",
    paper=_PAPER,
    equation="softmax(conv(q) conv(k)^T / sqrt(p)) v",
    time="N^2 p",
    memory="N p",
    preset={**_NO_CENTRING, **_NO_POOLING, **_NO_GRID, "convolution": "1d"},
)
@register_attention(
    "batch_norm_scaled_heads",
    summary="`batch_norm` and `scaled_heads` together",
    paper=_PAPER,
    equation="softmax((q - beta mu_f)(k_f - beta mu_f)^T / sqrt(p)) v_f",
    time="N^2 p / f",
    memory="N p",
    state="N / f",
    preset=_NO_CONVOLUTION,
)
@register_attention(
    "scaled_heads",
    summary="every head attends to a sequence pooled by its own factor",
    paper=_PAPER,
    equation="softmax(q k_f^T / sqrt(p)) v_f, k_f, v_f pooled by f",
    time="N^2 p / f",
    memory="N p",
    state="N / f",
    preset={**_NO_CENTRING, **_NO_CONVOLUTION},
)
@register_attention(
    "batch_norm",
    summary="queries and keys centred (and scaled) by the sequence's statistics",
    paper=_PAPER,
    equation="softmax((q - beta mu)(k - beta mu)^T / sqrt(p)) v",
    time="N^2 p",
    memory="N p",
    preset={**_NO_POOLING, **_NO_CONVOLUTION},
)
class SupportVectorAttention(QueryKeyValueAttention):
    """Attention as a support vector expansion (Nguyen et al., ICLR 2023), with its three choices free.

    The **kernel** is softmax, linear or sparse. The **centring** (Attention-BN) subtracts beta times the
    keys' mean from queries and keys, and may divide by their standard deviation. The **training set** of head
    i (Attention-SH) is the sequence pooled by ``factors[i]``. Queries and keys can be convolved instead
    (Attention-Conv1D, Conv2D).

    The class's own defaults are Attention-BN+SH. A name of a mechanism fixes the choices that it leaves out.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        kernel: "softmax", "linear", "sparse" or ``{name: options}``, the options being those of
            ``kernel_attention.mechanisms.support_vector.kernels``.
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
            ``kernel_attention.mechanisms.support_vector.token_convolution.TokenConvolution``.
        grid_size: (H, W) of the tokens, which "2d" needs.
        class_tokens: tokens in front of the grid that the convolution leaves alone.
        max_len: longest sequence; read by the sparse kernel, for its default stride.
        dropout: probability of dropping an attention weight in training; the linear kernel has none to drop.
        bias: whether the four projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

    Attributes:
        pool_kernels: with pooling "conv", the kernel of every factor above 1, (d, factor).
    """

    beta: float | nn.Parameter
    k_proj: nn.Linear

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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_probability(dropout=dropout)
        if not eps > 0:
            raise InputError(f"eps={eps!r} must be a positive number")
        if pooling not in ("average", "max", "conv"):
            raise unknown("pooling", pooling, ("average", "max", "conv"))
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.kernel = attention_kernel(kernel, self.head_dim, max_len, **where)
        self.initial_beta = float(beta)
        self.beta = nn.Parameter(torch.empty(1, **where)) if learn_beta else self.initial_beta
        self.normalize = normalize
        self.eps = eps
        self.factors = checked_factors(factors, num_heads)
        self.pooling: Pooling = pooling
        self.dropout = dropout
        by_groups = len(set(self.factors)) > 1  # of heads, which read their rows of a projection
        self.add_projections(bias, linear=TensorLinear if by_groups else nn.Linear, **where)
        require_parameters(
            f"{type(self).__name__}: factors={list(self.factors)} with pooling={pooling!r}",
            embed_dim * sum(set(self.factors)) if pooling == "conv" else 0,
            "lower factors or choose another pooling",
        )
        pooled = sorted({factor for factor in self.factors if factor > 1}) if pooling == "conv" else []
        kernels = {str(factor): nn.Parameter(torch.empty(embed_dim, factor, **where)) for factor in pooled}
        self.pool_kernels = nn.ParameterDict(kernels) if kernels else None
        if convolution is not None and (self.is_centred or max(self.factors) > 1):
            raise InputError(
                f"convolution={convolution!r} goes with beta=0, normalize=False and factors=1 only, "
                f"got beta={beta}, normalize={normalize}, factors={self.factors}"
            )
        self.convolution = token_convolution(
            convolution, embed_dim, kernel_size, conv_weights, grid_size, class_tokens, **where
        )
        self._reset_own()

    def reset_parameters(self) -> None:
        """Draw the projections anew; beta, pooling and convolution kernels start as in a new layer."""
        super().reset_parameters()
        self._reset_own()

    def _reset_own(self) -> None:
        if isinstance(self.beta, Tensor):
            nn.init.constant_(self.beta, self.initial_beta)
        for factor, kernel in () if self.pool_kernels is None else self.pool_kernels.items():
            nn.init.constant_(kernel, 1 / int(factor))

    @property
    def is_centred(self) -> bool:
        """True where the keys' mean or deviation is used."""
        return self.normalize or isinstance(self.beta, Tensor) or self.beta != 0

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """Check the token grid of a convolution, then attend."""
        if self.convolution is not None:
            self.convolution.check(x.size(1))
        return super().attend(x, context, attention_mask, is_causal)

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The attention over the tokens, (B, h, N, N), zero in padded rows and columns; for analysis, O(N^2).

        A pooled head's weight of a block is shared out equally among the block's tokens. With average pooling
        and without separable convolutions this is what multiplies the tokens' values.
        """
        if self.convolution is not None:
            self.convolution.check(x.size(1))
        return super().kernel_matrix(x, attention_mask=attention_mask)

    def head_outputs(
        self,
        x: Tensor,
        source: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        is_self: bool,
        as_matrix: bool = False,
    ) -> Iterator[Tensor]:
        """The outputs of the heads, (B, heads, N, p); heads of one factor form a group."""
        if self.convolution is not None:
            for_q, for_k, for_v = self.convolution.before(x, mask, is_causal)
            queries, keys = self.convolution.after(self.q_proj(for_q), self.k_proj(for_k), mask, is_causal)
            q, k = self.split_heads(queries), self.split_heads(keys)
            v = identity_values(k) if as_matrix else self.split_heads(self.v_proj(for_v))
            yield self._expand(q, k, v, mask, is_causal, is_self)
            return
        if source is x and not as_matrix and self.why_not_heads() is None and self.is_joint(x):
            z = self.joint_projection(x).unflatten(-1, (3, self.num_heads, -1))
            if is_causal and self._has_few_launches():
                assert not isinstance(self.beta, Tensor)
                dropout_p = self.dropout if self.training else 0.0
                yield pooled_launches(z, self.factors, self.beta, dropout_p).transpose(1, 2)
            else:
                yield from self._weigh_jointly(z.permute(2, 0, 3, 1, 4), mask, is_causal)
            return
        for group in self._groups(x):
            q, factor = group.queries, group.factor
            pooled = self.pool_tokens(source, factor, mask, is_causal)
            if as_matrix:
                v = pool(identity_values(q), factor, mask=None if mask is None else mask[:, None])
            else:
                v = group.project_values(pooled)
            yield self._expand(q, group.project_keys(pooled), v, mask, is_causal, is_self, factor)

    def why_not_heads(self) -> str | None:
        """A reason where what comes before the projections does not commute with them."""
        if self.convolution is not None:
            return "its convolution runs over the features of all heads; use softmax"
        if self.pooling != "average" and max(self.factors) > 1:
            return (
                f"pooling={self.pooling!r} reads tokens before they are projected; 'average' pools keys too"
            )
        return None

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, is_self: bool
    ) -> Tensor:
        """The outputs of all heads from given keys and values, which are pooled here."""
        outs = []
        for heads, factor in head_groups(self.factors):
            mask_of_heads = None if mask is None else mask[:, None]
            k_pooled, v_pooled = (
                running_pool(x[:, heads], factor, self.pooling)
                if is_causal
                else pool(x[:, heads], factor, self.pooling, mask=mask_of_heads)
                for x in (k, v)
            )
            outs.append(self._expand(q[:, heads], k_pooled, v_pooled, mask, is_causal, is_self, factor))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _has_few_launches(self) -> bool:
        is_plain = type(self.kernel) is SoftmaxKernel and not isinstance(self.beta, Tensor)
        return is_plain and not self.normalize and max(self.factors) > 1

    def _weigh_jointly(self, z: Tensor, mask: Tensor | None, is_causal: bool) -> Iterator[Tensor]:
        """The outputs of every group from queries, keys and values (3, B, h, N, p), in few launches.

        Average pooling commutes with the projections.
        """
        groups = head_groups(self.factors)
        sizes = [heads.stop - heads.start for heads, _ in groups]
        by_token = None if mask is None else mask[:, None]
        for (_, factor), part in zip(groups, z.split(sizes, dim=2), strict=True):
            q, pair = part.split([1, 2])
            pair = running_pool(pair, factor) if is_causal else pool(pair, factor, mask=by_token)
            k, v = pair.unbind()
            yield self._expand(q.squeeze(0), k, v, mask, is_causal, True, factor)

    def why_not_context(self) -> str | None:
        """A reason for convolved queries and keys."""
        return None if self.convolution is None else "convolved queries and keys have no cross-attention"

    def why_not_causal(self) -> str | None:
        """A reason for a convolution over a grid, and for centred keys of the linear kernel."""
        if self.convolution is not None and self.convolution.grid_size is not None:
            return "a convolution over a grid has no causal form; conv1d has one"
        if self.is_centred and not self.kernel.shift_invariant:
            return (
                f"kernel='linear' with beta={self._beta_text()} has no causal form in linear time: each "
                "query would need keys centred for it; the kernels softmax and sparse have one"
            )
        return None

    def why_not_packed(self) -> str | None:
        """A grid has one size; a sequence in a padded batch may have fewer tokens."""
        is_grid = self.convolution is not None and self.convolution.grid_size is not None
        return "its tokens are a grid (mechanisms without grid_size serve it)" if is_grid else None

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """The kernel's reason, or that pooling and convolutions cross the parts' ends."""
        if (reason := self.kernel.why_not_sharded()) is not None:
            return reason
        if self.convolution is not None or max(self.factors) > 1:
            return "pooling and convolutions reach over a part's ends; factors=1 and convolution=None do not"
        return None

    def start_decoding(self, batch_size: int) -> SupportVectorState:
        """Empty memories of every group of heads, and zeros before the first token of a convolution."""
        none, heads = self.no_elements(), []
        for group, factor in head_groups(self.factors):
            like = none.new_empty(batch_size, group.stop - group.start, 0, self.head_dim)
            dtype = accumulation_dtype(none.dtype)
            heads.append(
                HeadsState(
                    self.kernel.empty_memory(like),
                    None if factor == 1 else none.new_zeros(batch_size, 1, self.embed_dim, dtype=dtype),
                    empty_moments(like) if self.is_centred else None,
                )
            )
        window: tuple[Tensor, ...] = ()
        if self.convolution is not None:
            rows = none.new_zeros(batch_size, self.convolution.kernel_size - 1, self.embed_dim)
            window = (rows,) if self.convolution.weights == "separable" else (rows, rows)
        return SupportVectorState(Position(), tuple(heads), window)

    def decode_token(self, x: Tensor, state: SupportVectorState) -> tuple[Tensor, SupportVectorState]:
        """The output of one token from the memories of the groups of heads, and the memories with it."""
        window: tuple[Tensor, ...] = ()
        outs, heads = [], []
        if self.convolution is not None:
            rows = [
                torch.cat([old, new], dim=1)
                for old, new in zip(state.window, self._convolved_rows(x), strict=True)
            ]
            window = tuple(row[:, 1:] for row in rows)
            q, k, v = (self.split_heads(part[:, -1:]) for part in self._convolve(rows, x))
            out, memory = self.kernel.step(q, k, v, state.heads[0].memory, state.position)
            outs, heads = [out], [HeadsState(memory)]
        else:
            for group, part in zip(self._groups(x), state.heads, strict=True):
                out, part = self._decode_heads(x, group, part, state.position)
                outs.append(out)
                heads.append(part)
        y = self.out_proj(self.merge_heads(outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)))
        return y, SupportVectorState(state.position.next(), tuple(heads), window)

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> SupportVectorState:
        """The memories after a prompt, computed in parallel."""
        position, lengths = position_after(x, lengths), whole_lengths(x, lengths)
        if self.convolution is not None:
            rows = self._convolved_rows(x)
            q, k, v = (self.split_heads(part) for part in self._convolve(rows, x))
            size = self.convolution.kernel_size - 1
            window = tuple(last_rows(row, lengths, size) for row in rows)
            memory = self.kernel.read_memory(q, k, v, lengths)
            return SupportVectorState(position, (HeadsState(memory),), window)
        heads = []
        for group in self._groups(x):
            factor = group.factor
            pooled = self.pool_tokens(x, factor, None, True)
            k, v = group.project_keys(pooled), group.project_values(pooled)
            moments = read_moments(k, lengths, factor) if self.is_centred else None
            if moments is not None and self.normalize:
                k = k - moments.first
            memory = self.kernel.read_memory(group.queries, k, v, lengths, factor)
            block = None
            if factor > 1:
                block = read_open_block(x, lengths, factor, self.pooling, self._pool_kernel(factor))
            heads.append(HeadsState(memory, block, moments))
        return SupportVectorState(position, tuple(heads))

    def _decode_heads(
        self, x: Tensor, group: HeadGroup, state: HeadsState, position: Position
    ) -> tuple[Tensor, HeadsState]:
        """One token for the heads of one factor: their output (B, heads, 1, p), and their state."""
        block, moments, q, factor = state.open_block, state.moments, group.queries, group.factor
        if block is not None:
            x, block = add_to_block(x, block, position, factor, self.pooling, self._pool_kernel(factor))
        k, v = group.project_keys(x), group.project_values(x)
        if moments is not None:
            q, k, moments = recentre_step(
                q, k, moments, position, beta=self.beta, normalize=self.normalize, eps=self.eps, factor=factor
            )
        out, memory = self.kernel.step(q, k, v, state.memory, position, factor)
        return out, HeadsState(memory, block, moments)

    def _convolved_rows(self, x: Tensor) -> list[Tensor]:
        """The input of the convolution: tokens where separable, else queries and keys; (B, N, d) each."""
        assert self.convolution is not None
        return [x] if self.convolution.weights == "separable" else [self.q_proj(x), self.k_proj(x)]

    def _convolve(self, rows: list[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens in ``rows``; x where values are not convolved."""
        assert self.convolution is not None
        if self.convolution.weights == "separable":
            for_q, for_k, for_v = self.convolution.before(rows[0], None, True)
            return self.q_proj(for_q), self.k_proj(for_k), self.v_proj(for_v)
        q, k = self.convolution.after(rows[0], rows[1], None, True)
        return q, k, self.v_proj(x)

    def _pool_kernel(self, factor: int) -> Tensor | None:
        """The learnt pooling kernel of a factor, (d, factor); None where there is none."""
        return None if self.pool_kernels is None or factor == 1 else self.pool_kernels[str(factor)]

    def _expand(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, is_self: bool,
        factor: int = 1,
    ) -> Tensor:  # fmt: skip
        """The outputs of heads whose keys and values are pooled by ``factor``; the mask is that of tokens."""
        return support_vector_attention(
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
            factor=factor,
            attention_mask=None if mask is None else pool_mask(mask, factor),
            query_mask=mask if is_self else None,
            is_causal=is_causal,
        )

    def pool_tokens(self, x: Tensor, factor: int, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Pool tokens to blocks, (B, M, d), or to the open block at every token, (B, N, d), where causal."""
        kernel = self._pool_kernel(factor)
        if is_causal:
            return running_pool(x, factor, self.pooling, weight=kernel)
        return pool(x, factor, self.pooling, mask=mask, weight=kernel)

    def _groups(self, x: Tensor) -> Iterator[HeadGroup]:
        """The groups of heads, with the queries of the tokens x (B, N, d)."""
        return project_groups(x, self.q_proj, self.k_proj, self.v_proj, self.factors)

    def reads_positions(self) -> bool:
        """True where pooling, a convolution over the sequence, or the kernel reads positions."""
        sequence = self.convolution is not None and self.convolution.grid_size is None
        return sequence or self.kernel.reads_positions or max(self.factors) > 1

    def option_value(self, name: str) -> Any:
        """An option's value; one that is kept by the kernel or in another form is read from there."""
        if name == "beta":
            return self.initial_beta
        if name == "learn_beta":
            return isinstance(self.beta, Tensor)
        if name == "factors" and len(set(self.factors)) == 1:
            return self.factors[0]
        if name == "convolution" and self.convolution is not None:
            return "1d" if self.convolution.grid_size is None else "2d"
        if name in _NO_CONVOLUTION:
            own = "weights" if name == "conv_weights" else name
            return _NO_CONVOLUTION[name] if self.convolution is None else getattr(self.convolution, own)
        return super().option_value(name)

    def _beta_text(self) -> str:
        return "learnt" if isinstance(self.beta, Tensor) else str(self.beta)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, beta={self._beta_text()}, normalize={self.normalize}, "
            f"factors={list(self.factors)}, pooling={self.pooling!r}"
        )
