"""RPC-Attention and Scaled Attention as functions: steps by hand, limits, thresholds, and how sparse S is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_attention import InputError
from kernel_attention.functional import (
    principal_attention_pursuit,
    pursuit_threshold,
    rpc_attention,
    scaled_attention,
    shrink,
    softmax_attention,
)

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 11, 5
CONVENTIONS = pytest.mark.parametrize("convention", ["released", "paper"])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
F64 = torch.float64


def draw(*more: int) -> Tensor:
    return torch.randn(*more, BATCH, HEADS, LENGTH, HEAD_DIM, dtype=F64)


def right_padding() -> Tensor:
    return torch.arange(LENGTH)[None] < torch.tensor([[LENGTH], [4]])


def holes() -> Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask[0, :2] = mask[0, 5] = mask[1, 1::2] = False
    return mask


# shrink


def test_shrink_moves_towards_zero_and_stops_there():
    x = torch.tensor([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    assert shrink(x, torch.tensor(2.0)).tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert torch.equal(shrink(x, torch.tensor(0.0)), x)
    assert not shrink(x, torch.tensor(math.inf)).any()


def test_shrink_is_the_proximal_operator_of_the_1_norm():
    # The minimiser over s of t |s| + (s - x)^2 / 2, found on a grid.
    x, threshold = torch.linspace(-2, 2, 41, dtype=F64), 0.7
    s = torch.linspace(-3, 3, 6001, dtype=F64)
    cost = threshold * s.abs() + (s - x[:, None]).square() / 2
    torch.testing.assert_close(shrink(x, torch.tensor(threshold)), s[cost.argmin(dim=1)], rtol=0, atol=1e-3)


def test_shrink_has_the_gradients_of_its_formula():
    x, threshold = draw().requires_grad_(), torch.rand(BATCH, HEADS, 1, 1, dtype=F64).requires_grad_()
    formula = x.sign() * (x.abs() - threshold).clamp_min(0)
    weight = draw()
    wanted = torch.autograd.grad((formula * weight).sum(), (x, threshold))
    torch.testing.assert_close(
        torch.autograd.grad((shrink(x, threshold) * weight).sum(), (x, threshold)), wanted
    )
    assert all(gradient.any() for gradient in wanted)


# The threshold


def test_the_threshold_is_lambda_over_mu_or_lambda_times_the_mu_of_the_released_code():
    k, lam = draw(), 3.0
    norm = k.abs().sum(dim=(-1, -2), keepdim=True)
    paper = lam / (LENGTH * HEAD_DIM / (4 * norm))
    released = lam * (LENGTH * HEADS * HEAD_DIM / (4 * norm))
    torch.testing.assert_close(pursuit_threshold(k, lam, convention="paper"), paper)
    torch.testing.assert_close(pursuit_threshold(k, lam, convention="released"), released)


@CONVENTIONS
@pytest.mark.parametrize("mask", [right_padding(), holes()], ids=["right", "holes"])
def test_the_threshold_of_a_padded_sequence_is_that_of_its_tokens(convention, mask):
    k = draw()
    padded = torch.where(mask[:, None, :, None], k, 1e4)
    whole = pursuit_threshold(padded, 4.0, convention=convention, attention_mask=mask)
    rows = pursuit_threshold(padded, 4.0, convention=convention, attention_mask=mask, is_causal=True)
    for b in range(BATCH):
        tokens = k[b : b + 1, :, mask[b]]
        torch.testing.assert_close(whole[b : b + 1], pursuit_threshold(tokens, 4.0, convention=convention))
        for i in range(tokens.size(2)):
            prefix = pursuit_threshold(tokens[:, :, : i + 1], 4.0, convention=convention)
            torch.testing.assert_close(rows[b, :, mask[b]][:, i], prefix[0, :, 0])


def test_the_conventions_scale_in_opposite_ways():
    # As printed the mechanism is homogeneous in the keys; the released one reacts to their size.
    k = draw()
    for convention, power in (("paper", 1), ("released", -1)):
        one, seven = (pursuit_threshold(c * k, 4.0, convention=convention) for c in (1.0, 7.0))
        torch.testing.assert_close(seven, 7.0**power * one)


def test_an_unknown_convention_is_refused():
    with pytest.raises(InputError, match="unknown convention 'printed'"):
        rpc_attention(draw(), draw(), convention="printed")


# Steps by hand

K = torch.tensor([[1.0, -3.0], [2.0, 0.0]], dtype=F64)  # one head, two tokens, the mean of |k| is 3/2
V = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=F64)


@pytest.mark.parametrize(
    ("convention", "lam", "sparse", "cleaned"),
    [
        ("paper", 0.25, [[0.0, -1.5], [0.5, 0.0]], [[1.0, -1.5], [1.5, 0.0]]),  # tau = 4 lambda 3/2 = 3/2
        ("released", 6.0, [[0.0, -2.0], [1.0, 0.0]], [[1.0, -1.0], [1.0, 0.0]]),  # tau = lambda / (4 3/2) = 1
    ],
)
def test_one_step_by_hand(convention, lam, sparse, cleaned):
    step = principal_attention_pursuit(
        K[None, None], V[None, None], iterations=1, lam=lam, convention=convention
    )
    assert step.sparse[0, 0].tolist() == sparse
    assert step.cleaned[0, 0].tolist() == cleaned
    rows = []
    for t_i in cleaned:
        w = [math.exp(sum(a * b for a, b in zip(t_i, t_j, strict=True)) / math.sqrt(2)) for t_j in cleaned]
        rows.append(
            [sum(w_j * v for w_j, v in zip(w, column, strict=True)) / sum(w) for column in V.T.tolist()]
        )
    torch.testing.assert_close(step.low_rank[0, 0], torch.tensor(rows, dtype=F64))


@CONVENTIONS
@CAUSAL
def test_the_second_step_carries_the_residual_of_the_first(convention, is_causal):
    k, v = draw(2)
    options = {"lam": 0.3, "convention": convention, "is_causal": is_causal}
    first = principal_attention_pursuit(k, v, iterations=1, **options)
    second = principal_attention_pursuit(k, v, iterations=2, **options)
    residual = k - first.low_rank - first.sparse  # Y / mu
    threshold = pursuit_threshold(k, 0.3, convention=convention, is_causal=is_causal)
    torch.testing.assert_close(second.sparse, shrink(k - first.low_rank + residual, threshold))
    torch.testing.assert_close(second.cleaned, k - second.sparse - residual)
    for step in (first, second):
        attended = softmax_attention(step.cleaned, step.cleaned, v, is_causal=is_causal)
        torch.testing.assert_close(step.low_rank, attended)
        assert 0.1 < (step.sparse != 0).double().mean() < 0.9


# lambda -> infinity


@CONVENTIONS
@CAUSAL
@pytest.mark.parametrize("iterations", [1, 2, 3, 6])
def test_for_large_lambda_it_follows_the_closed_recursion(convention, is_causal, iterations):
    k, v, q = (x.requires_grad_() for x in draw(3))
    weight, mask = draw(), right_padding()
    for queries in (None, q):
        t, low_rank = k, torch.zeros_like(v)
        for step in range(iterations):
            t = k if step == 0 else t + low_rank - k
            low_rank = softmax_attention(
                t if queries is None else queries, t, v, attention_mask=mask, is_causal=is_causal
            )
        out = rpc_attention(
            k, v, q=queries, iterations=iterations, lam=1e9, convention=convention, attention_mask=mask,
            is_causal=is_causal,
        )  # fmt: skip
        real = mask[:, None, :, None]
        torch.testing.assert_close(out.where(real, 0.0), low_rank.where(real, 0.0))
        leaves = [k, v] if queries is None else [k, v, q]
        results = [
            torch.autograd.grad((y * weight * real).sum(), leaves, retain_graph=True) for y in (out, low_rank)
        ]
        torch.testing.assert_close(*results)


def test_one_step_for_large_lambda_is_symmetric_attention_and_two_let_the_outputs_attend():
    k, v = draw(2)
    once = softmax_attention(k, k, v)
    torch.testing.assert_close(rpc_attention(k, v, iterations=1, lam=1e9), once)
    # T_2 = T_1 + L_1 - K = L_1: the keys have gone.
    torch.testing.assert_close(rpc_attention(k, v, iterations=2, lam=1e9), softmax_attention(once, once, v))


def test_for_small_lambda_the_first_step_takes_every_key_away_and_averages():
    k, v = draw(2)
    out = principal_attention_pursuit(k, v, iterations=1, lam=1e-9)
    torch.testing.assert_close(out.sparse, k)
    torch.testing.assert_close(out.low_rank, v.mean(dim=2, keepdim=True).expand_as(v))


# How sparse S is: the step size of Candes et al. is for lambda = 1 / sqrt(N), the paper's lambda is 3 or 4.

SETTINGS = [(2, 3.0), (4, 4.0), (5, 4.0), (6, 4.0)]


def share_of_nonzeros(iterations: int, lam: float, convention: str) -> float:
    """In the S of the last step, on Gaussian keys and values of DeiT-tiny's shape."""
    k, v = torch.randn(2, 4, 3, 197, 64)
    sparse = principal_attention_pursuit(k, v, iterations=iterations, lam=lam, convention=convention).sparse
    return (sparse != 0).double().mean().item()


def test_as_printed_s_is_zero_at_first_and_fills_with_the_iterations():
    # 12.8 standard deviations in the first step; the residuals that S leaves in Y grow with every step.
    assert share_of_nonzeros(1, 4.0, "paper") == 0.0
    shares = [share_of_nonzeros(n, lam, "paper") for n, lam in SETTINGS]
    assert shares[0] < 0.001  # 0.05 %
    assert 0.005 < shares[1] < 0.03  # 1.8 %
    assert 0.03 < shares[2] < 0.09  # 5.8 %
    assert 0.08 < shares[3] < 0.15  # 11.5 %


def test_as_released_s_is_far_from_sparse_for_keys_of_unit_size():
    shares = [share_of_nonzeros(n, lam, "released") for n, lam in SETTINGS]
    assert all(0.2 < share < 0.7 for share in shares)  # 28, 49, 58 and 65 %


# Robustness of the numbers


@CONVENTIONS
@CAUSAL
def test_zero_keys_take_nothing_away_and_pass_finite_gradients(convention, is_causal):
    k, v = torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM, requires_grad=True), draw().float().requires_grad_()
    out = rpc_attention(k, v, iterations=1, convention=convention, is_causal=is_causal)
    torch.testing.assert_close(out, softmax_attention(k, k, v, is_causal=is_causal))
    out = rpc_attention(k, v, iterations=4, convention=convention, is_causal=is_causal)
    gradients = torch.autograd.grad(out.square().sum(), (k, v))
    assert all(g.isfinite().all() and g.abs().max() < 1e3 for g in gradients)


def test_sixteen_bit_keys_are_measured_and_iterated_in_float32():
    k, v = draw(2).bfloat16()
    threshold = pursuit_threshold(k, 4.0)
    assert threshold.dtype == torch.float32
    torch.testing.assert_close(threshold, pursuit_threshold(k.float(), 4.0))
    pursuit = principal_attention_pursuit(k, v)
    assert (pursuit.low_rank.dtype, pursuit.sparse.dtype) == (torch.bfloat16, torch.float32)
    # A float16 sum over 197 tokens of size 1e3 would overflow.
    large = 1e3 * torch.ones(1, 1, 197, 64, dtype=torch.float16)
    assert pursuit_threshold(large, 4.0, convention="paper").item() == 16e3


@CAUSAL
def test_the_causal_form_is_not_the_other_on_each_prefix_but_agrees_on_the_first_token(is_causal):
    k, v = draw(2)
    rows = rpc_attention(k, v, iterations=2, lam=0.3, is_causal=True)
    last = rpc_attention(k, v, iterations=2, lam=0.3, is_causal=is_causal)[:, :, -1]
    assert torch.allclose(rows[:, :, -1], last) == is_causal
    torch.testing.assert_close(rows[:, :, :1], rpc_attention(k[:, :, :1], v[:, :, :1], iterations=2, lam=0.3))


# Scaled Attention


def attention_matrix(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    logits = q @ k.mT / math.sqrt(q.size(-1))
    if is_causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    return logits.softmax(dim=-1)


@CAUSAL
def test_scaled_attention_multiplies_by_a_times_i_minus_s(is_causal):
    q, k, v = draw(3)
    s, alpha = torch.randn(HEADS, 13, 13, dtype=F64), torch.tensor([0.7], dtype=F64)
    a, eye = attention_matrix(q, k, is_causal), torch.eye(LENGTH, dtype=F64)
    symmetric = eye - 0.7 * attention_matrix(k, k, is_causal)
    block = s[:, :LENGTH, :LENGTH]
    learnt = eye - (block * eye.new_ones(LENGTH, LENGTH).tril() if is_causal else block)
    torch.testing.assert_close(scaled_attention(q, k, v, alpha=alpha, is_causal=is_causal), a @ symmetric @ v)
    torch.testing.assert_close(scaled_attention(q, k, v, s=s, is_causal=is_causal), a @ learnt @ v)


@CAUSAL
@pytest.mark.parametrize("mask", [None, right_padding(), holes()], ids=["", "right", "holes"])
def test_s_of_zero_is_softmax_attention(is_causal, mask):
    q, k, v = draw(3)
    options = {"attention_mask": mask, "is_causal": is_causal}
    softmax = softmax_attention(q, k, v, **options)
    zero = torch.zeros(HEADS, LENGTH, LENGTH, dtype=F64)
    for form in ({"alpha": torch.zeros(1, dtype=F64)}, {"s": zero}):
        y = scaled_attention(q, k, v, **form, **options)
        torch.testing.assert_close(y, softmax, rtol=1e-13, atol=1e-13)  # N eps |v| is 1e-14


def test_s_of_the_identity_gives_nothing():
    q, k, v = draw(3)
    eye = torch.eye(LENGTH, dtype=F64).expand(HEADS, -1, -1)
    assert not scaled_attention(q, k, v, s=eye).any()


def test_keys_and_values_may_come_from_another_sequence():
    q, (k, v) = draw()[:, :, :4], draw(2)
    alpha, s = torch.tensor([0.7], dtype=F64), torch.randn(HEADS, LENGTH, LENGTH, dtype=F64)
    a, eye = attention_matrix(q, k, False), torch.eye(LENGTH, dtype=F64)
    wanted = a @ (eye - 0.7 * attention_matrix(k, k, False)) @ v
    torch.testing.assert_close(scaled_attention(q, k, v, alpha=alpha), wanted)
    torch.testing.assert_close(scaled_attention(q, k, v, s=s), a @ (eye - s) @ v)


def test_what_scaled_attention_cannot_do_is_refused():
    q, k, v = draw(3)
    one = torch.ones(1, dtype=F64)
    with pytest.raises(InputError, match="sequence length 11 exceeds max_len=7"):
        scaled_attention(q, k, v, s=torch.zeros(HEADS, 7, 7, dtype=F64))
    for both in ({}, {"s": torch.zeros(HEADS, LENGTH, LENGTH, dtype=F64), "alpha": one}):
        with pytest.raises(InputError, match="one of s and alpha"):
            scaled_attention(q, k, v, **both)
