"""Multilinear attention in the primal: equal to the thesis's formulas in float64 loops, and the contract on
every form.
"""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention import InputError, MultilinearAttention
from reference import multilinear as reference

F64 = torch.float64
HEADS, LENGTH, MAX_LEN = 2, 4, 7
VARIANTS = ("standard", "data_dependent", "learnable", "learnable_diagonal")
CORES = ("none", "cost", "mlsvd")
WIDTHS = {2: 5, 3: 3, 4: 2}  # head width of each order: the loops are O(p^D R^D)
MASKS = {
    "": None,
    "right": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool(),
    "holes": torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]]).bool(),
}
every_order = pytest.mark.parametrize("order", [2, 3, 4])
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_core = pytest.mark.parametrize("core", CORES)
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])


def build(
    order: int = 3,
    variant: str = "standard",
    core: str = "none",
    dtype: torch.dtype = F64,
    width: int | None = None,
    **changes,
) -> MultilinearAttention:
    """A layer with every parameter off its initial value: zeros and identities would hide errors."""
    width = WIDTHS[order] if width is None else width
    eta_core = 0.3 if core == "cost" else 0.0
    options = {
        "rank": 2,
        "eta": 0.2,
        "eta_core": eta_core,
        "rank_multiplier": 2,
        "max_len": MAX_LEN,
        **changes,
    }
    torch.manual_seed(1)
    layer = MultilinearAttention(HEADS * width, HEADS, order=order, variant=variant, core=core, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer.to(dtype)


def inputs(layer: MultilinearAttention, batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, layer.embed_dim, dtype=layer.w.dtype)


def oracle(layer: MultilinearAttention, x: Tensor, mask: Tensor | None, is_causal: bool, feature_map: str):
    num_rows = layer.num_rows if layer.variant == "data_dependent" else None
    return reference.multilinear_attention(
        x,
        dict(layer.named_parameters()),
        mask,
        num_heads=HEADS,
        variant=layer.variant,
        core=layer.core_treatment,
        feature_map=feature_map,
        objective_form=layer.objective_form,
        num_rows=num_rows,
        max_len=MAX_LEN,
        is_causal=is_causal,
    )


def assert_equals_the_loops(layer, x, mask=None, is_causal=False, feature_map="frobenius"):
    """Outputs, scores, J, J_S and all gradients."""
    x = x.requires_grad_()
    expected = oracle(layer, x, mask, is_causal, feature_map)
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = layer(x, attention_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(y[real], expected.y[real])
    for n, scores in enumerate(layer.scores(x, attention_mask=mask, is_causal=is_causal)):
        for (b, h), by_hand in expected.scores.items():
            torch.testing.assert_close(scores[b, h, real[b]], by_hand[n])
    torch.testing.assert_close(layer.objective, expected.objective)
    penalty = layer.eta * expected.objective**layer.objective_power + layer.eta_core * expected.core_penalty
    torch.testing.assert_close(layer.penalty(), penalty)
    probe = torch.randn_like(y)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad((y * probe)[real].sum() + layer.penalty(), leaves)
    wanted = torch.autograd.grad((expected.y * probe)[real].sum() + penalty, leaves)
    for name, one, other in zip(["x", *(n for n, _ in layer.named_parameters())], found, wanted, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )


@every_variant
@pytest.mark.parametrize(("order", "core"), [(2, "mlsvd"), (3, "none"), (3, "cost"), (4, "mlsvd")])
def test_the_layer_is_the_formula_of_the_thesis(order, variant, core):
    layer = build(order, variant, core)
    assert_equals_the_loops(layer, inputs(layer), MASKS["right"])


@every_variant
@causal
def test_masks_with_holes_and_the_causal_form_are_those_of_the_loops(variant, is_causal):
    layer = build(3, variant, "mlsvd")
    assert_equals_the_loops(layer, inputs(layer), MASKS["holes"], is_causal)


@every_variant
def test_the_cosine_map_and_the_mean_objective_are_those_of_the_loops(variant):
    layer = build(3, variant, feature_map="cosine", objective_form="mean", bias=False)
    is_causal = variant == "data_dependent"  # the only one whose scores notice it
    assert_equals_the_loops(layer, inputs(layer), MASKS["holes"], is_causal, "cosine")


@pytest.mark.parametrize(
    "change", [{"rank": 1}, {"rank": 4}, {"rank": None}, {"objective_power": 1}, {"eta": 0.0}], ids=str
)
def test_other_options_are_those_of_the_loops(change):
    layer = build(3, "learnable_diagonal", "cost", **change)
    assert_equals_the_loops(layer, inputs(layer))


def test_a_sequence_with_fewer_tokens_than_rows_uses_the_first_weights():
    layer = build(3, "data_dependent", rank=3)
    assert layer.num_rows > LENGTH
    for is_causal in (False, True):
        assert_equals_the_loops(layer, inputs(layer), MASKS["right"], is_causal)


@every_variant
@causal
def test_softmax_plus_and_any_callable_are_feature_maps(variant, is_causal):
    layer = build(3, variant, feature_map="softmax_plus")
    x = inputs(layer)
    assert "feature_map.projection" in layer.state_dict()
    same = build(3, variant, feature_map=layer.feature_map)
    torch.testing.assert_close(same(x, is_causal=is_causal), layer(x, is_causal=is_causal))
    layer.feature_map.redraw()
    assert not torch.allclose(build(3, variant, feature_map="softmax_plus")(x), layer(x))


def test_a_feature_map_may_have_its_own_number_of_features():
    layer = build(3, "learnable", feature_map={"softmax_plus": {"num_features": 4}})
    assert layer.w.shape == (3, HEADS, 4, 2)
    assert layer.compatibility.shape == (HEADS, 4, 4, 4)
    assert layer(inputs(layer)).isfinite().all()
    with pytest.raises(InputError, match="variant='data_dependent' needs 3 features, it gives 4"):
        build(3, "data_dependent", feature_map={"softmax_plus": {"num_features": 4}})


@pytest.mark.parametrize("feature_map", ["frobenius", "cosine"])
@every_variant
def test_which_forms_mix_tokens(variant, feature_map):
    layer = build(3, variant, feature_map=feature_map)
    x = inputs(layer)
    other = x.clone()
    other[:, 1] = torch.randn_like(other[:, 1])
    if feature_map == "frobenius" and variant != "data_dependent":
        # Only the norm of the sequence is shared: keep it, and nobody else notices.
        for projection in (layer.q_proj, layer.k_proj, layer.f_proj):
            torch.nn.init.zeros_(projection.bias)
        other[:, 1] = -x[:, 1]
    unchanged = torch.arange(LENGTH) != 1
    difference = (layer(other) - layer(x)).abs().amax(dim=(0, 2))
    assert difference[1] > 1e-6
    assert (difference[unchanged] < 1e-12).all() == (variant != "data_dependent")


def repeated(kind: str, order: int, rank: int = 3) -> Tensor:
    """Cores (h, R, .., R) whose unfoldings have repeated singular values."""
    diagonal = torch.zeros(HEADS, *[rank] * order)
    diagonal[(slice(None), *[torch.arange(rank)] * order)] = 1.0
    return {
        "identity": diagonal,
        "zero": 0 * diagonal,
        "ones": torch.ones_like(diagonal),
        "large": 1e4 * diagonal,
    }[kind]


@pytest.mark.parametrize("kind", ["identity", "zero", "ones", "large"])
@every_core
@every_order
def test_repeated_singular_values_of_the_core_give_finite_gradients(order, core, kind):
    layer = build(order, core=core, dtype=torch.float32, rank=3, width=3)
    with torch.no_grad():
        layer.core.copy_(repeated(kind, order))
    y = layer(inputs(layer))
    (y.square().sum() + layer.penalty()).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert all(p.grad.abs().max() < 1e12 for p in layer.parameters())


def test_the_penalty_belongs_to_the_last_training_forward():
    layer = build(3, core="cost")
    assert layer.penalty() is None
    layer(inputs(layer))
    kept = layer.penalty()
    layer.eval()(inputs(layer))
    assert torch.equal(layer.penalty(), kept)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert twin.penalty() is None
        assert twin.core_objective is None
    silent = build(3, eta=0.0)
    silent(inputs(silent))
    assert silent.objective is None
    assert silent.penalty() is None


def test_eta_zero_leaves_the_core_penalty_alone():
    layer = build(3, core="cost", eta=0.0)
    layer(inputs(layer))
    torch.testing.assert_close(layer.penalty(), layer.eta_core * ka.functional.core_penalty(layer.core))


def test_a_fresh_layer_starts_at_the_standard_form_and_at_a_core_of_an_mlsvd():
    torch.manual_seed(1)
    standard = MultilinearAttention(12, 3).double()
    x = torch.randn(2, 5, 12, dtype=F64)
    for variant in ("learnable", "learnable_diagonal"):
        layer = MultilinearAttention(12, 3, variant=variant).double()
        layer.load_state_dict(standard.state_dict(), strict=False)
        torch.testing.assert_close(layer(x), standard(x))
    assert ka.functional.core_penalty(standard.core) < 1e-6
    torch.testing.assert_close(
        standard.w.mT @ standard.w, torch.eye(4, dtype=F64).expand(3, 3, 4, 4), atol=1e-5, rtol=0
    )


def test_the_thesis_counts_of_parameters():
    # Table 4-3: what lies in W, S, C and the projections without their biases.
    budgets = {"standard": 2000, "data_dependent": 2000, "learnable": 1988, "learnable_diagonal": 2020}
    for variant, budget in budgets.items():
        rank = 3 if variant == "learnable" else 5
        layer = MultilinearAttention(20, 4, variant=variant, rank=rank, max_len=100)
        parts = [
            layer.w,
            layer.core,
            layer.q_proj.weight,
            layer.k_proj.weight,
            layer.f_proj.weight,
            layer.compatibility,
        ]
        assert sum(part.numel() for part in parts if part is not None) == budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 1}, "order=1 must be a whole number from 2 to 16"),
        ({"rank": 0}, "rank=0 must be a whole number"),
        ({"variant": "learnabel"}, "unknown variant 'learnabel'; did you mean 'learnable'"),
        ({"core": "svd"}, "unknown core 'svd'"),
        ({"feature_map": "frobenus"}, "unknown feature_map 'frobenus'; did you mean 'frobenius'"),
        ({"eta": -1.0}, "eta=-1.0 must be"),
        ({"eta_core": 0.1}, "eta_core=0.1 with core='none'"),
        ({"core": "cost"}, "core='cost' needs eta_core above 0"),
        ({"objective_power": 3}, "objective_power=3 must be 1 or 2"),
        ({"objective_form": "average"}, "unknown objective_form 'average'"),
        ({"max_len": 0}, "max_len=0 must be a whole number"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ka.create_attention("multilinear", 12, 3, **options)


def test_what_has_no_sound_reading_is_refused():
    layer = build(3, "data_dependent", max_len=None)
    with pytest.raises(InputError, match="max_len=None"):
        layer(inputs(layer), is_causal=True)
    layer = build(3, "data_dependent")
    with pytest.raises(InputError, match="sequence length 9 exceeds max_len=7"):
        layer(inputs(layer, length=9), is_causal=True)
    with pytest.raises(InputError, match="no cross-attention"):
        layer(inputs(layer), context=inputs(layer))
