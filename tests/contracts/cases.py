"""Which layers the contracts are checked on: every mechanism of the table, in the variants named here.

A new mechanism is covered by being in ``list_attention()``. It needs an entry in VARIANTS only where its
default options do not suit the sizes below, where several forms deserve the battery, or where a contract does
not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_attention import list_attention
from kernel_attention.attention import AttentionLayer, Mechanism, PenalizedAttention, create_attention

# Different primes, so that a swapped axis cannot pass.
BATCH, HEADS, LENGTH, HEAD_DIM, CONTEXT = 7, 3, 11, 5, 13
EMBED_DIM = HEADS * HEAD_DIM
MAX_LEN = 17
LENGTHS = (11, 7, 2, 5, 1, 10, 3)  # real tokens of each sequence of a padded batch


@dataclass(frozen=True)
class Variant:
    """Options of a mechanism, and what is special about it in the battery.

    ``objective_over``: what an objective that is one number is a mean over, "tokens" or "sequences".
    ``causal``: False where these options rule out a mechanism's causal form.
    ``exempt``: {name of a contract test: why it does not apply}.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    objective_over: str = "tokens"
    causal: bool = True
    exempt: Mapping[str, str] = field(default_factory=dict)


_BLOCKED = {
    "test_cross_attention_reads_another_sequence_of_its_own_length": "the blocked form is self-attention's",
    "test_the_mask_of_cross_attention_is_over_the_context": "the blocked form is self-attention's",
}
_GRID = dict.fromkeys(
    (
        "test_a_padded_batch_gives_each_sequence_its_own_output",
        "test_an_evaluated_layer_can_be_exported_with_any_length",
        "test_extreme_inputs_give_finite_outputs_and_gradients",
        "test_gradients_of_inputs_and_parameters_equal_finite_differences",
        "test_new_lengths_do_not_compile_anew",
    ),
    "the token grid fixes the length; see tests/attention/test_support_vector.py",
)
_EAGER = dict.fromkeys(
    (
        "test_an_evaluated_layer_can_be_exported_with_any_length",
        "test_graphs_of_dynamic_length_equal_eager",
        "test_inductor_equals_eager",
        "test_new_lengths_do_not_compile_anew",
        "test_one_graph_serves_forward_and_backward",
    ),
    "a backward pass written by hand is not compiled; impl='auto' takes the plain form there",
)
_SMALL = {"rank": 2, "rank_multiplier": 2}  # samples 4 of the 11 tokens

VARIANTS: dict[str, dict[str, Variant]] = {
    "primal": {
        "": Variant({**_SMALL, "eta": 0.3}),
        "data_independent": Variant({"rank": 2, "eta": 0.3, "data_dependent": False}),
        "sum": Variant({**_SMALL, "eta": 0.3, "objective_form": "sum"}, objective_over="sequences"),
        "square_per_sequence": Variant({**_SMALL, "eta": 0.3, "square_per": "sequence"}),
        "eta_0": Variant(_SMALL),
        "long_rank": Variant({"rank": 19, "rank_multiplier": 2, "eta": 0.3}),  # s and M exceed N
        "no_running_means": Variant({**_SMALL, "running_means": False, "eta": 0.3}),
        "identity_map": Variant({**_SMALL, "feature_map": "identity", "eta": 0.3}),
        "no_bias": Variant({**_SMALL, "eta": 0.3, "bias": False}),
        "fused": Variant({**_SMALL, "eta": 0.3, "impl": "fused"}, causal=False, exempt=_EAGER),
        "fused_data_independent": Variant(
            {"rank": 2, "eta": 0.3, "data_dependent": False, "impl": "fused"}, exempt=_EAGER
        ),
    },
    "softmax": {"": Variant(), "no_bias": Variant({"bias": False})},
    "linear": {
        "": Variant(),
        "relu": Variant({"feature_map": "relu"}),
        "cosine": Variant({"feature_map": "cosine"}),
        "frobenius": Variant({"feature_map": "frobenius"}),
        "softmax_plus": Variant({"feature_map": "softmax_plus"}),
        "taylor": Variant({"feature_map": "taylor"}),
        "no_bias": Variant({"bias": False}),
    },
    "sparse": {
        "": Variant({"stride": 3}),
        "fixed": Variant({"pattern": "fixed", "stride": 3}),
        "blocked": Variant({"stride": 3, "impl": "blocked"}, exempt=_BLOCKED),
        "blocked_fixed": Variant(
            {"pattern": "fixed", "stride": 3, "summary": 2, "impl": "blocked"}, exempt=_BLOCKED
        ),
    },
    "batch_norm": {
        "": Variant({"beta": 0.6}),
        "learnt": Variant({"beta": 0.6, "learn_beta": True}),
        "normalized": Variant({"normalize": True}),
        "sparse": Variant({"kernel": {"sparse": {"stride": 3}}}),
        "linear": Variant({"kernel": "linear"}, causal=False),
        "linear_normalized": Variant({"kernel": "linear", "normalize": True}, causal=False),
    },
    "scaled_heads": {
        "": Variant(),
        "three": Variant({"factors": [1, 2, 3]}),
        "max": Variant({"factors": [1, 2, 3], "pooling": "max"}),
        "conv": Variant({"factors": [2, 2, 3], "pooling": "conv"}),
        "linear": Variant({"factors": [1, 2, 3], "kernel": "linear"}),
        "sparse": Variant({"factors": [1, 2, 3], "kernel": {"sparse": {"stride": 3}}}),
        "blocked": Variant(
            {"factors": [1, 2, 4], "kernel": {"sparse": {"stride": 4, "impl": "blocked"}}}, exempt=_BLOCKED
        ),
    },
    "batch_norm_scaled_heads": {
        "": Variant({"beta": 0.6}),
        "three": Variant({"factors": [1, 2, 3], "beta": 0.6}),
        "normalized": Variant({"factors": [1, 2, 3], "normalize": True, "learn_beta": True}),
    },
    "conv1d": {
        "": Variant({"kernel_size": 4}),
        "separate": Variant({"conv_weights": "separate"}),
        "separable": Variant({"conv_weights": "separable", "kernel_size": 3}),
        "linear": Variant({"kernel": "linear"}),
    },
    "conv2d": {"": Variant({"grid_size": (2, 5), "class_tokens": 1}, exempt=_GRID)},
    "multilinear": {
        "": Variant({"rank": 3, "eta": 0.3}, objective_over="sequences"),
        "data_dependent": Variant(
            {"rank": 2, "eta": 0.3, "variant": "data_dependent", "rank_multiplier": 2},
            objective_over="sequences",
        ),
        "learnable_mlsvd": Variant(
            {"rank": 3, "eta": 0.3, "variant": "learnable", "core": "mlsvd"}, objective_over="sequences"
        ),
        "learnable_diagonal_cost": Variant(
            {"rank": 3, "eta": 0.3, "variant": "learnable_diagonal", "core": "cost", "eta_core": 0.1},
            objective_over="sequences",
        ),
        "order_2": Variant({"rank": 3, "eta": 0.3, "order": 2, "core": "mlsvd"}, objective_over="sequences"),
        "order_4": Variant({"rank": 2, "eta": 0.3, "order": 4}, objective_over="sequences"),
        "fused": Variant(
            {"rank": 3, "eta": 0.3, "impl": "fused"}, objective_over="sequences", causal=False, exempt=_EAGER
        ),
        "fused_data_dependent": Variant(
            {"rank": 2, "eta": 0.3, "variant": "data_dependent", "rank_multiplier": 2, "impl": "fused"},
            objective_over="sequences",
            causal=False,
            exempt=_EAGER,
        ),
        "cosine": Variant(
            {"rank": 3, "eta": 0.3, "feature_map": "cosine", "objective_form": "mean"},
            objective_over="sequences",
        ),
        "softmax_plus": Variant(
            {"rank": 3, "eta": 0.3, "feature_map": "softmax_plus"}, objective_over="sequences"
        ),
        "eta_0": Variant({}),
        "long_rank": Variant(
            {"rank": 19, "rank_multiplier": 2, "eta": 0.3, "variant": "data_dependent"},
            objective_over="sequences",
        ),
    },
    "dual_multilinear": {
        "": Variant({"rank": 3}),
        "default": Variant({}),
        "sampled": Variant({"rank": 2, "num_samples": 4}),
        "chunked": Variant({"rank": 2, "chunk_size": 4}),
        "order_2": Variant({"order": 2, "rank": 2}),
    },
    "tensor": {
        "": Variant({"rank": 2}),
        "option_2": Variant({"rank": 2, "option": 2}),
        "option_3": Variant({"rank": 2, "option": 3}),
    },
    "rpc": {
        # The logits of a deep pursuit amplify the rounding of bfloat16 keys past the battery's bound.
        "": Variant({"iterations": 2, "lam": 1.0}),
        "asymmetric": Variant({"iterations": 2, "lam": 1.0, "symmetric": False}),
        "paper": Variant({"iterations": 2, "lam": 0.05, "convention": "paper"}),
    },
    "scaled": {"": Variant(), "matrix": Variant({"scaling": "matrix"})},
}


@dataclass(frozen=True)
class Case:
    """A mechanism in one variant; ``str`` is its name in the test report."""

    mechanism: Mechanism
    variant_name: str
    variant: Variant

    def __str__(self) -> str:
        return "-".join(filter(None, (self.mechanism.name, self.variant_name)))

    @property
    def causal(self) -> bool:
        return self.mechanism.causal != "no" and self.variant.causal

    @property
    def has_objective(self) -> bool:
        return bool(self.variant.options.get("eta"))

    def build(self, dtype: torch.dtype = torch.float64, **options: Any) -> AttentionLayer:
        """The layer in training mode, with every parameter moved off its start: zeros would hide errors."""
        options = {**self.variant.options, **options}
        if "max_len" in self.mechanism.options:
            options.setdefault("max_len", MAX_LEN)
        torch.manual_seed(1)
        layer = create_attention(self.mechanism.name, EMBED_DIM, HEADS, **options)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return layer.to(dtype)

    def call_forms(self) -> list[dict[str, bool]]:
        """The ways a layer of this kind may be called on one sequence batch."""
        return [{"is_causal": False}, {"is_causal": True}] if self.causal else [{"is_causal": False}]


def _cases() -> list[Case]:
    return [
        Case(mechanism, variant_name, variant)
        for mechanism in list_attention()
        for variant_name, variant in VARIANTS.get(mechanism.name, {"": Variant()}).items()
    ]


CASES = _cases()


def cases_where(accept: Callable[[Case], bool] = lambda case: True, *, others_slow: bool = False) -> Any:
    """Parametrize over the cases accepted; ``others_slow`` keeps one variant each in the quick suite."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, marks=pytest.mark.slow if others_slow and case.variant_name else ())
            for case in CASES
            if accept(case)
        ],
        ids=str,
    )


def _first_of_its_class(case: Case) -> bool:
    return case is next(other for other in CASES if other.mechanism.layer is case.mechanism.layer)


every_case = cases_where()
# For what the base classes do, once for each class of layers: its own options change nothing about it.
every_class = cases_where(_first_of_its_class)
objective_cases = cases_where(lambda case: case.has_objective)
causal_cases = cases_where(lambda case: case.causal)


def inputs(dtype: torch.dtype = torch.float64, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """(B, N, d)."""
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


def right_padding(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """(B, N) bool, True = real token."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def objective(layer: AttentionLayer) -> Tensor | None:
    """J of the last training forward, a number or (B,); None for a layer without one."""
    return layer.objective if isinstance(layer, PenalizedAttention) else None
