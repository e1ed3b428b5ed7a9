"""A primal layer from a softmax layer: exact where theory says so, least squares everywhere.

With the cosine kernel the softmax layer's kernel *is* the primal layer's own, so remark 3.3 of
Primal-Attention holds to rounding. Sizes are different primes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.analysis import primal_from_softmax
from kernel_attention.analysis.initialization import fit_output_map, ridge_solution

HEADS, P, TOKENS, BATCH = 2, 5, 23, 3
D = HEADS * P
F64 = torch.float64


def cosine_layer() -> ka.LinearAttention:
    return ka.LinearAttention(D, HEADS, feature_map="cosine").double().eval()


def softmax_layer(**options) -> ka.SoftmaxAttention:
    return ka.SoftmaxAttention(D, HEADS, **options).double().eval()


def sequences(batch: int = BATCH, tokens: int = TOKENS) -> Tensor:
    return torch.randn(batch, tokens, D, dtype=F64)


def unit_rows(layer: nn.Linear, tokens: Tensor, head: int) -> Tensor:
    """phi of one head's queries or keys: (T, d) -> (T, p)."""
    return nn.functional.normalize(layer(tokens)[:, head * P : (head + 1) * P], dim=-1)


def same_up_to_scale(found: Tensor, wanted: Tensor) -> None:
    """Column by column: the size of a direction is free, its sign is not."""
    sizes = found.norm(dim=0), wanted.norm(dim=0)
    torch.testing.assert_close(found / sizes[0], wanted / sizes[1], rtol=1e-6, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("rank", [P, 2])
def test_svd_is_remark_3_3_where_the_kernel_is_the_features_own(rank):
    teacher, x = cosine_layer(), sequences()
    layer = primal_from_softmax(teacher, x, rank=rank, data_dependent=False, ridge=0.0).layer
    tokens = x.flatten(0, 1)  # the kernel of all queries with all keys
    e, r = layer.scores(tokens[None])
    for head in range(HEADS):
        phi_q = unit_rows(teacher.q_proj, tokens, head)
        phi_k = unit_rows(teacher.k_proj, tokens, head)
        u, _, vh = torch.linalg.svd(phi_q @ phi_k.T)
        signs = torch.stack([torch.sign(column[column.abs().argmax()]) for column in u.T])[:rank]
        h_e, h_r = u[:, :rank] * signs, vh[:rank].T * signs
        same_up_to_scale(layer.w_e[head], phi_k.T @ h_r)
        same_up_to_scale(layer.w_r[head], phi_q.T @ h_e)
        same_up_to_scale(e[0, head], h_e)
        same_up_to_scale(r[0, head], h_r)
        # Both scores of a direction are sigma times their singular vector under one and the same factor.
        torch.testing.assert_close(e[0, head].norm(dim=0), r[0, head].norm(dim=0))
    size = (layer.w_e.square() + layer.w_r.square()).sum(dim=1)
    torch.testing.assert_close(size, torch.full_like(size, 2 / rank))


@torch.no_grad()
@pytest.mark.parametrize("form", ["mean", "sum"])
def test_lambda_is_that_of_the_kernel_svd_and_j_is_zero(form):
    teacher, x = cosine_layer(), sequences(batch=1)
    options = {"data_dependent": False, "eta": 0.3, "objective_form": form, "ridge": 0.0}
    layer = primal_from_softmax(teacher, x, **options).layer
    for head in range(HEADS):
        phi_q, phi_k = (unit_rows(each, x[0], head) for each in (teacher.q_proj, teacher.k_proj))
        sigma = torch.linalg.svdvals(phi_q @ phi_k.T)[:P]
        wanted = (TOKENS if form == "mean" else 1) / sigma
        torch.testing.assert_close(layer.sqrt_lambda[head] ** 2, wanted, rtol=1e-7, atol=0.0)
    layer.train()(x)
    assert abs(layer.objective.item()) < 1e-12


@torch.no_grad()
def test_values_are_the_dual_variables_where_the_kernel_is_the_features_own():
    # One sequence: with h_r,j = v_j, e(x) is the head's output and W_e = sum_j phi(k_j) v_j^T.
    teacher, x = cosine_layer(), sequences(batch=1)
    found = primal_from_softmax(teacher, x, method="values", data_dependent=False, ridge=0.0)
    for head in range(HEADS):
        phi_k = unit_rows(teacher.k_proj, x[0], head)
        values = teacher.v_proj(x)[0, :, head * P : (head + 1) * P]
        same_up_to_scale(found.layer.w_e[head], phi_k.T @ values)
    assert found.error < 1e-9  # and the output map has nothing left to lose
    torch.testing.assert_close(found.layer(x), teacher(x), rtol=0, atol=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("rank", [P, 2])
def test_the_weights_are_the_least_squares_of_the_dual_scores(data_dependent, rank):
    # "values" with the softmax kernel: E = A V and R = A^T E, regressed on f(X) phi head by head. A lower
    # rank keeps the values' leading directions.
    teacher, x = softmax_layer(), sequences()
    options = {"data_dependent": data_dependent, "rank_multiplier": 1, "rank": rank, "ridge": 0.0}
    layer = primal_from_softmax(teacher, x, method="values", **options).layer
    grid = [m * (TOKENS - 1) // (rank - 1) for m in range(rank)]
    for head in range(HEADS):
        own = slice(head * P, (head + 1) * P)
        values = teacher.v_proj(x)[..., own]
        if rank < P:
            directions = torch.linalg.svd(values.flatten(0, 1))[2][:rank].T
            largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
            values = values @ (directions * largest.sign())
        designs, scores = ([], []), ([], [])
        for sequence, value in zip(x, values, strict=True):
            logits = teacher.q_proj(sequence)[:, own] @ teacher.k_proj(sequence)[:, own].T / P**0.5
            attention = logits.softmax(-1)
            scores[0].append(attention @ value)
            scores[1].append(attention.T @ attention @ value)
            for design, projection in zip(designs, (teacher.q_proj, teacher.k_proj), strict=True):
                phi = unit_rows(projection, sequence, head)
                design.append(phi @ sequence[grid][:, own].T if data_dependent else phi)
        for weight, design, score in zip((layer.w_e, layer.w_r), designs, scores, strict=True):
            same_up_to_scale(weight[head], torch.linalg.lstsq(torch.cat(design), torch.cat(score)).solution)


@torch.no_grad()
@pytest.mark.parametrize("method", ["svd", "values", "random"])
@pytest.mark.parametrize("data_dependent", [True, False])
def test_the_errors_are_those_of_the_layers_output_and_padding_changes_nothing(method, data_dependent):
    teacher, x = softmax_layer(), sequences()
    mask = torch.arange(TOKENS)[None] < torch.tensor([[TOKENS], [7], [11]])
    new = sequences(batch=2)
    options = {"method": method, "data_dependent": data_dependent, "rank": 3, "rank_multiplier": 3}
    found = primal_from_softmax(teacher, x, attention_mask=mask, held_out=new, **options)
    wanted, given = teacher(x, attention_mask=mask)[mask], found.layer(x, attention_mask=mask)[mask]
    assert found.error == pytest.approx(((given - wanted).norm() / wanted.norm()).item())
    assert found.error < found.constant_error < 1.0
    spread = wanted - wanted.mean(0)
    assert found.constant_error == pytest.approx((spread.norm() / wanted.norm()).item())
    new_error = (found.layer(new) - teacher(new)).norm() / teacher(new).norm()
    assert found.held_out_error == pytest.approx(new_error.item())
    garbage = torch.where(mask[..., None], x, 1e3 * torch.randn_like(x))
    again = primal_from_softmax(teacher, garbage, attention_mask=mask, **options)
    for name, parameter in found.layer.named_parameters():
        torch.testing.assert_close(again.layer.get_parameter(name), parameter, rtol=1e-6, atol=1e-8)


def test_it_repeats_itself_and_leaves_the_generator_and_the_softmax_layer_alone():
    teacher, x = ka.SoftmaxAttention(D, HEADS).train(), sequences().float()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    state = torch.get_rng_state()
    layers = [primal_from_softmax(teacher, x, method="random", eta=0.1).layer for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    for name, parameter in layers[0].named_parameters():
        assert torch.equal(parameter, layers[1].get_parameter(name))
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
    assert layers[0].training
    other = primal_from_softmax(teacher, x, method="random", seed=1).layer
    assert not torch.equal(other.w_e, layers[0].w_e)


@torch.no_grad()
def test_torchs_own_attention_is_read_too():
    host = nn.MultiheadAttention(D, HEADS, batch_first=True).double().eval()
    nn.init.normal_(host.in_proj_bias)
    x = sequences()
    found = primal_from_softmax(host, x, method="values", data_dependent=False)
    wanted = host(x, x, x)[0]
    assert found.error == pytest.approx(((found.layer(x) - wanted).norm() / wanted.norm()).item())


@torch.no_grad()
def test_the_fit_is_plain_least_squares_where_the_shared_map_restricts_nothing():
    layer = ka.PrimalAttention(D, HEADS, rank=2, data_dependent=False).double()  # 2 s = 4 <= p = 5
    scores, target = torch.randn(HEADS, 67, 4, dtype=F64), torch.randn(67, D, dtype=F64)
    fit_output_map(layer, scores, target, 0.0)
    found = layer.out_proj(torch.cat([layer.concat(each) for each in scores], dim=-1))
    design = torch.cat([*scores, torch.ones(67, 1, dtype=F64)], dim=-1)
    torch.testing.assert_close(found, design @ torch.linalg.lstsq(design, target).solution)


@pytest.mark.parametrize("bias", [True, False])
def test_the_fit_ends_where_the_error_has_no_slope(bias):
    layer = ka.PrimalAttention(D, HEADS, rank=P, data_dependent=False, bias=bias).double()
    scores, target = torch.randn(HEADS, 131, 2 * P, dtype=F64), torch.randn(131, D, dtype=F64)

    def slopes() -> list[float]:
        found = layer.out_proj(torch.cat([layer.concat(each) for each in scores], dim=-1))
        weights = [layer.concat.weight, layer.out_proj.weight]
        parts = torch.autograd.grad((found - target).square().sum(), weights)
        return [(part.norm() * weight.norm()).item() for part, weight in zip(parts, weights, strict=True)]

    before = slopes()
    fit_output_map(layer, scores, target, 0.0)
    after = slopes()
    assert after[0] < 1e-2 * before[0]
    assert after[1] < 1e-8 * before[1]
    with torch.no_grad():
        design = torch.cat([*scores, torch.ones(131, 1, dtype=F64)] if bias else [*scores], dim=-1)
        free = (design @ torch.linalg.lstsq(design, target).solution - target).norm()
        found = layer.out_proj(torch.cat([layer.concat(each) for each in scores], dim=-1))
        assert free < (found - target).norm() < target.norm()


def test_the_ridge_solution_solves_its_normal_equations():
    features, target = torch.randn(13, 5, dtype=F64), torch.randn(13, 3, dtype=F64)
    gram, cross = features.T @ features, features.T @ target
    found = ridge_solution(gram, cross, 0.1)
    torch.testing.assert_close(gram @ found + 0.1 * gram.diagonal().mean() * found, cross)
    twice = torch.cat([features, features], dim=1)  # singular: the solution of least norm shares alike
    found = ridge_solution(twice.T @ twice, twice.T @ target, 0.0)
    torch.testing.assert_close(found[:5], found[5:])
    torch.testing.assert_close(
        features @ found[:5] * 2, features @ torch.linalg.lstsq(features, target).solution
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "pca"}, "method"),
        ({"method": "values", "rank": P + 1}, "rank=6"),
        ({"rank": BATCH * TOKENS + 1}, "rank=70"),
        ({"ridge": -1.0}, "ridge"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"bias": False}, "bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(BATCH, TOKENS)}, "attention_mask"),
        ({"samples": torch.zeros(2, 3, D + 1)}, "x has shape"),
        ({"samples": torch.full((2, 3, D), torch.nan)}, "finite"),
        ({"attention_mask": torch.zeros(BATCH, TOKENS, dtype=torch.bool)}, "real tokens"),
        ({"layer": nn.Linear(3, 3)}, "SoftmaxAttention"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"layer": softmax_layer(), "samples": sequences(), **change}
    with pytest.raises(ka.InputError, match=message):
        primal_from_softmax(arguments.pop("layer"), arguments.pop("samples"), **arguments)
