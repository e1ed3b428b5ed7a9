"""Primal attention with values: equal to plain loops, and to linear attention where the rank suffices."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import LinearAttention, PrimalValueAttention, auxiliary_loss
from kernel_attention.errors import InputError
from kernel_attention.functional import PrimalScores, primal_value_attention
from reference.primal import primal_value_attention as by_loops

F64 = torch.float64
B, H, N, P, S = 2, 3, 11, 5, 2


def make(**options) -> PrimalValueAttention:
    torch.manual_seed(0)
    layer = PrimalValueAttention(H * P, H, **{"rank": S, "dtype": F64, **options})
    with torch.no_grad():  # at the start W_e = W_r and Lambda = 1, which could hide a mistake
        for weight in (layer.kernel.w_e, layer.kernel.w_r, layer.kernel.sqrt_lambda):
            weight.add_(0.3 * torch.randn_like(weight))
    return layer


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["cosine", "elu", "taylor"])
def test_equal_to_the_loops(is_causal, feature_map):
    layer = make(feature_map=feature_map)
    kernel = layer.kernel
    q, k, v = torch.randn(3, B, H, N, P, dtype=F64)
    out = kernel(q, k, v, is_causal=is_causal)
    phi_q, phi_k = (kernel.feature_map(x, None, True) for x in (q, k))
    for b in range(B):
        for h in range(H):
            weights = kernel.w_e[h], kernel.w_r[h], kernel.sqrt_lambda[h].square()
            expected = by_loops(phi_q[b, h], phi_k[b, h], v[b, h], *weights, is_causal=is_causal)
            torch.testing.assert_close(out[b, h], expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_of_full_rank_it_is_linear_attention_divided_by_the_number_of_keys(is_causal):
    torch.manual_seed(0)
    layer = PrimalValueAttention(H * P, H, rank=P + 2, dtype=F64)
    linear = LinearAttention(H * P, H, feature_map="cosine", dtype=F64)
    shared = {name: value for name, value in layer.state_dict().items() if not name.startswith("kernel.")}
    linear.load_state_dict(shared)
    x = torch.randn(B, N, H * P, dtype=F64)
    seen = torch.arange(1, N + 1, dtype=F64) if is_causal else torch.full((N,), float(N), dtype=F64)
    bias = layer.out_proj.bias
    expected = (linear(x, is_causal=is_causal) - bias) / seen[:, None] + bias
    torch.testing.assert_close(layer(x, is_causal=is_causal), expected)


def test_the_matrix_that_multiplies_the_values_is_the_low_rank_kernel():
    layer = make()
    x = torch.randn(B, N, H * P, dtype=F64)
    e, r = layer.named_scores(x).values()
    expected = (e * layer.kernel.sqrt_lambda[:, None].square()) @ r.mT / N
    torch.testing.assert_close(layer.kernel_matrix(x), expected)
    assert torch.linalg.matrix_rank(layer.kernel_matrix(x)).max() == S


@pytest.mark.parametrize("with_context", [False, True])
def test_the_objective_is_the_residual_of_phis_kernel(with_context):
    layer = make(eta=0.4)
    x = torch.randn(B, N, H * P, dtype=F64)
    source = torch.randn(B, N + 3, H * P, dtype=F64) if with_context else x
    mask = torch.ones(B, source.size(1), dtype=torch.bool)
    mask[0, 7:] = False
    layer(x, attention_mask=mask, context=source if with_context else None)
    q, k = layer.queries_and_keys(x, source)
    phi_q, phi_k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
    phi_k = phi_k * mask[:, None, :, None]
    phi_q = phi_q if with_context else phi_q * mask[:, None, :, None]
    kernel = phi_q @ phi_k.mT
    model = (phi_q @ layer.kernel.w_e * layer.kernel.sqrt_lambda[:, None].square()) @ (
        phi_k @ layer.kernel.w_r
    ).mT
    size = kernel.square().sum((-2, -1))
    expected = ((kernel - model).square().sum((-2, -1)) / size - 1).mean()
    torch.testing.assert_close(auxiliary_loss(layer), 0.4 * expected)


def test_a_query_that_sees_no_key_gets_zeros():
    scores = PrimalScores(*torch.randn(2, B, H, N, S, dtype=F64))
    v = torch.randn(B, H, N, P, dtype=F64)
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[1, :4] = True
    out = primal_value_attention(scores, v, torch.ones(H, S, dtype=F64), attention_mask=mask)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[1].abs().sum() > 0


def test_bad_options():
    with pytest.raises(InputError, match=r"feature_map='frobenius' is not known to work token by token"):
        PrimalValueAttention(8, 2, feature_map="frobenius")
    with pytest.raises(InputError, match=r"rank=0 must be"):
        PrimalValueAttention(8, 2, rank=0)
    with pytest.raises(InputError, match=r"eta=-1"):
        PrimalValueAttention(8, 2, eta=-1.0)
    assert "whole sequence" in PrimalValueAttention(8, 2, eta=0.1).why_not_sharded(False)
    assert PrimalValueAttention(8, 2).why_not_sharded(True) is None
