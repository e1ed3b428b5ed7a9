"""Primal-Attention as a layer."""

import functools
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.engine import AUTO, Engine, LayerPlan, Unsupported, checked_impl, choose, plan_call
from kernel_attention.core.layer import TokenWork
from kernel_attention.core.parameters import (
    Device,
    TensorLinear,
    can_join,
    draw_orthogonal,
    joint_linear,
    reset_module,
    why_not_by_weight,
)
from kernel_attention.core.penalized import OBJECTIVE_BOUND, checked_bound
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import require_positive, require_weight, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.nested_objective.functional import (
    KernelGrams,
    kernel_grams,
    nested_objective,
)
from kernel_attention.mechanisms.primal.cpu import FUSED
from kernel_attention.mechanisms.primal.functional import (
    PrimalScores,
    objective_from_energy,
    primal_scores,
    scores_energy,
)
from kernel_attention.mechanisms.primal.native import NATIVE
from kernel_attention.mechanisms.primal.one_pass import (
    PrimalCall,
    PrimalResult,
    PrimalWeights,
    primal_numbers,
    primal_operations,
)
from kernel_attention.mechanisms.primal.scored_layer import ScoredAttention
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, get_feature_map, identity
from kernel_attention.tensors.statistics import mean_or_zero, num_real, running_mean
from kernel_attention.tensors.unit_rows import unit_by_head

_log = logging.getLogger(__name__)

_OBJECTIVE_FORMS = ("mean", "sum", "nested")
_ENGINES: tuple[Engine[PrimalCall, PrimalResult], ...] = (NATIVE, FUSED)


@register_attention(
    "primal",
    summary="kernel SVD scores of queries and keys",
    paper="Chen et al. 2023, Primal-Attention",
    equation="W_c [W_e|X^T phi(q); W_r|X^T phi(k)]",
    time="N p s",
    memory="N s",
    state="constant",
    mixes_tokens="data-dependent or causal forms only",
)
class PrimalAttention(ScoredAttention):
    """Multi-head Primal-Attention (Chen, Tao, Tonin, Suykens, NeurIPS 2023), linear in N: O(N p s) time.

    The scores are e_i = W_{e|X}^T phi(q_i) and r_i = W_{r|X}^T phi(k_i); ``concat`` joins them into the
    head's output. With ``data_dependent=True`` the weights are W_{e|X} = f(X)^T W_e, where f(X) are rows of
    the layer's own input, evenly spaced over its real tokens; these rows mix the tokens. With
    ``data_dependent=False`` the non-causal layer mixes no tokens.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        rank: number of projection directions s per head. The paper requires s <= N; its own recipes exceed
            it.
        eta: weight of the layer's own objective in ``auxiliary_loss``: of J^2, or of the nested objective.
            ``sqrt_lambda`` (h, s) exists only where eta > 0.
        data_dependent: whether the projection weights depend on the sequence.
        rank_multiplier: rows sampled per direction, M = rank * rank_multiplier.
        max_len: longest sequence. It caps M, and fixes the sampling grid of the causal data-dependent form,
            which needs it.
        running_means: whether the causal form averages q and k over the prefix first (listing 1).
        feature_map: phi, a name or a callable of `kernel_attention.features`.
        objective_form: J as a "mean" over the tokens (released code) or a "sum" (paper), see
            ``kernel_attention.functional.ksvd_objective``; or "nested", whose minimum is the kernel SVD, see
            ``kernel_attention.functional.nested_objective``. The nested one is not squared.
        square_per: "batch" squares one J over the batch's tokens; "sequence" squares every sequence's own J
            and averages the squares (what the released code does, and the same for any split into
            micro-batches).
        objective_bound: the largest |J| at which ``auxiliary_loss`` adds eta J^2; beyond, the term grows with
            log |J|, see ``kernel_attention.core.penalized.bounded_square``. The sum form counts the bound per
            token, and the nested one has none. None: no bound, as in the paper.
        init: "flat" (released: orthogonal on the flattened tensor, each head's Frobenius norm 1) or
            "per_head" (orthonormal columns in every head).
        bias: whether the projections have biases.
        impl: "reference", the formulas; "fused", one pass over the tokens without stored scores, see
            ``one_pass.py`` and ``causal_cpu.py``; "native", the same in C++ for CPUs, in
            float32 and float64, once ``python -m kernel_attention.native build`` has built it; "auto", the
            first that serves the call and was measured to be faster, see ``plan``.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        w_e: (h, M, s), or (h, p, s) where data-independent.
        w_r: as ``w_e``.
        sqrt_lambda: square root of Lambda's diagonal, (h, s), uniform in (0, 1) at first.
        concat: the map from the 2 s scores to the head's p outputs, shared by the heads.
    """

    sqrt_lambda: nn.Parameter | None
    reference_options: Mapping[str, Any] = {"impl": "reference"}

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
        objective_form: Literal["mean", "sum", "nested"] = "mean",
        square_per: Literal["batch", "sequence"] = "batch",
        objective_bound: float | None = OBJECTIVE_BOUND,
        init: Literal["flat", "per_head"] = "flat",
        bias: bool = True,
        impl: Literal["auto", "reference", "fused", "native"] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_positive(
            rank=rank, rank_multiplier=rank_multiplier, **({} if max_len is None else {"max_len": max_len})
        )
        require_weight(eta=eta)
        if objective_form not in _OBJECTIVE_FORMS:
            raise unknown("objective_form", objective_form, _OBJECTIVE_FORMS)
        if square_per not in ("batch", "sequence"):
            raise unknown("square_per", square_per, ("batch", "sequence"))
        if init not in ("flat", "per_head"):
            raise unknown("init", init, ("flat", "per_head"))
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
        self.objective_bound = checked_bound(objective_bound)
        self.init = init
        self.impl = checked_impl(impl, _ENGINES, retired=("triton",))
        self.num_rows = rank * rank_multiplier if max_len is None else min(rank * rank_multiplier, max_len)

        weight_rows = self.num_rows if data_dependent else self.head_dim
        require_parameters(
            f"PrimalAttention: rank={rank} with {weight_rows} rows of w_e and w_r in num_heads={num_heads}",
            2 * num_heads * weight_rows * rank + 2 * rank * self.head_dim,
            "lower rank" + (", rank_multiplier or max_len" if data_dependent else ""),
        )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {**where, "bias": bias}
        self.q_proj = TensorLinear(embed_dim, embed_dim, **options)
        self.k_proj = TensorLinear(embed_dim, embed_dim, **options)
        self.w_e = nn.Parameter(torch.empty(num_heads, weight_rows, rank, **where))
        self.w_r = nn.Parameter(torch.empty(num_heads, weight_rows, rank, **where))
        self._draw_weights()
        self.concat = TensorLinear(2 * rank, self.head_dim, **options)
        self.out_proj = TensorLinear(embed_dim, embed_dim, **options)
        # An unused parameter is an error under DistributedDataParallel, so it exists only where J uses it.
        lam = nn.Parameter(torch.rand(num_heads, rank, **where)) if eta > 0 else None
        self.register_parameter("sqrt_lambda", lam)

    def reset_parameters(self) -> None:
        """Draw the projections, the weights and Lambda anew."""
        if isinstance(self.feature_map, nn.Module):
            reset_module(self.feature_map)
        self.q_proj.reset_parameters()
        self.k_proj.reset_parameters()
        self._draw_weights()
        self.concat.reset_parameters()
        self.out_proj.reset_parameters()
        if self.sqrt_lambda is not None:
            nn.init.uniform_(self.sqrt_lambda)

    @torch.no_grad()
    def _draw_weights(self) -> None:
        for weight in (self.w_e, self.w_r):
            # As one (h, M s) matrix, flat weights get orthonormal rows: one for each head.
            for part in [weight] if self.init == "flat" else weight:
                draw_orthogonal(part)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """Primal-Attention on checked arguments, (B, N, d); J in training where ``eta`` > 0."""
        call = self._call(x, attention_mask, is_causal)
        engine, _ = choose(self.impl, _ENGINES, call, is_sharded=self.sequence_group is not None)
        if engine is None:
            y, energy, grams = self._reference(x, attention_mask, is_causal)
        else:
            y, energy, grams = engine.attend(call)
        if grams is not None:
            assert self.sqrt_lambda is not None
            return y, Objective(nested_objective(grams, self.w_e, self.w_r, self.sqrt_lambda))
        return y, None if energy is None else self._objective(energy, x, attention_mask)

    def _objective(self, energy: Tensor, x: Tensor, attention_mask: Tensor | None) -> Objective:
        """J from the scores' energy."""
        assert self.objective_form != "nested"
        num_tokens = None
        if self.sequence_group is not None:
            num_tokens = self.sequence_group.places(num_real(x, attention_mask))[1]
        unit: float | Tensor = 1.0
        tokens: Tensor | int | None = None
        if self.objective_form == "sum":
            unit = (num_real(x, attention_mask) if num_tokens is None else num_tokens).clamp_min(1)
            unit = unit.to(energy) if self.square_per == "sequence" else mean_or_zero(unit.to(energy))
        elif num_tokens is not None:
            tokens = num_tokens.sum()
        elif attention_mask is not None or torch.compiler.is_compiling():
            tokens = num_real(x, attention_mask).sum()
        else:  # a number costs less than a tensor of it
            tokens = x.size(0) * x.size(1)
        value = objective_from_energy(
            energy,
            self.w_e,
            self.w_r,
            x.size(1),
            form=self.objective_form,
            per_sequence=self.square_per == "sequence",
            attention_mask=attention_mask,
            num_tokens=num_tokens,
            batch=x.size(0),
        )
        return Objective(value, unit=unit, tokens=tokens)

    @property
    def _is_nested(self) -> bool:
        return self.objective_form == "nested" and self.sqrt_lambda is not None

    @property
    def _needs_energy(self) -> bool:
        return self.training and self.sqrt_lambda is not None and not self._is_nested

    @property
    def _needs_grams(self) -> bool:
        return self.training and self._is_nested

    @torch.no_grad()
    def _grams(self, x: Tensor, attention_mask: Tensor | None, is_causal: bool) -> KernelGrams:
        rows = self._sample(x, attention_mask, False)[0] if self.data_dependent else None
        return kernel_grams(
            self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x)),
            rows=rows, running_means=self.running_means, feature_map=self.feature_map,
            query_mask=attention_mask, attention_mask=attention_mask, is_causal=is_causal,
        )  # fmt: skip

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why the layer cannot share a sequence: its form is not the one-pass form. None where it can."""
        if self._is_nested:
            return "the nested objective reads the whole sequence on one rank"
        if self.impl == "reference" or self.feature_map not in (cosine, identity):
            return "only the one-pass form is sharded: impl 'auto', feature map cosine or identity"
        if is_causal and self.data_dependent:
            return "the causal data-dependent form reads every row of the grid on one rank"
        return self._why_not_by_weight()

    def _why_not_by_weight(self) -> str | None:
        return why_not_by_weight(self, "q_proj", "k_proj", "concat", "out_proj")

    def _reference(
        self, x: Tensor, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Tensor | None, KernelGrams | None]:
        scores = self.scores(x, attention_mask=attention_mask, is_causal=is_causal)
        lam = self.sqrt_lambda if self._needs_energy else None
        energy = None if lam is None else scores_energy(scores, lam, attention_mask)
        grams = self._grams(x, attention_mask, is_causal) if self._needs_grams else None
        return self.output(scores), energy, grams

    def _call(self, x: Tensor, attention_mask: Tensor | None, is_causal: bool) -> PrimalCall:
        """The call as the engines see it."""
        why = self._why_not_by_weight()
        weights: PrimalWeights | Unsupported
        if why is not None:
            weights = Unsupported(why)
        else:
            parts = (self.q_proj, self.k_proj, self.concat, self.out_proj)
            weights = PrimalWeights(
                self.w_e, self.w_r, self.sqrt_lambda, *((part.weight, part.bias) for part in parts)
            )
        return PrimalCall(
            x, weights, self.embed_dim, self.num_heads, self.feature_map,
            self.num_rows if self.data_dependent else 0, self.max_len, self._needs_energy, self._needs_grams,
            attention_mask, is_causal, self.running_means, self.sequence_group,
            total_energy=self.square_per == "batch",
        )  # fmt: skip

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why."""
        return plan_call(
            self.impl, _ENGINES, self._call(x, None, is_causal), compiled=compiled,
            is_sharded=self.sequence_group is not None,
        )  # fmt: skip

    def scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> PrimalScores:
        """Projection scores e and r of every token, each (B, h, N, s); arguments as in the layer's call."""
        rows, grid = self._sample(x, attention_mask, is_causal) if self.data_dependent else (None, None)
        if is_causal and self.running_means:  # an affine map of the mean is the mean of the map
            x = running_mean(x[:, None], attention_mask).squeeze(1)
        feature_map = self.feature_map
        if feature_map in (cosine, identity) and self.impl == AUTO and can_join(x, self.q_proj, self.k_proj):
            z = joint_linear(x, self.q_proj, self.k_proj).unflatten(-1, (2, self.num_heads, -1))
            q, k = unit_by_head(z.permute(0, 3, 1, 2, 4), (4,) if feature_map is cosine else None).unbind()
            feature_map = identity
        else:
            q, k = self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))
        return primal_scores(
            q,
            k,
            self.w_e,
            self.w_r,
            rows=rows,
            grid=grid,
            running_means=False,
            feature_map=feature_map,
            attention_mask=attention_mask,
            is_causal=is_causal,
            evenly_spaced=True,
        )

    def token_work(self, *, training: bool, length: int) -> TokenWork | None:
        """The work of the fused form on a token; None where ``impl`` is "reference"."""
        if self.impl == "reference":
            return None
        operations = primal_operations(
            self.embed_dim,
            self.num_heads,
            objective=self.eta > 0,
            training=training,
        )
        return TokenWork(operations, primal_numbers(self.embed_dim, training=training))

    @property
    def has_penalty(self) -> bool:
        """True where the layer was made with eta > 0."""
        return self.sqrt_lambda is not None

    def weigh_objective(self, objective: Objective) -> Tensor:
        """eta J^2, or eta times the nested objective."""
        if self._is_nested:
            return self.eta * mean_or_zero(objective.value)
        return self.eta * mean_or_zero(self.square_of(objective))

    @property
    def is_squared(self) -> bool:
        """False for the nested objective, which is bounded below."""
        return not self._is_nested

    def why_not_causal(self) -> str | None:
        """A reason for the data-dependent form without ``max_len``, or in the one-pass forms."""
        if self.data_dependent and self.impl == "native":
            return "impl='native' has no data-dependent causal form: use 'auto', 'fused' or 'reference'"
        if self.data_dependent and self.impl == "fused" and self.eta > 0:
            return (
                "impl='fused' has no data-dependent causal form with eta > 0: use impl='auto' or 'reference'"
            )
        if self.data_dependent and self._is_nested:
            return "objective_form='nested' has no data-dependent causal form: every token has its own rows"
        if self.data_dependent and self.max_len is None:
            return (
                "max_len=None: the causal data-dependent form needs max_len, the length of its sampling grid"
            )
        return None

    def output(self, scores: PrimalScores) -> Tensor:
        """Join the scores of the heads: (B, h, N, s) each -> (B, N, d)."""
        return self.out_proj(self.merge_heads(self.concat(torch.cat(scores, dim=-1))))

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, eta={self.eta}, "
            f"data_dependent={self.data_dependent}, rows={self.num_rows}"
        )


@functools.cache
def _note_rank(rank: int, max_len: int) -> None:
    _log.info(
        "rank=%d exceeds max_len=%d: the paper requires rank <= N, its released recipes do not keep to it",
        rank,
        max_len,
    )
