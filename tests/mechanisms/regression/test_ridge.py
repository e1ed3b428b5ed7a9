"""Ridge attention is ridge regression: of every prefix, in the primal and the dual, up to its limits."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.features import cosine, elu, identity, relu
from kernel_attention.functional import linear_attention, ridge_attention
from kernel_attention.mechanisms.regression.prefixes import PairSums, least_ridge, prefix_ridge
from kernel_attention.solvers import least_squares_svm
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures, TaylorFeatures
from kernel_attention.tensors.recompute import formulas_only
from reference.regression import ridge_regression

F64 = torch.float64
BATCH, HEADS, WIDTH, VALUES = 2, 3, 7, 5
LAMBDAS = torch.tensor([1e-2, 1.0, 30.0], dtype=F64)
MAPS = {
    "cosine": cosine,
    "identity": identity,
    "elu": elu,
    "relu": relu,
    "taylor": TaylorFeatures(WIDTH).double(),
    "softmax_plus": SoftmaxPlusFeatures(WIDTH, 11).double(),
}


def draw(length: int, dtype: torch.dtype = F64) -> tuple[torch.Tensor, ...]:
    q, k = torch.randn(2, BATCH, HEADS, length, WIDTH, dtype=dtype)
    return q, k, torch.randn(BATCH, HEADS, length, VALUES, dtype=dtype)


def prefix_by_prefix(q, k, v, lam, gamma=None):
    """A solve for every query of every head and sequence."""
    out = torch.zeros_like(v)
    rows = []
    for b in range(q.size(0)):
        for h in range(q.size(1)):
            for i in range(q.size(2)):
                pairs = list(k[b, h, : i + 1]), list(v[b, h, : i + 1])
                fitted = ridge_regression(*pairs, lam[h], 1.0 if gamma is None else gamma[h])
                rows.append(q[b, h, i] @ fitted)
    return torch.stack(rows).view_as(out)


def close(found, wanted, condition=1.0):
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).norm() <= 100 * torch.finfo(F64).eps * condition * (1 + two.norm())


@pytest.mark.parametrize("fades", [False, True])
def test_the_block_form_is_the_solve_of_every_prefix_and_so_are_its_gradients(fades):
    length = 37
    q, k, v = draw(length)
    gamma = torch.tensor([0.9, 0.95, 0.999], dtype=F64) if fades else None
    leaves = [x.requires_grad_() for x in (q, k, v, LAMBDAS.clone(), *([gamma] if fades else []))]
    forgetting = leaves[4] if fades else None
    wanted = prefix_by_prefix(*leaves)
    towards = torch.randn_like(wanted)
    condition = 1e3 * (1 + length * WIDTH / LAMBDAS.min())  # of the gradient, at most that of A
    gradients = torch.autograd.grad(wanted, leaves, towards)
    for size in (1, 3, 16, None):
        found = prefix_ridge(*leaves[:4], forgetting=forgetting, size=size)
        close([found], [wanted], condition)
        close(torch.autograd.grad(found, leaves, towards), gradients, condition)
        with formulas_only():
            formula = prefix_ridge(*leaves[:4], forgetting=forgetting, size=size)
            close(torch.autograd.grad(formula, leaves, towards), gradients, condition)


def test_a_sequence_goes_on_from_the_sums_before_it():
    q, k, v = draw(40)
    leaves = [x.requires_grad_() for x in (q, k, v, LAMBDAS.clone())]
    whole = prefix_ridge(*leaves, size=8)[:, :, 17:]
    early = leaves[1][:, :, :17], leaves[2][:, :, :17]
    before = PairSums(early[0].mT @ early[0], early[0].mT @ early[1])
    late = prefix_ridge(*(x[:, :, 17:] for x in leaves[:3]), leaves[3], before=before, size=8)
    torch.testing.assert_close(late, whole)
    towards = torch.randn_like(whole)
    torch.testing.assert_close(
        torch.autograd.grad(late, leaves, towards), torch.autograd.grad(whole, leaves, towards)
    )


def test_the_backward_pass_can_be_differentiated():
    q, k, v = (x[:1, :, :5] for x in draw(5))
    leaves = [x.requires_grad_() for x in (q, k, v, LAMBDAS.clone())]
    assert torch.autograd.gradgradcheck(lambda *x: prefix_ridge(*x, size=2), leaves, fast_mode=True)


@pytest.mark.parametrize("name", MAPS)
def test_it_is_kernel_ridge_regression_in_the_dual_for_every_feature_map(name):
    q, k, v = draw(13)
    phi_q, phi_k = (MAPS[name](x, None, True) for x in (q, k))
    for is_causal in (False, True):
        found = ridge_attention(q, k, v, LAMBDAS, feature_map=MAPS[name], is_causal=is_causal)
        for i in range(13):
            n = i + 1 if is_causal else 13
            gram = phi_k[:, :, :n] @ phi_k[:, :, :n].mT + LAMBDAS[:, None, None] * torch.eye(n, dtype=F64)
            dual = phi_q[:, :, i : i + 1] @ phi_k[:, :, :n].mT @ torch.linalg.solve(gram, v[:, :, :n])
            torch.testing.assert_close(found[:, :, i : i + 1], dual, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["identity", "elu", "taylor"])
def test_it_is_a_least_squares_svm_without_bias(name):
    """Pairs that come with their negatives have no mean, so that the machine's bias is zero."""
    q, k, v = (x[:1, :1] for x in draw(13))
    phi_q, phi_k = (MAPS[name](x, None, False) for x in (q, k))
    pairs, values = torch.cat([phi_k, -phi_k], dim=2), torch.cat([v, -v], dim=2)
    penalty = 0.03
    machine = least_squares_svm(pairs[0, 0], values[0, 0], penalties=[penalty])
    lam = penalty * phi_k.square().sum(dim=-1).mean()
    found = ridge_attention(phi_q, pairs, values, lam, feature_map=identity)
    torch.testing.assert_close(machine.intercept, torch.zeros(VALUES, dtype=F64))
    torch.testing.assert_close(found[0, 0], phi_q[0, 0] @ machine.weight)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_large_lambda_leaves_linear_attention(is_causal):
    q, k, v = draw(90)
    wanted = linear_attention(q, k, v, feature_map=cosine, normalize=False, is_causal=is_causal)
    for lam in (1e6, 1e9):
        found = lam * ridge_attention(q, k, v, lam, is_causal=is_causal)
        assert (found - wanted).norm() <= 90 / lam * wanted.norm()  # |A / lambda - I| is at most N / lambda


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_small_lambda_recalls_any_independent_keys(is_causal):
    """As many as there are features; the mean of linear attention recalls orthogonal ones only."""
    _, k, v = draw(WIDTH)
    phi = cosine(k)
    smallest = torch.linalg.svdvals(phi).amin() ** 2
    for lam in (1e-3, 1e-6):
        found = ridge_attention(k, k, v, lam, is_causal=is_causal)
        assert (found - v).norm() <= 2 * lam / smallest * v.norm()
    assert (linear_attention(k, k, v, feature_map=cosine, normalize=False) - v).norm() > 0.5 * v.norm()


def test_forgetting_of_one_is_none_and_a_pair_that_is_overwritten_fades():
    q, k, v = draw(70)
    plain = ridge_attention(q, k, v, LAMBDAS, is_causal=True)
    ones = torch.ones(HEADS, dtype=F64)
    torch.testing.assert_close(ridge_attention(q, k, v, LAMBDAS, forgetting=ones, is_causal=True), plain)
    # One key with the values v_j: the answer is their mean with the weights gamma^(n - 1 - j).
    gamma = torch.tensor([0.9, 0.95, 0.999], dtype=F64)
    k = k[:, :, :1].expand_as(k)
    found = ridge_attention(k, k, v, 1e-9, forgetting=gamma)[:, :, 0]
    weights = gamma[:, None] ** torch.arange(69, -1, -1)
    wanted = (weights[..., None] * v).sum(dim=2) / weights.sum(dim=1)[:, None]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fades", [False, True])
def test_the_whole_sequence_reads_what_its_last_token_reads(fades):
    q, k, v = draw(37)
    gamma = torch.tensor([0.9, 0.95, 0.999], dtype=F64) if fades else None
    for n in (1, 16, 37):
        part = [x[:, :, :n] for x in (q, k, v)]
        whole = ridge_attention(*part, LAMBDAS, forgetting=gamma)[:, :, -1]
        torch.testing.assert_close(
            whole, ridge_attention(*part, LAMBDAS, forgetting=gamma, is_causal=True)[:, :, -1]
        )


def saved_numbers(length: int) -> int:
    """Numbers that autograd keeps for the backward of a causal call."""
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.numel()
        return tensor

    q, k, v = (x.requires_grad_() for x in draw(length))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        ridge_attention(q, k, v, LAMBDAS, is_causal=True)
    return total


def test_memory_is_linear_in_the_length():
    assert saved_numbers(4096) < 2.1 * saved_numbers(2048)


def test_a_lambda_that_rounding_would_hide_is_raised_and_no_other():
    trace = torch.tensor([1e3, 1e6])
    lam = torch.tensor([1.0, 1e-9], requires_grad=True)
    raised = least_ridge(lam, trace)
    assert raised[0] == lam[0]
    torch.testing.assert_close(raised[1].detach(), 8 * torch.finfo(torch.float32).eps * trace[1])
    assert torch.autograd.grad(raised.sum(), lam)[0].eq(1).all()


@pytest.mark.parametrize("kind", ["repeated", "zero", "two directions"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_without_rank_have_finite_outputs_and_gradients_in_float32(kind, is_causal):
    q, k, v = draw(2048, torch.float32)
    if kind == "repeated":
        k = k[:, :, :1].expand_as(k).clone()
    elif kind == "zero":
        k = torch.zeros_like(k)
    else:
        k[..., 2:] = 0.0
    for lam in (1e-6, 1.0, 1e3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        lam = torch.full((HEADS,), lam, requires_grad=True)
        y = ridge_attention(*leaves, lam, is_causal=is_causal)
        found = torch.autograd.grad(y.square().sum(), [*leaves, lam])
        assert y.isfinite().all()
        assert all(gradient.isfinite().all() for gradient in found)
        if kind == "repeated":  # every query reads a multiple of the mean of the values so far
            wanted = v.cumsum(dim=2) / torch.arange(1, 2049)[:, None] if is_causal else v.mean(2, True)
            share = (cosine(q) * cosine(k)).sum(dim=-1, keepdim=True)
            number = torch.arange(1, 2049)[:, None] if is_causal else 2048
            shrunk = number / (number + lam[0].detach())
            # Roundings of the sums, and of a solve whose matrix has this condition: lambda is raised.
            eps, last = torch.finfo(torch.float32).eps, 2048
            condition = last / max(lam[0].item(), 8 * eps * last)
            assert (y - share * shrunk * wanted).abs().max() < eps * (last + condition)


def test_what_a_layer_cannot_start_from_is_refused():
    for options, message in [
        ({"lam": 0.0}, "lam=0.0 must be a number above 0"),
        ({"lam": -1}, "lam=-1 must be"),
        ({"forgetting": 0.5}, "forgetting=0.5 must be a number between 0.9 and 1"),
        ({"forgetting": 1.0}, "forgetting=1.0 must be"),
    ]:
        with pytest.raises(ka.InputError, match=message):
            ka.RidgeAttention(8, 2, **options)


def test_lambda_and_forgetting_start_where_they_are_asked_to():
    layer = ka.RidgeAttention(8, 2, lam=1e-3, forgetting=0.97)
    torch.testing.assert_close(layer.kernel.lam, torch.full((2,), 1e-3))
    torch.testing.assert_close(layer.kernel.forgetting, torch.full((2,), 0.97))
    torch.testing.assert_close(ka.RidgeAttention(8, 2, lam=1e3).kernel.lam, torch.full((2,), 1e3))
    with torch.no_grad():
        layer.kernel.raw_lambda.fill_(3.0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.kernel.lam, torch.full((2,), 1e-3))
