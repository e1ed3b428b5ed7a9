"""The Primal-Attention functions on tensors: their agreement with one another and their special cases."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import InputError
from kernel_attention.functional import (
    PrimalScores,
    concat_scores,
    ksvd_objective,
    primal_attention,
    primal_kernel,
    primal_scores,
)
from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.tensors.features.feature_maps import identity

B, H, N, P, S, M = 2, 3, 11, 5, 7, 13


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture
def qk() -> tuple[torch.Tensor, torch.Tensor]:
    return random(B, H, N, P), random(B, H, N, P)


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return random(H, M, S), random(H, M, S)


def test_identity_rows_are_data_independent_weights(qk):
    w_e, w_r = random(H, P, S), random(H, P, S)
    eye = torch.eye(P, dtype=torch.float64).expand(B, H, P, P)
    torch.testing.assert_close(primal_scores(*qk, w_e, w_r, rows=eye), primal_scores(*qk, w_e, w_r))
    torch.testing.assert_close(primal_kernel(*qk, rows=eye), primal_kernel(*qk))


def test_fewer_rows_than_weights_use_the_first_weights(qk, weights):
    rows = random(B, H, 4, P)
    first = [w[:, :4] for w in weights]
    torch.testing.assert_close(primal_scores(*qk, *weights, rows=rows), primal_scores(*qk, *first, rows=rows))
    padded = torch.cat([rows, torch.zeros(B, H, M - 4, P, dtype=torch.float64)], dim=2)
    torch.testing.assert_close(
        primal_scores(*qk, *weights, rows=rows), primal_scores(*qk, *weights, rows=padded)
    )


def test_a_grid_all_in_the_past_is_the_non_causal_form(qk, weights):
    rows, grid = random(B, H, M, P), torch.zeros(M, dtype=torch.int64)
    causal = primal_scores(*qk, *weights, rows=rows, grid=grid, is_causal=True, running_means=False)
    torch.testing.assert_close(causal, primal_scores(*qk, *weights, rows=rows))


def test_a_grid_all_in_the_future_gives_zero_scores(qk, weights):
    rows, grid = random(B, H, M, P), torch.full((M,), N)
    for part in primal_scores(*qk, *weights, rows=rows, grid=grid, is_causal=True):
        assert not part.any()


def test_causal_rows_without_their_positions_are_refused(qk, weights):
    with pytest.raises(ValueError, match="need grid"):
        primal_scores(*qk, *weights, rows=random(B, H, M, P), is_causal=True)


def test_scores_are_homogeneous_in_the_weights_and_scale_free_in_queries_and_keys(qk, weights):
    rows = random(B, H, M, P)
    e, r = primal_scores(*qk, *weights, rows=rows)
    scaled = primal_scores(5.0 * qk[0], 7.0 * qk[1], 2.0 * weights[0], 3.0 * weights[1], rows=rows)
    torch.testing.assert_close(scaled, PrimalScores(2.0 * e, 3.0 * r))


def test_queries_make_e_and_keys_make_r(qk, weights):
    rows = random(B, H, M, P)
    e, r = primal_scores(*qk, *weights, rows=rows)
    swapped = primal_scores(qk[1], qk[0], weights[1], weights[0], rows=rows)
    torch.testing.assert_close(swapped, PrimalScores(r, e))


def test_the_identity_map_makes_a_bilinear_form(qk, weights):
    rows = random(B, H, M, P)
    e, _ = primal_scores(*qk, *weights, rows=rows, feature_map=identity)
    torch.testing.assert_close(e, torch.einsum("bhnp,bhmp,hms->bhns", qk[0], rows, weights[0]))


def test_the_output_joins_e_before_r(qk, weights):
    rows, w_out, b_out = random(B, H, M, P), random(P, 2 * S), random(P)
    e, r = primal_scores(*qk, *weights, rows=rows)
    expected = e @ w_out[:, :S].T + r @ w_out[:, S:].T + b_out
    torch.testing.assert_close(concat_scores(PrimalScores(e, r), w_out, b_out), expected)
    torch.testing.assert_close(primal_attention(*qk, *weights, w_out, b_out, rows=rows), expected)
    torch.testing.assert_close(primal_attention(*qk, *weights, w_out, rows=rows), expected - b_out)


def test_the_kernel_matrix_of_padded_tokens_is_zero(qk):
    mask = torch.rand(B, N) < 0.6
    kernel = primal_kernel(*qk, rows=random(B, H, M, P), attention_mask=mask)
    both = mask[:, :, None] & mask[:, None, :]
    assert not kernel.transpose(0, 1)[:, ~both].any()
    assert kernel.transpose(0, 1)[:, both].all()


def test_the_two_forms_of_the_objective_differ_by_the_length_in_their_energy(weights):
    scores, root = PrimalScores(random(B, H, N, S), random(B, H, N, S)), torch.rand(H, S, dtype=torch.float64)
    trace = torch.einsum("hms,hms->", *weights) / H
    mean, total = (ksvd_objective(scores, *weights, root, form=form) for form in ("mean", "sum"))
    torch.testing.assert_close(total + trace, N * (mean + trace))


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_the_objective_of_every_sequence_is_that_of_the_sequence_alone(weights, form):
    scores, root = PrimalScores(random(B, H, N, S), random(B, H, N, S)), torch.rand(H, S, dtype=torch.float64)
    mask = torch.arange(N)[None] < torch.tensor([N, 4])[:, None]
    each = ksvd_objective(scores, *weights, root, form=form, per_sequence=True, attention_mask=mask)
    for b in range(B):
        alone = PrimalScores(*(part[b : b + 1, :, mask[b]] for part in scores))
        torch.testing.assert_close(each[b], ksvd_objective(alone, *weights, root, form=form))


def test_a_sequence_without_tokens_does_not_count_in_the_mean_over_tokens(weights):
    scores, root = PrimalScores(random(B, H, N, S), random(B, H, N, S)), torch.rand(H, S, dtype=torch.float64)
    mask = torch.arange(N)[None] < torch.tensor([4, 0])[:, None]
    alone = PrimalScores(*(part[:1, :, :4] for part in scores))
    together = ksvd_objective(scores, *weights, root, attention_mask=mask)
    torch.testing.assert_close(together, ksvd_objective(alone, *weights, root))
    nothing = ksvd_objective(scores, *weights, root, attention_mask=torch.zeros_like(mask), per_sequence=True)
    assert nothing.isfinite().all()


def test_the_trace_uses_the_parameters_themselves(weights):
    zero = PrimalScores(torch.zeros(B, H, N, S), torch.zeros(B, H, N, S))
    root = torch.rand(H, S, dtype=torch.float64)
    expected = -torch.stack([torch.trace(weights[0][h].T @ weights[1][h]) for h in range(H)]).mean()
    for form in ("mean", "sum"):
        torch.testing.assert_close(ksvd_objective(zero, *weights, root, form=form), expected)


def test_an_unknown_form_of_the_objective_is_refused(weights):
    scores = PrimalScores(random(B, H, N, S), random(B, H, N, S))
    with pytest.raises(InputError, match=r"unknown objective form 'summ'; did you mean 'sum'"):
        ksvd_objective(scores, *weights, torch.rand(H, S), form="summ")


def test_the_objective_of_bfloat16_scores_accumulates_in_float32():
    # 2^16 equal energies of 1/2: a bfloat16 sum would stop at 256.
    ones = torch.ones(1, 1, 2**16, 1, dtype=torch.bfloat16)
    zero = torch.zeros(1, 3, 1, dtype=torch.bfloat16)
    j = ksvd_objective(PrimalScores(ones, torch.zeros_like(ones)), zero, zero, torch.ones(1, 1), form="sum")
    assert j.dtype == torch.float32
    assert j.item() == 2**15


def test_the_trace_of_bfloat16_weights_accumulates_in_float32():
    ones, zero = torch.ones(1, 1001, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    j = ksvd_objective(PrimalScores(zero, zero), ones, ones, torch.ones(1, 1, dtype=torch.bfloat16))
    assert j.item() == -1001  # bfloat16 would say -1000


@pytest.mark.parametrize("masked", [False, True])
def test_causal_rows_block_by_block_give_the_same_scores_and_gradients(qk, weights, masked, monkeypatch):
    rows, grid = random(B, H, M, P), torch.arange(M) * N // M
    mask = torch.rand(B, N) > 0.3 if masked else None
    probe = random(2, B, H, N, S)
    results = []
    for size in (N, 4, 1):  # every token and row, two blocks and a rest, token by token
        monkeypatch.setattr(seen_rows, "block_tokens", lambda length, num_rows, size=size: size)
        leaves = [leaf.clone().requires_grad_() for leaf in (*qk, *weights, rows)]
        scores = primal_scores(*leaves[:4], rows=leaves[4], grid=grid, is_causal=True, attention_mask=mask)
        results.append([*scores, *torch.autograd.grad((torch.stack(scores) * probe).sum(), leaves)])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-10, atol=1e-12)
