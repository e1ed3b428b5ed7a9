"""Primal-Attention as a layer."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch
from torch import Tensor, nn

from kernel_attention import functional
from kernel_attention.attention.base import PenalizedAttention, require_positive, require_weight
from kernel_attention.errors import InputError, unknown
from kernel_attention.functional.primal import PrimalScores, PrimalState
from kernel_attention.functional.primal_layer import PrimalWeights
from kernel_attention.kernels import (
    FeatureMap,
    accumulation_dtype,
    cosine,
    evenly_spaced,
    gather_ranks,
    get_feature_map,
    identity,
    rows_before,
    sample_positions,
    sample_rows,
)
from kernel_attention.ops.primal import Samples

_log = logging.getLogger(__name__)

_IMPLS = ("auto", "plain", "fused", "triton")
_FUSED_FROM = 256  # tokens; below, multiplying the weights out costs more than it saves


class PrimalAttention(PenalizedAttention):
    """Multi-head Primal-Attention (Chen, Tao, Tonin, Suykens, NeurIPS 2023): O(N p s) time, linear in the
    sequence.

    e_i = W_{e|X}^T phi(q_i) and r_i = W_{r|X}^T phi(k_i), joined by ``concat`` into the head's output. With
    ``data_dependent=True`` the weights are W_{e|X} = f(X)^T W_e, f(X) being rows of the layer's own input,
    evenly spaced over its real tokens; these rows are what mixes the tokens. With ``data_dependent=False``
    the non-causal layer mixes none.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        rank: number of projection directions s per head. The paper asks s <= N; its own recipes exceed it.
        eta: weight of J^2 in :func:`auxiliary_loss`. ``sqrt_lambda`` (h, s) exists only where eta > 0.
        data_dependent: whether the projection weights depend on the sequence.
        rank_multiplier: rows sampled per direction, M = rank * rank_multiplier.
        max_len: longest sequence. It caps M, and fixes the sampling grid of the causal data-dependent form,
            which needs it.
        running_means: whether the causal form averages q and k over the prefix first (listing 1).
        feature_map: phi, a name or a callable of :mod:`kernel_attention.kernels`.
        objective_form: "mean" over the tokens (released code) or "sum" (paper); see
            :func:`kernel_attention.functional.ksvd_objective`.
        square_per: "batch" squares one J over the batch's tokens; "sequence" squares every sequence's own J
            and averages the squares (what the released code does, and the same for any split into
            micro-batches).
        init: "flat" (released: orthogonal on the flattened tensor, each head's Frobenius norm 1) or
            "per_head" (orthonormal columns in every head).
        bias: whether the projections have biases.
        impl: "plain", the formulas; "fused", one pass over the tokens without stored scores, see
            :func:`kernel_attention.functional.primal_layer`; "triton", the same in kernels for GPUs; "auto",
            fused on CPU where it exists and wins and nothing traces the layer, plain elsewhere.

    Attributes:
        w_e: (h, M, s), or (h, p, s) where data-independent.
        w_r: as ``w_e``.
        sqrt_lambda: square root of Lambda's diagonal, (h, s), uniform in (0, 1) at first.
        concat: the map from the 2 s scores to the head's p outputs, shared by the heads.
    """

    sqrt_lambda: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 20,
        eta: float = 0.0,
        data_dependent: bool = True,
        rank_multiplier: int = 10,
        max_len: int | None = None,
        running_means: bool = True,
        feature_map: str | FeatureMap = "cosine",
        objective_form: Literal["mean", "sum"] = "mean",
        square_per: Literal["batch", "sequence"] = "batch",
        init: Literal["flat", "per_head"] = "flat",
        bias: bool = True,
        impl: Literal["auto", "plain", "fused", "triton"] = "auto",
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(
            rank=rank, rank_multiplier=rank_multiplier, **({} if max_len is None else {"max_len": max_len})
        )
        require_weight(eta=eta)
        if objective_form not in ("mean", "sum"):
            raise unknown("objective_form", objective_form, ("mean", "sum"))
        if square_per not in ("batch", "sequence"):
            raise unknown("square_per", square_per, ("batch", "sequence"))
        if impl not in _IMPLS:
            raise unknown("impl", impl, _IMPLS)
        if max_len is not None and rank > max_len:
            _note_rank(rank, max_len)
        self.rank = rank
        self.eta = eta
        self.data_dependent = data_dependent
        self.max_len = max_len
        self.running_means = running_means
        self.feature_map = get_feature_map(feature_map)
        self.objective_form = objective_form
        self.square_per = square_per
        self.impl = impl
        self.num_rows = rank * rank_multiplier if max_len is None else min(rank * rank_multiplier, max_len)

        weight_rows = self.num_rows if data_dependent else self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.w_e = nn.Parameter(_orthogonal(num_heads, weight_rows, rank, init))
        self.w_r = nn.Parameter(_orthogonal(num_heads, weight_rows, rank, init))
        self.concat = nn.Linear(2 * rank, self.head_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        # An unused parameter is an error under DistributedDataParallel, so it exists only where J uses it.
        self.register_parameter("sqrt_lambda", nn.Parameter(torch.rand(num_heads, rank)) if eta > 0 else None)

    def attend(
        self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """See :class:`AttentionLayer`."""
        attend = self._one_pass if self._is_fused(x, is_causal) else self._plain
        y, energy = attend(x, key_padding_mask, is_causal)
        if energy is not None:
            self.objective = functional.objective_from_energy(
                energy,
                self.w_e,
                self.w_r,
                x.size(1),
                form=self.objective_form,
                per_sequence=self.square_per == "sequence",
                key_padding_mask=key_padding_mask,
            )
        return y

    def _plain(
        self, x: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        scores = self.scores(x, key_padding_mask=key_padding_mask, is_causal=is_causal)
        lam = self.sqrt_lambda if self.training else None
        energy = None if lam is None else functional.scores_energy(scores, lam, key_padding_mask)
        return self._output(scores), energy

    def _one_pass(
        self, x: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        samples = None
        if self.data_dependent:
            samples = Samples(*sample_positions(x, self.num_rows, key_padding_mask))
        parts = (self.q_proj, self.k_proj, self.concat, self.out_proj)
        return functional.primal_layer(
            x,
            PrimalWeights(
                self.w_e, self.w_r, self.sqrt_lambda, *((part.weight, part.bias) for part in parts)
            ),
            samples=samples,
            normalize=self.feature_map is cosine,
            with_energy=self.training and self.sqrt_lambda is not None,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
            running_means=self.running_means,
            engine="triton" if self.impl == "triton" else "slices",
        )

    def _is_fused(self, x: Tensor, is_causal: bool) -> bool:
        # The compiler fuses the plain form itself, and function transforms differentiate it.
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        exists = self.feature_map in (cosine, identity) and not (is_causal and self.data_dependent)
        if self.impl in ("fused", "triton") and (traced or not exists):
            raise InputError(
                f"impl={self.impl!r} needs the feature map cosine or identity, has no data-dependent form "
                "with is_causal=True, and cannot be compiled, exported or transformed: use impl='auto' "
                "or 'plain'"
            )
        if self.impl != "auto":
            return self.impl != "plain"
        return exists and not traced and x.device.type == "cpu" and x.size(1) >= _FUSED_FROM

    def scores(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> PrimalScores:
        """Projection scores e and r of every token, each (B, h, N, s); arguments as in the layer's call."""
        rows, grid = self._sample(x, key_padding_mask, is_causal) if self.data_dependent else (None, None)
        return functional.primal_scores(
            self.split_heads(self.q_proj(x)),
            self.split_heads(self.k_proj(x)),
            self.w_e,
            self.w_r,
            rows=rows,
            grid=grid,
            running_means=self.running_means,
            feature_map=self.feature_map,
            key_padding_mask=key_padding_mask,
            is_causal=is_causal,
        )

    def penalty(self) -> Tensor | None:
        """eta J^2 of the last forward in training mode."""
        return None if self.objective is None else self.eta * self.objective.square().mean()

    def kernel_matrix(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The kernel whose singular vectors the layer learns (theorem 3.2), (B, h, N, N); for analysis,
        O(N^2).
        """
        rows = self._sample(x, key_padding_mask, False)[0] if self.data_dependent else None
        q, k = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        return functional.primal_kernel(
            q, k, rows=rows, feature_map=self.feature_map, key_padding_mask=key_padding_mask
        )

    def initial_state(self, batch_size: int) -> PrimalState:
        """The state of causal decoding before the first token; its size is constant in the sequence."""
        dtype = accumulation_dtype(self.w_e.dtype)
        sums = self.w_e.new_zeros(batch_size, self.num_heads, 1, self.head_dim, dtype=dtype)
        weights = self.w_e.new_zeros(batch_size, self.num_heads, self.head_dim, self.rank, dtype=dtype)
        gathered = weights if self.data_dependent else None
        return PrimalState(0, sums, sums, gathered, gathered)

    def step(self, x: Tensor, state: PrimalState) -> tuple[Tensor, PrimalState]:
        """Decode one token: x (B, d) and the state before it -> output (B, d) and the state after it."""
        if x.dim() != 2 or x.size(-1) != self.embed_dim:
            raise InputError(
                f"PrimalAttention.step: x has shape {tuple(x.shape)}, expected (B, {self.embed_dim})"
            )
        x = x[:, None]
        row, grid_index = None, None
        if self.data_dependent:
            row, grid_index = self.split_heads(x), self._grid_index(state.position)
        scores, state = functional.primal_step(
            self.split_heads(self.q_proj(x)),
            self.split_heads(self.k_proj(x)),
            self.w_e,
            self.w_r,
            state,
            row=row,
            grid_index=grid_index,
            running_means=self.running_means,
            feature_map=self.feature_map,
        )
        return self._output(scores)[:, 0], state

    def _output(self, scores: PrimalScores) -> Tensor:
        joined = functional.concat_scores(scores, self.concat.weight, self.concat.bias)
        return self.out_proj(self.merge_heads(joined))

    def _sample(
        self, x: Tensor, key_padding_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """f(X): rows of the layer's input in the heads' own slices, (B, h, M', p), and their grid where
        causal.
        """
        if not is_causal:
            return self.split_heads(sample_rows(x, self.num_rows, key_padding_mask)), None
        max_len = self._require_max_len(x.size(1))
        # Only the part of the fixed grid that this sequence reaches.
        grid = evenly_spaced(self.num_rows, max_len, x.device)[
            : rows_before(x.size(1), self.num_rows, max_len)
        ]
        if key_padding_mask is None:
            return self.split_heads(x[:, grid]), grid
        return self.split_heads(gather_ranks(x, grid.expand(x.size(0), -1), key_padding_mask)), grid

    def _require_max_len(self, length: int) -> int:
        if self.max_len is None:
            raise InputError(
                "max_len=None: causal data-dependent Primal-Attention needs max_len, the grid's length"
            )
        if length > self.max_len:
            raise InputError(f"sequence length {length} exceeds max_len={self.max_len}")
        return self.max_len

    def _grid_index(self, position: int) -> int | None:
        """m with t_m = position, or None."""
        max_len = self._require_max_len(position + 1)
        index = rows_before(position, self.num_rows, max_len)
        return index if rows_before(position + 1, self.num_rows, max_len) > index else None

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, eta={self.eta}, "
            f"data_dependent={self.data_dependent}, rows={self.num_rows}"
        )


def _orthogonal(num_heads: int, num_rows: int, rank: int, init: str) -> Tensor:
    """Initial projection weights, (h, num_rows, rank)."""
    weight = torch.empty(num_heads, num_rows, rank)
    if init == "flat":  # orthogonal_ sees an (h, num_rows * rank) matrix with orthonormal rows: one per head
        return nn.init.orthogonal_(weight)
    if init == "per_head":
        for head in weight:
            nn.init.orthogonal_(head)
        return weight
    raise unknown("init", init, ("flat", "per_head"))


@functools.cache
def _note_rank(rank: int, max_len: int) -> None:
    _log.info(
        "rank=%d exceeds max_len=%d: the paper asks rank <= N, its released recipes do not keep to it",
        rank,
        max_len,
    )
