"""The errors of a primal layer's model of its kernel, against the dense matrices, in float64."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.analysis import kernel_model_errors

F64 = torch.float64
B, H, N, P, S = 3, 2, 13, 5, 2


def make(**options) -> ka.PrimalValueAttention:
    torch.manual_seed(0)
    layer = ka.PrimalValueAttention(H * P, H, **{"rank": S, "dtype": F64, "feature_map": "elu", **options})
    with torch.no_grad():
        for weight in (layer.kernel.w_e, layer.kernel.w_r, layer.kernel.sqrt_lambda):
            weight.add_(0.3 * torch.randn_like(weight))
    return layer


def dense(layer, x, mask):
    """K and its model of every head, without padding: lists over the sequences."""
    for one, real in zip(x, mask, strict=True):
        q, k = layer.queries_and_keys(one[None, real], one[None, real])
        phi_q, phi_k = (layer.kernel.feature_map(y, None, True)[0] for y in (q, k))
        sums = (phi_q @ phi_k.mT).sum(dim=-1, keepdim=True) if layer.kernel.by_row_sums else 1.0
        lam = layer.kernel.sqrt_lambda[:, None].square()
        model = (phi_q @ layer.kernel.w_e * lam) @ (phi_k @ layer.kernel.w_r).mT
        yield phi_q @ phi_k.mT / sums, model / sums


@pytest.mark.parametrize("normalize", ["output", "keys", "rows"])
@torch.no_grad()
def test_the_errors_are_those_of_the_dense_matrices(normalize):
    layer = make(normalize=normalize)
    x = torch.randn(B, N, H * P, dtype=F64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 9:] = False
    found = kernel_model_errors(layer, x, attention_mask=mask)
    for index, (exact, model) in enumerate(dense(layer, x, mask)):
        size = exact.square().sum(dim=(-2, -1))
        factor = torch.ones(H, dtype=F64)
        if normalize == "output":
            factor = (exact * model).sum(dim=(-2, -1)) / model.square().sum(dim=(-2, -1))
        error = (exact - factor[:, None, None] * model).square().sum(dim=(-2, -1)) / size
        torch.testing.assert_close(found.kernel[index], error.mean().sqrt())
        sigma = torch.linalg.svdvals(exact).square()
        torch.testing.assert_close(found.least[index], (sigma[:, S:].sum(-1) / size).mean().sqrt())
        assert found.least[index] <= found.kernel[index]
        v = layer.split_heads(layer.v_proj(x[index, mask[index]][None]))[0]
        heads = []
        for weights in (model, exact):
            out = weights @ v / (len(v) if normalize == "keys" else 1)
            heads.append(out / out.square().mean(-1, keepdim=True).sqrt() if normalize == "output" else out)
        torch.testing.assert_close(found.output[index], (heads[0] - heads[1]).norm() / heads[1].norm())


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_model_of_full_rank_is_exact(is_causal):
    layer = ka.PrimalValueAttention(H * P, H, rank=P, dtype=F64)
    errors = kernel_model_errors(layer, torch.randn(B, N, H * P, dtype=F64), is_causal=is_causal)
    for error in errors:  # roots of rounding errors
        assert error.max() < 1e-7


@pytest.mark.slow
def test_the_nested_objective_brings_the_model_to_the_least_error_of_one_sequence():
    layer = make(eta=1.0, feature_map="cosine").train()
    x = torch.randn(1, N, H * P, dtype=F64)
    before = kernel_model_errors(layer, x)
    weights = [layer.kernel.w_e, layer.kernel.w_r, layer.kernel.sqrt_lambda]
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(800):
        optimizer.zero_grad()
        layer(x)
        ka.auxiliary_loss(layer).backward()
        optimizer.step()
    after = kernel_model_errors(layer, x)
    assert before.kernel > 1.5 * before.least
    assert after.kernel < 1.01 * after.least
    assert after.output < before.output
