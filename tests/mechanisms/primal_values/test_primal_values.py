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
@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [("cosine", "keys"), ("elu", "keys"), ("taylor", "keys"), ("elu", "rows"), ("taylor", "rows")],
)
def test_equal_to_the_loops(is_causal, feature_map, normalize):
    kernel = make(feature_map=feature_map, normalize=normalize).kernel
    q, k, v = torch.randn(3, B, H, N, P, dtype=F64)
    out = kernel(q, k, v, is_causal=is_causal)
    phi_q, phi_k = (kernel.feature_map(x, None, True) for x in (q, k))
    for b in range(B):
        for h in range(H):
            weights = kernel.w_e[h], kernel.w_r[h], kernel.sqrt_lambda[h].square()
            expected = by_loops(
                phi_q[b, h],
                phi_k[b, h],
                v[b, h],
                *weights,
                is_causal=is_causal,
                by_row_sums=normalize == "rows",
            )
            torch.testing.assert_close(out[b, h], expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("normalize", "feature_map"), [("keys", "cosine"), ("output", "cosine"), ("rows", "elu")]
)
def test_of_full_rank_it_is_linear_attention_under_another_normalisation(is_causal, normalize, feature_map):
    torch.manual_seed(0)
    options = {"feature_map": feature_map, "bias": False, "dtype": F64}
    layer = PrimalValueAttention(H * P, H, rank=P + 2, normalize=normalize, **options)
    linear = LinearAttention(H * P, H, **options)
    shared = {name: value for name, value in layer.state_dict().items() if not name.startswith("kernel.")}
    linear.load_state_dict(shared)
    x = torch.randn(B, N, H * P, dtype=F64)
    seen = torch.arange(1, N + 1, dtype=F64) if is_causal else torch.full((N,), float(N), dtype=F64)
    (heads,) = linear.head_outputs(x, x, None, is_causal, True)
    if normalize == "keys":
        heads = heads / seen[:, None]
    if normalize == "output":
        heads = heads / heads.square().mean(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(layer(x, is_causal=is_causal), layer.out_proj(layer.merge_heads(heads)))


@pytest.mark.parametrize("length", [5, 500])
def test_the_heads_outputs_do_not_shrink_with_the_number_of_keys(length):
    layer = make()
    seen = []
    layer.out_proj.register_forward_pre_hook(lambda module, args: seen.append(layer.split_heads(args[0])))
    layer(torch.randn(B, length, H * P, dtype=F64), is_causal=True)
    sizes = seen[0].square().mean(dim=-1)
    torch.testing.assert_close(sizes, torch.ones_like(sizes))


def test_no_factor_of_the_kernel_changes_a_scaled_output():
    layer = make()
    x = torch.randn(B, N, H * P, dtype=F64)
    before = layer(x)
    with torch.no_grad():
        layer.kernel.sqrt_lambda.mul_(torch.tensor([[1e-3], [7.0], [1e4]], dtype=F64))
    torch.testing.assert_close(layer(x), before)


def test_the_matrix_that_multiplies_the_values_is_the_low_rank_kernel():
    layer = make()
    x = torch.randn(B, N, H * P, dtype=F64)
    e, r = layer.named_scores(x).values()
    expected = (e * layer.kernel.sqrt_lambda[:, None].square()) @ r.mT / N
    torch.testing.assert_close(layer.kernel_matrix(x), expected)
    assert torch.linalg.matrix_rank(layer.kernel_matrix(x)).max() == S


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("normalize", ["output", "rows"])
def test_the_objective_is_the_residual_of_phis_kernel(with_context, normalize):
    layer = make(eta=0.4, feature_map="elu", normalize=normalize)
    x = torch.randn(B, N, H * P, dtype=F64)
    source = torch.randn(B, N + 3, H * P, dtype=F64) if with_context else x
    mask = torch.ones(B, source.size(1), dtype=torch.bool)
    mask[0, 7:] = False
    layer(x, attention_mask=mask, context=source if with_context else None)
    q, k = layer.queries_and_keys(x, source)
    phi_q, phi_k = (torch.nn.functional.elu(y) + 1 for y in (q, k))
    phi_k = phi_k * mask[:, None, :, None]
    if normalize == "rows":
        phi_q = phi_q / (phi_q @ phi_k.mT).sum(dim=-1, keepdim=True)
    phi_q = phi_q if with_context else phi_q * mask[:, None, :, None]
    kernel = phi_q @ phi_k.mT
    model = (phi_q @ layer.kernel.w_e * layer.kernel.sqrt_lambda[:, None].square()) @ (
        phi_k @ layer.kernel.w_r
    ).mT
    size = kernel.square().sum((-2, -1))
    expected = ((kernel - model).square().sum((-2, -1)) / size - 1).mean()
    torch.testing.assert_close(auxiliary_loss(layer), 0.4 * expected)


def test_a_query_that_sees_no_key_gets_the_bias():
    for normalize in ("output", "rows"):
        layer = make(feature_map="elu", normalize=normalize)
        x = torch.randn(B, N, H * P, dtype=F64, requires_grad=True)
        out = layer(x, context=x, attention_mask=torch.zeros(B, N, dtype=torch.bool))
        torch.testing.assert_close(out, layer.out_proj.bias.expand_as(out))
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, torch.zeros_like(grad))


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
    with pytest.raises(InputError, match=r"normalize='rows' with feature_map='cosine'.*accepted: elu, relu"):
        PrimalValueAttention(8, 2, normalize="rows")
    with pytest.raises(InputError, match=r"normalize 'sum'.*accepted: keys, output, rows"):
        PrimalValueAttention(8, 2, normalize="sum")
    with pytest.raises(InputError, match=r"rank=0 must be"):
        PrimalValueAttention(8, 2, rank=0)
    with pytest.raises(InputError, match=r"eta=-1"):
        PrimalValueAttention(8, 2, eta=-1.0)
    assert "whole sequence" in PrimalValueAttention(8, 2, eta=0.1).why_not_sharded(False)
    assert PrimalValueAttention(8, 2).why_not_sharded(True) is None
