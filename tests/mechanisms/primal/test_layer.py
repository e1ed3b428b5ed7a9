"""The Primal-Attention layer equals the loops of the paper: outputs, scores, objective and every gradient."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from kernel_attention import InputError, PrimalAttention, auxiliary_loss
from reference import primal as reference

HEADS, WIDTH, TOKENS = 3, 5, 11
EMBED_DIM, MAX_LEN = HEADS * WIDTH, 17

FORMS = {
    "data_dependent": {},
    "all_tokens_sampled": {"rank_multiplier": 7},  # M = 14 > N
    "one_row": {"rank": 1, "rank_multiplier": 1},
    "rank_above_length": {"rank": 13},
    "data_independent": {"data_dependent": False},
    "identity_map": {"feature_map": "identity"},
    "no_running_means": {"running_means": False},
    "no_running_means_data_independent": {"running_means": False, "data_dependent": False},
    "no_bias": {"bias": False},
    "sum": {"objective_form": "sum"},
    "sum_data_independent": {"objective_form": "sum", "data_dependent": False},
    "square_per_sequence": {"square_per": "sequence"},
    "sum_square_per_sequence": {"objective_form": "sum", "square_per": "sequence"},
}
MASKS = ["none", "holes"]


def build(**options) -> PrimalAttention:
    options = {"rank": 2, "rank_multiplier": 2, "eta": 0.3, "max_len": MAX_LEN, **options}
    layer = PrimalAttention(EMBED_DIM, HEADS, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


def sequences() -> torch.Tensor:
    return torch.randn(3, TOKENS, EMBED_DIM, dtype=torch.float64)


def mask_of(kind: str) -> torch.Tensor | None:
    holes = torch.rand(3, TOKENS) < 0.6
    holes[0, 5] = True
    holes[1] = torch.arange(TOKENS) >= TOKENS - 4
    holes[2] = torch.arange(TOKENS) < 1
    return {"none": None, "holes": holes}[kind]


def oracle(layer: PrimalAttention, x, mask, is_causal) -> reference.Result:
    return reference.primal_attention(
        x,
        dict(layer.named_parameters()),
        mask,
        num_heads=HEADS,
        num_rows=layer.num_rows if layer.data_dependent else None,
        max_len=MAX_LEN,
        is_causal=is_causal,
        running_means=layer.running_means,
        cosine=layer.feature_map.__name__ == "cosine",
    )


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_outputs_objective_and_all_gradients_equal_the_loops(form, mask_kind, is_causal):
    layer, mask = build(**FORMS[form]), mask_of(mask_kind)
    real = torch.ones(3, TOKENS, dtype=torch.bool) if mask is None else mask
    x = sequences().requires_grad_()
    leaves = [x, *layer.parameters()]
    downstream = torch.randn(3, TOKENS, EMBED_DIM, dtype=torch.float64)[real]

    expected = oracle(layer, x, mask, is_causal)
    j = expected.objective(layer.objective_form, layer.square_per)
    penalty = 0.3 * (j**2).mean()
    expected_gradients = torch.autograd.grad((expected.y[real] * downstream).sum() + penalty, leaves)

    y = layer(x, attention_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(y[real], expected.y[real])
    torch.testing.assert_close(layer.objective, j)
    torch.testing.assert_close(auxiliary_loss(layer), penalty)
    gradients = torch.autograd.grad((y[real] * downstream).sum() + auxiliary_loss(layer), leaves)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_scores_equal_the_loops(is_causal):
    layer, x, mask = build(), sequences(), mask_of("holes")
    expected = oracle(layer, x, mask, is_causal)
    e, r = layer.scores(x, attention_mask=mask, is_causal=is_causal)
    for b in range(3):
        for h in range(HEADS):
            torch.testing.assert_close(e[b, h, mask[b]], expected.e[b, h])
            torch.testing.assert_close(r[b, h, mask[b]], expected.r[b, h])


def test_without_eta_there_is_no_lambda_and_no_objective():
    layer = build(eta=0.0)
    assert layer.sqrt_lambda is None
    assert "sqrt_lambda" not in dict(layer.named_parameters())
    layer(sequences())
    assert layer.objective is None
    assert layer.penalty() is None


def test_parameters_have_the_shapes_and_ranges_of_the_released_code():
    layer = PrimalAttention(EMBED_DIM, HEADS, rank=4, eta=0.1)
    assert layer.num_rows == 40
    assert layer.w_e.shape == layer.w_r.shape == (HEADS, 40, 4)
    assert layer.sqrt_lambda.shape == (HEADS, 4)
    assert layer.sqrt_lambda.min() >= 0
    assert layer.sqrt_lambda.max() < 1
    assert layer.concat.weight.shape == (WIDTH, 8)
    assert PrimalAttention(EMBED_DIM, HEADS, rank=4, max_len=13).num_rows == 13
    assert PrimalAttention(EMBED_DIM, HEADS, rank=4, data_dependent=False).w_e.shape == (HEADS, WIDTH, 4)


def test_initial_weights_are_orthonormal_between_heads_or_within_them():
    flat = PrimalAttention(EMBED_DIM, HEADS, rank=4).w_e.detach().flatten(1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(HEADS))
    per_head = PrimalAttention(EMBED_DIM, HEADS, rank=4, init="per_head").w_e.detach()
    torch.testing.assert_close(per_head.mT @ per_head, torch.eye(4).expand(HEADS, 4, 4))


def test_which_forms_mix_tokens():
    x = sequences()
    other = x.clone()
    other[:, 3] = torch.randn(3, EMBED_DIM, dtype=torch.float64)
    untouched = torch.arange(TOKENS) != 3

    def mixes(is_causal=False, **options):
        layer = build(**options)
        change = (layer(x, is_causal=is_causal) - layer(other, is_causal=is_causal))[:, untouched]
        return bool(change.abs().max() > 1e-9)

    assert mixes()  # token 3 is on the grid of 4 rows over 11 tokens: 0, 3, 6, 10
    assert not mixes(data_dependent=False)
    assert mixes(data_dependent=False, is_causal=True)
    assert not mixes(data_dependent=False, is_causal=True, running_means=False)


def test_features_sampled_are_the_heads_own_slices():
    # Head h reads f(X) from its own features: with q and k fixed, the others' do not reach its scores.
    layer, x = build(), sequences()
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.k_proj.weight.zero_()
    other = x.clone()
    other[..., :WIDTH] = torch.randn(3, TOKENS, WIDTH, dtype=torch.float64)
    before, after = layer.scores(x), layer.scores(other)
    assert not torch.allclose(before.e[:, 0], after.e[:, 0])
    torch.testing.assert_close(before.e[:, 1:], after.e[:, 1:])


# Decoding


def test_decoding_equals_the_parallel_form_at_every_max_len():
    # The grid t_m depends on max_len; no position may be missed or taken twice.
    for max_len in range(1, 24):
        layer = build(max_len=max_len, rank_multiplier=3)
        x = torch.randn(2, max_len, EMBED_DIM, dtype=torch.float64)
        y, state = [], layer.initial_state(batch_size=2)
        for i in range(max_len):
            out, state = layer.step(x[:, i], state)
            y.append(out)
        torch.testing.assert_close(torch.stack(y, dim=1), layer(x, is_causal=True))


def test_decoding_past_max_len_is_refused():
    layer = build(max_len=3)
    state = layer.initial_state(1)
    token = torch.randn(1, EMBED_DIM, dtype=torch.float64)
    for _ in range(3):
        _, state = layer.step(token, state)
    with pytest.raises(InputError, match="sequence length 4 exceeds max_len=3"):
        layer.step(token, state)


def test_data_independent_decoding_has_no_longest_sequence():
    layer = build(max_len=None, data_dependent=False)
    state = layer.initial_state(1)
    for _ in range(30):
        y, state = layer.step(torch.randn(1, EMBED_DIM, dtype=torch.float64), state)
    assert y.isfinite().all()


def test_decoding_in_bfloat16_keeps_its_sums_in_float32():
    layer = build().bfloat16()
    state = layer.initial_state(2)
    y, state = layer.step(torch.randn(2, EMBED_DIM, dtype=torch.bfloat16), state)
    assert y.dtype == torch.bfloat16
    assert state.q_sum.dtype == state.w_e.dtype == torch.float32


# Bad arguments


@pytest.mark.parametrize(
    ("option", "value"),
    [("rank", 0), ("rank", -1), ("rank", 2.5), ("rank_multiplier", 0), ("max_len", 0), ("max_len", "long")],
)
def test_counts_below_one_are_refused(option, value):
    with pytest.raises(InputError, match=f"{option}={value!r} must be a whole number of at least 1"):
        PrimalAttention(EMBED_DIM, HEADS, **{option: value})


@pytest.mark.parametrize("eta", [-0.1, math.nan, math.inf, "0.1", None])
def test_an_eta_that_is_no_weight_is_refused(eta):
    with pytest.raises(InputError, match=f"eta={eta!r} must be a"):
        PrimalAttention(EMBED_DIM, HEADS, eta=eta)


@pytest.mark.parametrize(
    ("option", "value", "nearest"),
    [
        ("objective_form", "means", "mean"),
        ("init", "perhead", "per_head"),
        ("square_per", "sequences", "sequence"),
        ("feature_map", "cos", None),
    ],
)
def test_unknown_choices_offer_the_nearest(option, value, nearest):
    message = f"unknown {option} '{value}'" + (f"; did you mean '{nearest}'" if nearest else "")
    with pytest.raises(InputError, match=message):
        PrimalAttention(EMBED_DIM, HEADS, **{option: value})


def test_the_causal_grid_needs_max_len():
    layer = build(max_len=None)
    with pytest.raises(InputError, match="max_len=None: the causal data-dependent form"):
        layer(sequences(), is_causal=True)
    with pytest.raises(InputError, match="max_len=None: the causal data-dependent form"):
        layer.step(sequences()[:, 0], layer.initial_state(3))


def test_a_causal_sequence_longer_than_the_grid_is_refused():
    with pytest.raises(InputError, match="sequence length 11 exceeds max_len=10"):
        build(max_len=10)(sequences(), is_causal=True)


def test_a_rank_above_the_longest_sequence_is_noted_once(caplog):
    with caplog.at_level(logging.INFO, logger="kernel_attention"):
        for _ in range(3):
            PrimalAttention(EMBED_DIM, HEADS, rank=31, max_len=29)
    notes = [record for record in caplog.records if "rank=31 exceeds max_len=29" in record.getMessage()]
    assert len(notes) == 1
