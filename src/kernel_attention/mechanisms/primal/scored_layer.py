"""Layers on the scores e and r of Primal-Attention: their kernel, their sampled rows, their decoding."""

from abc import abstractmethod

from torch import Tensor, nn

from kernel_attention.core.parameters import TensorLinear
from kernel_attention.core.penalized import PenalizedAttention
from kernel_attention.mechanisms.primal.decoding import (
    PrimalState,
    primal_read,
    primal_start,
    primal_step,
)
from kernel_attention.mechanisms.primal.functional import PrimalScores, primal_kernel
from kernel_attention.tensors.features.feature_maps import FeatureMap
from kernel_attention.tensors.sampling import grid_row, sampled_rows


class ScoredAttention(PenalizedAttention):
    """A layer whose outputs are a function of the scores. A subclass has the attributes and ``output``.

    Attributes:
        w_e: (h, M, s), or (h, p, s) where data-independent.
        w_r: as ``w_e``.
        q_proj: of the queries; k_proj: of the keys.
        feature_map: phi.
        data_dependent: whether the projection weights depend on the sequence.
        num_rows: M.
        max_len: the longest sequence; the causal data-dependent form needs it.
        running_means: whether the causal form averages q and k over the prefix first.
    """

    w_e: nn.Parameter
    w_r: nn.Parameter
    q_proj: TensorLinear
    k_proj: TensorLinear
    feature_map: FeatureMap
    data_dependent: bool
    num_rows: int
    max_len: int | None
    running_means: bool

    @abstractmethod
    def scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> PrimalScores:
        """Projection scores e and r of every token, each (B, h, N, s); arguments as in the layer's call."""

    @abstractmethod
    def output(self, scores: PrimalScores) -> Tensor:
        """Join the scores of the heads: (B, h, N, s) each -> (B, N, d)."""

    def named_scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> dict[str, Tensor]:
        """The scores under the names "e" and "r"."""
        return self.scores(x, attention_mask=attention_mask, is_causal=is_causal)._asdict()

    def kernel_matrix(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
        """The kernel whose singular vectors the layer learns (theorem 3.2), (B, h, N, N); O(N^2)."""
        rows = self._sample(x, attention_mask, False)[0] if self.data_dependent else None
        q, k = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        return primal_kernel(q, k, rows=rows, feature_map=self.feature_map, attention_mask=attention_mask)

    def start_decoding(self, batch_size: int) -> PrimalState:
        """Empty sums, and no sampled rows."""
        return primal_start(self.w_e, batch_size, self.head_dim, self.data_dependent, self.feature_map)

    def decode_token(self, x: Tensor, state: PrimalState) -> tuple[Tensor, PrimalState]:
        """The output of the token's scores; the state with its row where it lies on the grid."""
        row, index = None, None
        if self.data_dependent:
            row = self.split_heads(x)
            index = grid_row(state.position, self.num_rows, self.max_len, self.w_e.dtype)
        scores, state = primal_step(
            self.split_heads(self.q_proj(x)),
            self.split_heads(self.k_proj(x)),
            self.w_e,
            self.w_r,
            state,
            row=row,
            grid_index=index,
            running_means=self.running_means,
            feature_map=self.feature_map,
        )
        return self.output(scores), state

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> PrimalState:
        """The sums over the prompt, computed in parallel."""
        return primal_read(
            self.split_heads(self.q_proj(x)),
            self.split_heads(self.k_proj(x)),
            self.w_e,
            self.w_r,
            lengths,
            x=self.split_heads(x) if self.data_dependent else None,
            num_rows=self.num_rows,
            max_len=self.max_len,
            running_means=self.running_means,
            feature_map=self.feature_map,
        )

    def _sample(
        self, x: Tensor, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rows f(X) of the layer's input in the heads' slices, (B, h, M', p), and their grid where causal."""
        rows, grid = sampled_rows(x, self.num_rows, self.max_len, attention_mask, is_causal)
        return self.split_heads(rows), grid
