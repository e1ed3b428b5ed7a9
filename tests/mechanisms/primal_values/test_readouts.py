"""The readouts of the low-rank kernel: filters of its spectrum, and what they are at the kernel SVD."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import PrimalValueAttention, RidgeAttention
from kernel_attention.errors import InputError
from kernel_attention.functional import (
    PrimalScores,
    kernel_grams,
    nested_objective,
    primal_value_attention,
    ridge_attention,
)
from kernel_attention.tensors.features.feature_maps import identity

F64 = torch.float64
B, H, N, P, S = 2, 3, 13, 5, 4


def draw() -> tuple[PrimalScores, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    scores = PrimalScores(*torch.randn(2, B, H, N, S, dtype=F64))
    return scores, torch.randn(B, H, N, P, dtype=F64), torch.rand(H, S, dtype=F64) + 0.5


@pytest.mark.parametrize("is_causal", [False, True])
def test_twicing_is_two_a_minus_a_squared(is_causal):
    scores, v, root = draw()
    matrix = (scores.e * root[:, None].square()) @ scores.r.mT
    seen = torch.arange(1, N + 1, dtype=F64)[:, None]
    matrix = matrix.tril() / seen if is_causal else matrix / N
    found = primal_value_attention(scores, v, root, readout="twicing", is_causal=is_causal)
    torch.testing.assert_close(found, (2 * matrix - matrix @ matrix) @ v)


@pytest.mark.parametrize("is_causal", [False, True])
def test_ridge_is_the_regression_on_the_scores_and_serves_every_prefix(is_causal):
    scores, v, root = draw()
    lam = torch.tensor([0.05, 1.0, 20.0], dtype=F64)
    found = primal_value_attention(scores, v, root, readout="ridge", lam=lam, is_causal=is_causal)
    e, r = (x * root[:, None] for x in scores)
    for i in range(N):
        n = i + 1 if is_causal else N
        system = r[:, :, :n].mT @ r[:, :, :n] + lam[:, None, None] * torch.eye(S, dtype=F64)
        wanted = e[:, :, i : i + 1] @ torch.linalg.solve(system, r[:, :, :n].mT @ v[:, :, :n])
        torch.testing.assert_close(found[:, :, i : i + 1], wanted)


def singular_system(phi_q: torch.Tensor, phi_k: torch.Tensor, rank: int):
    """W_e, W_r and the root of Lambda of one head at the kernel SVD, phi_q phi_k^T = U Sigma V^T.

    E = phi_q W_e = U Sigma^1/2 and R = phi_k W_r = V Sigma^1/2, with Lambda 1.
    """
    u, sigma, vh = torch.linalg.svd(phi_q @ phi_k.mT)
    half = sigma[:rank].sqrt()
    w_e = torch.linalg.lstsq(phi_q, u[:, :rank] * half).solution
    w_r = torch.linalg.lstsq(phi_k, vh[:rank].mT * half).solution
    return w_e[None], w_r[None], torch.ones(1, rank, dtype=F64), sigma[:rank]


def at_the_optimum():
    """Queries and keys of one head, and the minimum of their nested objective."""
    torch.manual_seed(1)
    phi_q, phi_k = torch.randn(2, 1, 1, N, P, dtype=F64)
    *weights, sigma = singular_system(phi_q[0, 0], phi_k[0, 0], S)
    return phi_q, phi_k, weights, sigma


def test_at_the_optimum_of_the_nested_objective_the_ridge_system_is_diagonal():
    phi_q, phi_k, weights, sigma = at_the_optimum()
    leaves = [x.clone().requires_grad_() for x in weights]
    grams = kernel_grams(phi_q, phi_k, feature_map=identity)
    slopes = torch.autograd.grad(nested_objective(grams, *leaves).sum(), leaves)
    assert all(slope.abs().max() < 1e-10 for slope in slopes)  # it is the optimum
    r = phi_k @ weights[1]
    torch.testing.assert_close((r.mT @ r)[0, 0], torch.diag(sigma))
    # So the s x s system is s divisions.
    scores, v = PrimalScores(phi_q @ weights[0], r), torch.randn(1, 1, N, P, dtype=F64)
    found = primal_value_attention(scores, v, readout="ridge", lam=0.7)
    torch.testing.assert_close(found, (scores.e / (sigma + 0.7)) @ (r.mT @ v))
    # Off the optimum it is not.
    other = phi_k @ (weights[1] + 0.1 * torch.randn_like(weights[1]))
    gram = (other.mT @ other)[0, 0]
    assert (gram - torch.diag(gram.diagonal())).norm() > 0.05 * gram.norm()


def test_the_readouts_are_filters_of_the_spectrum():
    """Of a symmetric kernel: sigma, sigma / (sigma + lambda) and 2 sigma - sigma^2."""
    torch.manual_seed(2)
    phi = torch.randn(1, 1, N, P, dtype=F64)
    w_e, _, _, sigma = singular_system(phi[0, 0], phi[0, 0], P)
    e = phi @ w_e
    scores, v = PrimalScores(e, e), torch.eye(N, dtype=F64)[None, None]
    directions = e[0, 0] / sigma.sqrt()
    for readout, filtered in (
        ("correlation", sigma / N),
        ("ridge", sigma / (sigma + 0.7)),
        ("twicing", 2 * sigma / N - (sigma / N).square()),
    ):
        found = primal_value_attention(scores, v, readout=readout, lam=0.7)[0, 0]
        torch.testing.assert_close(found, (directions * filtered) @ directions.mT)


@pytest.mark.parametrize("is_causal", [False, True])
def test_of_full_rank_the_ridge_readout_is_ridge_attention(is_causal):
    options = {"dtype": F64, "lam": 0.3}
    layer = PrimalValueAttention(H * P, H, rank=P, readout="ridge", normalize="none", **options)
    ridge = RidgeAttention(H * P, H, **options)
    shared = {name: value for name, value in layer.state_dict().items() if name in ridge.state_dict()}
    assert "kernel.raw_lambda" in shared
    ridge.load_state_dict(shared)
    x = torch.randn(B, N, H * P, dtype=F64)
    torch.testing.assert_close(layer(x, is_causal=is_causal), ridge(x, is_causal=is_causal))
    (heads,) = ridge.head_outputs(x, x, None, is_causal, True)
    q, k = ridge.queries_and_keys(x, x)
    v = ridge.split_heads(ridge.v_proj(x))
    torch.testing.assert_close(heads, ridge_attention(q, k, v, 0.3, is_causal=is_causal))


def test_what_a_readout_cannot_do_is_refused():
    layer = PrimalValueAttention(8, 2, readout="twicing")
    with pytest.raises(InputError, match="context was given, but readout='twicing' reads the outputs"):
        layer(torch.zeros(1, 3, 8), context=torch.zeros(1, 4, 8))
    with pytest.raises(InputError, match="3 queries and 4 keys, but readout='twicing' reads"):
        layer.attend_heads(*(torch.zeros(1, 2, n, 4) for n in (3, 4, 4)))
    for options, message in [
        ({"readout": "lasso"}, "readout 'lasso'.*accepted: correlation, ridge, twicing"),
        ({"readout": "ridge", "normalize": "keys"}, "normalize 'keys'.*accepted: none, output"),
        ({"normalize": "none"}, "normalize 'none'.*accepted: keys, output, rows"),
        ({"readout": "ridge", "lam": 0}, "lam=0 must be a number above 0"),
    ]:
        with pytest.raises(InputError, match=message):
            PrimalValueAttention(8, 2, **options)
