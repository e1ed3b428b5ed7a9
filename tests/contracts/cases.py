"""Which layers the contracts are checked on: every mechanism of the table, in the variants named here.

A new mechanism is covered by being in ``list_attention()``. It needs an entry in VARIANTS only where its
default options do not suit the sizes of the battery, where several forms deserve it, or where a contract does
not apply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kernel_attention import list_attention
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.mechanisms import Mechanism
from kernel_attention.testing import (
    BATCH,
    CONTEXT,
    EMBED_DIM,
    HEAD_DIM,
    HEADS,
    LENGTH,
    LENGTHS,
    MAX_LEN,
    Subject,
    inputs,
    objective,
    right_padding,
)

__all__ = [
    "BATCH", "CONTEXT", "EMBED_DIM", "HEADS", "HEAD_DIM", "LENGTH", "LENGTHS", "MAX_LEN",
    "inputs", "objective", "right_padding",
]  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Options of a mechanism, and what is special about it in the battery.

    ``objective_over``: what an objective that is one number is a mean over, "tokens" or "sequences".
    ``causal``: False where these options rule out a mechanism's causal form.
    ``exempt``: {name of a check: why it does not apply}.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    objective_over: str = "tokens"
    causal: bool = True
    fixed_length: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)


_BLOCKED = {
    "cross_attention_reads_another_sequence_of_its_own_length": "the blocked form is self-attention's"
}
_SEQUENTIAL = {
    "gradients_equal_finite_differences": "each feature descends an objective of its own; test_nested.py"
}
_SMALL = {"rank": 2, "rank_multiplier": 2}  # samples 4 of the 11 tokens

VARIANTS: dict[str, dict[str, Variant]] = {
    "primal": {
        "": Variant({**_SMALL, "eta": 0.3}),
        "data_independent": Variant({"rank": 2, "eta": 0.3, "data_dependent": False}),
        "sum": Variant({**_SMALL, "eta": 0.3, "objective_form": "sum"}, objective_over="sequences"),
        "square_per_sequence": Variant({**_SMALL, "eta": 0.3, "square_per": "sequence"}),
        "nested": Variant(
            {"rank": 2, "eta": 0.3, "data_dependent": False, "objective_form": "nested"},
            objective_over="sequences",
            exempt=_SEQUENTIAL,
        ),
        "nested_data_dependent": Variant(
            {**_SMALL, "eta": 0.3, "objective_form": "nested"},
            objective_over="sequences",
            causal=False,
            exempt=_SEQUENTIAL,
        ),
        "eta_0": Variant(_SMALL),
        "long_rank": Variant({"rank": 19, "rank_multiplier": 2, "eta": 0.3}),  # s and M exceed N
        "no_running_means": Variant({**_SMALL, "running_means": False, "eta": 0.3}),
        "identity_map": Variant({**_SMALL, "feature_map": "identity", "eta": 0.3}),
        "no_bias": Variant({**_SMALL, "eta": 0.3, "bias": False}),
        "fused": Variant({**_SMALL, "eta": 0.3, "impl": "fused"}, causal=False),
        "fused_data_independent": Variant({"rank": 2, "eta": 0.3, "data_dependent": False, "impl": "fused"}),
    },
    "primal_values": {
        "": Variant({"rank": 2, "eta": 0.3}, objective_over="sequences", exempt=_SEQUENTIAL),
        "taylor": Variant(
            {"rank": 3, "eta": 0.3, "feature_map": "taylor"}, objective_over="sequences", exempt=_SEQUENTIAL
        ),
        "keys": Variant({"rank": 2, "normalize": "keys"}),
        "ridge": Variant(
            {"rank": 3, "eta": 0.3, "readout": "ridge", "normalize": "none"},
            objective_over="sequences",
            exempt=_SEQUENTIAL,
        ),
        "ridge_output": Variant({"rank": 4, "readout": "ridge"}),
        "twicing": Variant({"rank": 2, "normalize": "keys", "readout": "twicing"}),
        "twicing_rows": Variant({"rank": 2, "feature_map": "elu", "normalize": "rows", "readout": "twicing"}),
        "rows": Variant(
            {"rank": 2, "eta": 0.3, "feature_map": "elu", "normalize": "rows"},
            objective_over="sequences",
            exempt=_SEQUENTIAL,
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
    },
    "ridge": {
        "": Variant(),
        "forgetting": Variant({"forgetting": 0.95, "lam": 0.3}),
        "elu": Variant({"feature_map": "elu"}),
        "frobenius": Variant({"feature_map": "frobenius", "lam": 0.01}),
        "taylor": Variant({"feature_map": "taylor"}),
        "softmax_plus": Variant({"feature_map": "softmax_plus"}),
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
        "normalized": Variant({"factors": [1, 2, 3], "normalize": True, "learn_beta": True}),
    },
    "conv1d": {
        "": Variant({"kernel_size": 4}),
        "separate": Variant({"conv_weights": "separate"}),
        "separable": Variant({"conv_weights": "separable", "kernel_size": 3}),
        "linear": Variant({"kernel": "linear"}),
    },
    "conv2d": {"": Variant({"grid_size": (2, 5), "class_tokens": 1}, fixed_length=True)},
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
        "fused": Variant({"rank": 3, "eta": 0.3, "impl": "fused"}, objective_over="sequences", causal=False),
        "fused_data_dependent": Variant(
            {"rank": 2, "eta": 0.3, "variant": "data_dependent", "rank_multiplier": 2, "impl": "fused"},
            objective_over="sequences",
            causal=False,
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
        "chunked": Variant(
            {"rank": 2, "chunk_size": 4},
            exempt=dict.fromkeys(
                ("new_lengths_do_not_compile_anew", "an_evaluated_layer_can_be_exported_with_any_length"),
                "a graph has the chunks of one length side by side",
            ),
        ),
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
        "fused": Variant({"iterations": 2, "lam": 1.0, "impl": "fused"}),
    },
    # Samples of two calls differ by design; tests/mechanisms/gaussian_process holds them to the distribution.
    "kernel_gp": {
        "": Variant({**_SMALL, "eta": 0.3, "kl_weight": 0.1, "sample": False}),
        "data_independent": Variant(
            {"rank": 2, "eta": 0.3, "kl_weight": 0.1, "data_dependent": False, "sample": False}
        ),
        "eta_0": Variant({**_SMALL, "sample": False}),
    },
    "sgpa": {"": Variant({"num_inducing": 3, "sample": False}, objective_over="sequences")},
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
        return self.mechanism.causal and self.variant.causal

    def make(self, embed_dim: int, num_heads: int, **options: Any) -> AttentionLayer:
        """A new layer of the variant."""
        options = {**self.variant.options, **options}
        if "max_len" in self.mechanism.options:
            options.setdefault("max_len", MAX_LEN)
        return self.mechanism.build(embed_dim, num_heads, **options)

    def subject(self, **options: Any) -> Subject:
        """What the battery checks."""
        return Subject(
            str(self),
            functools.partial(self.make, **options),
            objective_over=self.variant.objective_over,
            mixes_tokens=self.mechanism.mixes_tokens,
            fixed_length=self.variant.fixed_length,
            exempt=self.variant.exempt,
        )

    def build(self, dtype: torch.dtype = torch.float64, **options: Any) -> AttentionLayer:
        """The layer in training mode, with every parameter moved off its start."""
        return self.subject(**options).build(dtype)

    def call_forms(self) -> list[dict[str, bool]]:
        """The ways a layer of this kind may be called on one sequence batch."""
        return self.subject().call_forms()


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


every_case = cases_where()
