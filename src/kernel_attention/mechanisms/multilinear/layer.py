"""Multilinear (KMLSVD) attention in the primal as a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.calls import Objective
from kernel_attention.core.engine import AUTO, Engine, LayerPlan, Unsupported, checked_impl, choose, plan_call
from kernel_attention.core.parameters import (
    Device,
    can_join,
    draw_orthogonal,
    is_plain,
    joint_linear,
    reset_module,
    why_not_by_weight,
)
from kernel_attention.core.penalized import OBJECTIVE_BOUND, PenalizedAttention, checked_bound
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.multilinear.base_layer import ReadsModes
from kernel_attention.mechanisms.multilinear.cpu import (
    FUSED,
    MultilinearCall,
    MultilinearResult,
    MultilinearWeights,
)
from kernel_attention.mechanisms.multilinear.decoding import (
    MultilinearState,
    multilinear_read,
    multilinear_start,
    multilinear_step,
)
from kernel_attention.mechanisms.multilinear.functional import Modes, join_modes, multilinear_modes
from kernel_attention.mechanisms.multilinear.gpu import (
    Terms,
    has_joint_modes,
    joint_factors,
    mode_grams,
    multilinear_launches,
    objective_launches,
)
from kernel_attention.mechanisms.multilinear.objective import core_penalty, kmlsvd_objective
from kernel_attention.tensors.features.feature_maps import (
    FeatureMapSpec,
    frobenius,
    get_feature_map,
    identity,
)
from kernel_attention.tensors.multilinear.factors import mlsvd_core, multilinear_factors
from kernel_attention.tensors.multilinear.kernel_tensors import multilinear_kernel
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.sampling import grid_row, sampled_rows
from kernel_attention.tensors.statistics import accumulation_dtype, num_real

Variant = Literal["standard", "data_dependent", "learnable", "learnable_diagonal"]
CoreTreatment = Literal["none", "cost", "mlsvd"]

_VARIANTS = ("standard", "data_dependent", "learnable", "learnable_diagonal")
_CORES = ("none", "cost", "mlsvd")
_ENGINES: tuple[Engine[MultilinearCall, MultilinearResult], ...] = (FUSED,)


@register_attention(
    "multilinear",
    summary="multilinear SVD scores of queries, keys and further projections, any order",
    paper="Verbeek 2025, 3D Primal Attention",
    equation="E_1 = Phi_1 C_(1) (W_3 (x) W_2) S_(1)^T, E_2, .., E_D alike",
    time="D N p^2",
    memory="D N p",
    state="constant",
    mixes_tokens="data-dependent variant; otherwise through the sequence's norm alone",
)
class MultilinearAttention(ReadsModes, PenalizedAttention):
    """Multi-head multilinear attention of order D in the primal (Verbeek, TU Delft 2025), linear in N.

    Queries, keys and D - 2 fibers are the modes of a kernel tensor that is never formed. Each token gets R
    scores per mode, E_1 = Phi_1 C_(1) (W_3 (x) W_2) S_(1)^T and so on, and ``concat`` joins them into the
    head's output. The factors to the right of Phi_n do not depend on the sequence and are contracted once per
    forward. Tokens mix in the data-dependent variant only, apart from the norm of the sequence by which the
    ``frobenius`` map divides.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d.
        order: number of modes D, from 2 to 16.
        rank: R, of every mode; None: the head width p. The thesis requires R <= p.
        variant: the form of C: "standard" (superdiagonal identity), "learnable" (the whole tensor, h p^D
            numbers), "learnable_diagonal" (its superdiagonal), "data_dependent" (the tensorised sequence: M
            sampled rows).
        core: how S stays the core of a multilinear SVD: "none", "cost" (J_S is added to the loss) or "mlsvd"
            (every forward replaces S by the core of its own multilinear SVD).
        feature_map: phi: a name, ``{name: options}`` or a callable; see
            ``kernel_attention.features.get_feature_map``.
        eta: weight of J in ``auxiliary_loss`` (eta_1 of the thesis).
        eta_core: weight of J_S (eta_2); above 0 exactly where ``core="cost"``.
        objective_power: 2 adds eta J^2; 1 adds eta J as the thesis prints it, which is unbounded below, so
            that training diverges.
        objective_form: "sum" over the tokens (thesis) or "mean" (features over sqrt(N)). Feature maps that do
            not normalise over the sequence need "mean", because ||K||^2 grows with N^D.
        objective_bound: the largest |J| at which ``auxiliary_loss`` adds eta J^2; beyond, the term grows with
            log |J|, see ``kernel_attention.core.penalized.bounded_square``. None: no bound, as in the thesis.
        rank_multiplier: rows sampled per rank by the data-dependent variant, M = R * rank_multiplier.
        max_len: longest sequence. It caps M, and fixes the sampling grid of the causal data-dependent form,
            which needs it.
        bias: whether the projections have biases.
        impl: "reference", the formulas; "fused", everything a token meets in one product, see
            ``cpu.py``; "auto", fused where it serves the call and was measured to be faster, see
            ``plan``.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

    Attributes:
        q_proj, k_proj, f_proj: to queries, keys and the D - 2 fibers, one map of width (D - 2) d or None.
        w: W_1..W_D, (D, h, p or M, R), orthonormal columns at first.
        core: S, (h, R, .., R), at first the multilinear SVD core of a normal tensor.
        compatibility: C, (h, p) or (h, p, .., p), the identity at first; None where it is not learnt.
        concat: the map from the D R scores to the head's p outputs, shared by the heads.
    """

    core: nn.Parameter
    compatibility: nn.Parameter | None
    reference_options: Mapping[str, Any] = {"impl": "reference"}

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        order: int = 3,
        rank: int | None = None,
        variant: Variant = "standard",
        core: CoreTreatment = "none",
        feature_map: FeatureMapSpec = "frobenius",
        eta: float = 0.0,
        eta_core: float = 0.0,
        objective_power: Literal[1, 2] = 2,
        objective_form: Literal["sum", "mean"] = "sum",
        objective_bound: float | None = OBJECTIVE_BOUND,
        rank_multiplier: int = 1,
        max_len: int | None = None,
        bias: bool = True,
        impl: Literal["auto", "reference", "fused"] = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, order, bias, device, dtype)
        rank = self.head_dim if rank is None else rank
        require_positive(
            rank=rank, rank_multiplier=rank_multiplier, **({} if max_len is None else {"max_len": max_len})
        )
        _check_options(variant, core, eta, eta_core, objective_power, objective_form)
        self.impl = checked_impl(impl, _ENGINES)
        self.rank = rank
        self.variant = variant
        self.core_treatment = core
        self.feature_map = get_feature_map(feature_map, self.head_dim, device=device, dtype=dtype)
        self.eta = eta
        self.eta_core = eta_core
        self.objective_power = objective_power
        self.objective_form = objective_form
        self.objective_bound = checked_bound(objective_bound)
        self.max_len = max_len
        self.num_rows = rank * rank_multiplier if max_len is None else min(rank * rank_multiplier, max_len)

        width = getattr(self.feature_map, "num_features", self.head_dim)
        if variant == "data_dependent" and width != self.head_dim:
            raise InputError(
                f"feature_map={feature_map!r}: variant='data_dependent' needs {self.head_dim} features, "
                f"it gives {width}"
            )
        weight_rows = self.num_rows if variant == "data_dependent" else width
        learnt = width**order if variant == "learnable" else 0
        # The factors contract every row of W with the core in all modes but one.
        met = weight_rows * rank ** (order - 1)
        require_parameters(
            f"MultilinearAttention: order={order} with rank={rank}, {weight_rows} rows of w and "
            f"variant={variant!r}",
            num_heads * (order * weight_rows * rank + rank**order + learnt + met),
            "lower order or rank" + (", or choose another variant" if learnt else ""),
        )
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w = nn.Parameter(torch.empty(order, num_heads, weight_rows, rank, **where))
        self.core = nn.Parameter(torch.empty(num_heads, *[rank] * order, **where))
        learnt_modes = {"learnable": order, "learnable_diagonal": 1}.get(variant)
        shape = None if learnt_modes is None else (num_heads, *[width] * learnt_modes)
        compatibility = None if shape is None else nn.Parameter(torch.empty(shape, **where))
        self.register_parameter("compatibility", compatibility)
        self.draw_weights()
        self.add_outputs(rank, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the modes' weights, the core and C anew, after the projections."""
        if isinstance(self.feature_map, nn.Module):
            reset_module(self.feature_map)
        super().reset_parameters()

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Draw W, orthonormal, and S; C becomes the identity."""
        for head in self.w.flatten(0, 1):
            draw_orthogonal(head)
        if not self.core.is_meta:  # an eigenvalue decomposition needs values
            dtype = accumulation_dtype(self.core.dtype)
            self.core.copy_(mlsvd_core(torch.empty_like(self.core, dtype=dtype).normal_()))
        if self.compatibility is not None:
            # The identity: 1 where all mode indices are equal. The diagonal alone has one of them.
            self.compatibility.zero_()
            diagonal = torch.arange(self.compatibility.size(1), device=self.compatibility.device)
            modes = self.compatibility.dim() - 1
            index: tuple[slice | Tensor, ...] = (slice(None), *[diagonal] * modes)
            self.compatibility[index] = 1.0

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor, Objective | None]:
        """Multilinear attention on checked arguments, (B, N, d); J and J_S in training with a weight."""
        wants_objective = self.training and (self.eta > 0 or self.eta_core > 0)
        if self._has_few_launches(x, is_causal):
            return self._attend_in_few(x, attention_mask, wants_objective)
        weights = self.w.unbind()
        core, factors = self._factors(weights)
        call = self._call(x, factors, attention_mask, is_causal, wants_objective)
        engine, _ = choose(self.impl, _ENGINES, call, is_sharded=self._is_shared(is_causal))
        if engine is not None:
            y, grams = engine.attend(call)
        else:
            modes = self._modes(x, factors, attention_mask, is_causal, wants_objective)
            y, grams = self.out_proj(self.merge_heads(self._join(modes))), modes.grams
        if not wants_objective:
            return y, None
        value = kmlsvd_objective(
            grams or [], weights, core, compatibility=self.compatibility, factors=factors,
            num_tokens=self._num_tokens(x, attention_mask),
        )  # fmt: skip
        return y, self._with_penalty(core, value)

    def _has_few_launches(self, x: Tensor, is_causal: bool) -> bool:
        is_ours = self.impl == AUTO and not is_causal and self.variant != "data_dependent"
        is_ours = is_ours and self.sequence_group is None and has_joint_modes(self.feature_map)
        return is_ours and x.size(0) > 0 and is_plain(self.concat) and can_join(x, *self.mode_maps())

    def _attend_in_few(
        self, x: Tensor, attention_mask: Tensor | None, wants_objective: bool
    ) -> tuple[Tensor, Objective | None]:
        core = self._core_in_use()
        unfolded = None
        if self.compatibility is None:
            factors, unfolded = joint_factors(self.w, core)
        else:
            factors = torch.stack(multilinear_factors(self.w.unbind(), core, self.compatibility))
        z = joint_linear(x, *self.mode_maps()).unflatten(-1, (self.order, self.num_heads, -1))
        heads, features = multilinear_launches(
            z, factors, (self.concat.weight, self.concat.bias), feature_map=self.feature_map,
            attention_mask=attention_mask,
        )  # fmt: skip
        y = self.out_proj(heads)
        if not wants_objective:
            return y, None
        num_tokens = self._num_tokens(x, attention_mask)
        if unfolded is not None:
            value = objective_launches(Terms(features, self.w, unfolded, factors), num_tokens)
        else:
            value = kmlsvd_objective(
                mode_grams(features, self.order).unbind(), self.w.unbind(), core,
                compatibility=self.compatibility, factors=factors.unbind(), num_tokens=num_tokens,
            )  # fmt: skip
        return y, self._with_penalty(core, value)

    def _join(self, modes: Modes) -> Tensor:
        if is_plain(self.concat):
            return join_modes(modes, self.concat.weight, self.concat.bias)
        return self.concat(torch.cat(modes.scores(), dim=-1))

    def _call(
        self, x: Tensor, factors: list[Tensor], mask: Tensor | None, is_causal: bool, with_grams: bool
    ) -> MultilinearCall:
        """The call as the engines see it."""
        why = self._why_not_by_weight()
        weights: MultilinearWeights | Unsupported
        if why is not None:
            weights = Unsupported(why)
        else:
            weights = MultilinearWeights(
                self.projections(),
                factors,
                (self.concat.weight, self.concat.bias),
                (self.out_proj.weight, self.out_proj.bias),
            )
        num_rows = self.num_rows if self.variant == "data_dependent" else 0
        return MultilinearCall(
            x, weights, self.embed_dim, self.num_heads, self.feature_map, num_rows, mask, is_causal,
            with_grams, self.sequence_group,
        )  # fmt: skip

    def _is_shared(self, is_causal: bool) -> bool:
        """True where processes share the sequence and an engine must serve: the causal formulas can too."""
        return self.sequence_group is not None and not is_causal

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """Which engine serves a call, and why."""
        call = self._call(x, [], None, is_causal, False)
        is_sharded = self._is_shared(is_causal)
        return plan_call(self.impl, _ENGINES, call, is_sharded=is_sharded, compiled=compiled)

    def why_not_sharded(self, is_causal: bool) -> str | None:
        """Why the layer cannot share a sequence: its form is not the linear one. None where it can."""
        if self.impl == "reference" or self.feature_map not in (frobenius, identity):
            return "only the linear form is sharded: impl 'auto', feature map frobenius or identity"
        if is_causal and self.variant == "data_dependent":
            return "the causal data-dependent form reads every row of the grid on one rank"
        return None if is_causal else self._why_not_by_weight()

    def _why_not_by_weight(self) -> str | None:
        fibers = [] if self.f_proj is None else ["f_proj"]
        return why_not_by_weight(self, "q_proj", "k_proj", *fibers, "concat", "out_proj")

    def scores(
        self, x: Tensor, *, attention_mask: Tensor | None = None, is_causal: bool = False
    ) -> tuple[Tensor, ...]:
        """E_1..E_D of every token, each (B, h, N, R); arguments as in the layer's call."""
        return self._modes(x, self.factors()[1], attention_mask, is_causal, False).scores()

    def why_not_causal(self) -> str | None:
        """A reason for ``impl="fused"``, and for the data-dependent variant without ``max_len``."""
        if self.impl == "fused":
            return "impl='fused' has no causal form: use impl='auto' or 'reference'"
        if self.variant == "data_dependent" and self.max_len is None:
            return (
                "max_len=None: the causal data-dependent form needs max_len, the length of its sampling grid"
            )
        return None

    def start_decoding(self, batch_size: int) -> MultilinearState:
        """The factors to the right of Phi_n, and empty sums."""
        data_dependent = self.variant == "data_dependent"
        return multilinear_start(
            self.factors()[1], batch_size, self.head_dim, data_dependent, self.feature_map
        )

    def decode_token(self, x: Tensor, state: MultilinearState) -> tuple[Tensor, MultilinearState]:
        """The token's scores, joined and projected; the state with its row where it lies on the grid."""
        row, index = None, None
        if self.variant == "data_dependent":
            row = self.split_heads(x)
            index = grid_row(state.position, self.num_rows, self.max_len, self.w.dtype)
        scores, state = multilinear_step(
            self.sequences(x), state, row=row, grid_index=index, feature_map=self.feature_map
        )
        return self.out_proj(self.merge_heads(self.concat(torch.cat(scores, dim=-1)))), state

    def read_prompt(self, x: Tensor, lengths: Tensor | None) -> MultilinearState:
        """The sums over the prompt, computed in parallel."""
        return multilinear_read(
            self.sequences(x),
            self.factors()[1],
            lengths,
            x=self.split_heads(x) if self.variant == "data_dependent" else None,
            num_rows=self.num_rows,
            max_len=self.max_len,
            feature_map=self.feature_map,
        )

    def kernel_tensor(self, x: Tensor, *, attention_mask: Tensor | None = None) -> Tensor | None:
        """C x_1 Phi_1 .. x_D Phi_D, (B, h, N, .., N), zero at padded tokens; for analysis.

        None where C comes from the sequence.
        """
        if self.variant == "data_dependent":
            return None
        features = [self.feature_map(sequence, attention_mask, False) for sequence in self.sequences(x)]
        features = [zero_padding(phi, attention_mask) for phi in features]
        return multilinear_kernel(features, self.compatibility)

    @property
    def has_penalty(self) -> bool:
        """True where eta > 0 or eta_core > 0."""
        return self.eta > 0 or self.eta_core > 0

    @property
    def core_objective(self) -> Tensor | None:
        """J_S of the last forward in training mode; None before it."""
        objective = self.last_objective
        if objective is None:
            return None
        return torch.zeros_like(objective.value) if objective.core is None else objective.core

    def weigh_objective(self, objective: Objective) -> Tensor:
        """eta J^2 + eta_core J_S."""
        terms = [] if objective.core is None else [self.eta_core * objective.core]
        if self.eta > 0 or not terms:
            terms.append(self.eta * (self.square_of(objective) if self.is_squared else objective.value))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    @property
    def is_squared(self) -> bool:
        """False where ``objective_power`` is 1."""
        return self.objective_power == 2

    def factors(self) -> tuple[Tensor, list[Tensor]]:
        """The core in use, (h, R, .., R), and the D factors to the right of Phi_n, (h, M, R) each."""
        return self._factors(self.w.unbind())

    def _factors(self, weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        core = self._core_in_use()
        return core, multilinear_factors(weights, core, self.compatibility)

    def _core_in_use(self) -> Tensor:
        return mlsvd_core(self.core) if self.core_treatment == "mlsvd" else self.core

    def _modes(
        self, x: Tensor, factors: list[Tensor], mask: Tensor | None, is_causal: bool, with_grams: bool
    ) -> Modes:
        rows, grid = None, None
        if self.variant == "data_dependent":
            rows, grid = sampled_rows(x, self.num_rows, self.max_len, mask, is_causal)
            rows = self.split_heads(rows)
        return multilinear_modes(
            self.sequences(x),
            factors,
            rows=rows,
            grid=grid,
            feature_map=self.feature_map,
            attention_mask=mask,
            is_causal=is_causal,
            with_grams=with_grams,
            group=self.sequence_group,
        )

    def _num_tokens(self, x: Tensor, mask: Tensor | None) -> Tensor | int | None:
        """Divisor of the Gram matrices: real tokens of every sequence; None for the sum."""
        if self.objective_form == "sum":
            return None
        if self.sequence_group is not None:
            return self.sequence_group.places(num_real(x, mask))[1]
        return x.size(1) if mask is None else mask.sum(dim=1)

    def _with_penalty(self, core: Tensor, value: Tensor) -> Objective:
        """J with J_S."""
        return Objective(value, core=core_penalty(core) if self.eta_core > 0 else None)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, order={self.order}, rank={self.rank}, "
            f"variant={self.variant!r}, "
            f"core={self.core_treatment!r}, eta={self.eta}, eta_core={self.eta_core}"
        )


def _check_options(
    variant: str, core: str, eta: float, eta_core: float, objective_power: int, objective_form: str
) -> None:
    if variant not in _VARIANTS:
        raise unknown("variant", variant, _VARIANTS)
    if core not in _CORES:
        raise unknown("core", core, _CORES)
    for name, value in {"eta": eta, "eta_core": eta_core}.items():
        if not value >= 0:
            raise InputError(f"{name}={value!r} must be a number of at least 0")
    if (core == "cost") != (eta_core > 0):
        raise InputError(
            f"eta_core={eta_core!r} with core={core!r}: core='cost' needs eta_core above 0, "
            "the others have no J_S"
        )
    if objective_power not in (1, 2):
        raise InputError(f"objective_power={objective_power!r} must be 1 or 2")
    if objective_form not in ("sum", "mean"):
        raise unknown("objective_form", objective_form, ("mean", "sum"))
