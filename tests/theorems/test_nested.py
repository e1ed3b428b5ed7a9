"""The nested low-rank objective of Primal-Attention: its minimum is the kernel SVD, in float64.

Eckart-Young: the best rank-l approximation of K is its truncated SVD, for every l. The objective asks for all
l at once, so its minimisers are the singular directions in order, up to sign and scale.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention import PrimalAttention, PrimalValueAttention, auxiliary_loss
from kernel_attention.errors import InputError
from kernel_attention.functional import (
    KernelGrams,
    kernel_grams,
    ksvd_objective,
    nested_objective,
    primal_kernel,
    primal_scores,
)

F64 = torch.float64
B, H, N, P, S, ROWS = 2, 3, 23, 7, 3, 5


class Problem:
    """Fixed queries and keys of B sequences and H heads, with or without rows, and the SVD of each kernel."""

    def __init__(self, *, rows: bool = False, batch: int = B, heads: int = H, seed: int = 0) -> None:
        torch.manual_seed(seed)
        spread = torch.linspace(1.0, 0.2, P, dtype=F64)
        self.q, self.k = (torch.randn(batch, heads, N, P, dtype=F64) * spread for _ in range(2))
        self.rows = torch.randn(batch, heads, ROWS, P, dtype=F64) if rows else None
        self.kernel = primal_kernel(self.q, self.k, rows=self.rows)
        self.u, self.sigma, vh = torch.linalg.svd(self.kernel)
        self.v = vh.mT
        self.grams = kernel_grams(self.q, self.k, rows=self.rows)

    def features(self, w_e: Tensor, w_r: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        e, r = primal_scores(self.q, self.k, w_e, w_r, rows=self.rows)
        return e * root[:, None, :], r * root[:, None, :]

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights as a layer draws them, and a root of Lambda."""
        shape = (self.q.size(1), P if self.rows is None else ROWS, S)
        w_e, w_r = (torch.nn.init.orthogonal_(torch.empty(shape, dtype=F64)) for _ in range(2))
        return w_e, w_r, torch.rand(shape[0], S, dtype=F64).add(0.5)

    def solution(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights whose features are the leading singular vectors times sigma^{1/2}, for one sequence."""
        assert self.q.size(0) == 1
        maps = [F.normalize(x[0], dim=-1) for x in (self.q, self.k)]
        if self.rows is not None:
            maps = [phi @ self.rows[0].mT for phi in maps]
        sides = (self.u[0, :, :, :S], self.v[0, :, :, :S])
        w_e, w_r = (torch.linalg.pinv(phi, rtol=1e-9) @ side for phi, side in zip(maps, sides, strict=True))
        return w_e, w_r, self.sigma[0, :, :S].sqrt()

    def angles(self, w_e: Tensor, w_r: Tensor) -> Tensor:
        """Between each score and its own singular vector, in degrees, (B, h, 2, s)."""
        scores = primal_scores(self.q, self.k, w_e, w_r, rows=self.rows)
        sides = (self.u[..., :S], self.v[..., :S])
        cosines = [
            F.cosine_similarity(score, side, dim=-2) for score, side in zip(scores, sides, strict=True)
        ]
        return torch.rad2deg(torch.stack(cosines, dim=2).abs().clamp_max(1.0).acos()).detach()


def residual(kernel: Tensor, f: Tensor, g: Tensor) -> Tensor:
    """(||K - f g^T||^2 - ||K||^2) / ||K||^2 by the N x N matrices."""
    size = kernel.square().sum(dim=(-2, -1))
    return ((kernel - f @ g.mT).square().sum(dim=(-2, -1)) - size) / size


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("nesting", ["sequential", "joint", "none"])
def test_the_value_is_the_residual_of_the_dense_kernel(rows, nesting):
    problem = Problem(rows=rows)
    w_e, w_r, root = problem.draw()
    expected = residual(problem.kernel, *problem.features(w_e, w_r, root)).mean(dim=1)
    torch.testing.assert_close(nested_objective(problem.grams, w_e, w_r, root, nesting=nesting), expected)


@pytest.mark.parametrize("rows", [False, True])
def test_the_gradients_are_those_of_the_first_l_features(rows):
    """Against plain loops over l, with the dense kernel."""
    problem = Problem(rows=rows)
    leaves = [leaf.requires_grad_() for leaf in problem.draw()]
    joint = torch.autograd.grad(nested_objective(problem.grams, *leaves, nesting="joint").sum(), leaves)
    sequential = torch.autograd.grad(nested_objective(problem.grams, *leaves).sum(), leaves)
    mean = [torch.zeros_like(leaf) for leaf in leaves]
    own = [torch.zeros_like(leaf) for leaf in leaves]
    for count in range(1, S + 1):
        f, g = (x[..., :count] for x in problem.features(*leaves))
        grads = torch.autograd.grad(residual(problem.kernel, f, g).mean(dim=1).sum(), leaves)
        for total, last, grad in zip(mean, own, grads, strict=True):
            total += grad / S
            last[..., count - 1] = grad[..., count - 1]
    torch.testing.assert_close(joint, tuple(mean))
    torch.testing.assert_close(sequential, tuple(own))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("nesting", ["sequential", "joint", "none"])
def test_the_kernel_svd_is_a_stationary_point_and_attains_the_bound(rows, nesting):
    problem = Problem(rows=rows, batch=1)
    leaves = [leaf.requires_grad_() for leaf in problem.solution()]
    value = nested_objective(problem.grams, *leaves, nesting=nesting)
    squares = problem.sigma.square()
    least = -(squares[..., :S].sum(-1) / squares.sum(-1)).mean(dim=1)
    torch.testing.assert_close(value, least)
    for grad, leaf in zip(torch.autograd.grad(value.sum(), leaves), leaves, strict=True):
        assert grad.abs().max() < 1e-10 * max(1.0, float(leaf.detach().abs().max()))
    for seed in range(20):
        torch.manual_seed(seed)
        w_e, w_r, root = problem.draw()
        assert nested_objective(problem.grams, 0.1 * w_e, 0.1 * w_r, root) >= least - 1e-12


@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_descent_ends_at_the_singular_directions_where_the_penalty_does_not(rows):
    problem = Problem(rows=rows, batch=1, heads=1, seed=3)
    assert (problem.sigma[0, 0, :S] / problem.sigma[0, 0, 1 : S + 1]).min() > 1.05

    def descend(loss, steps=800):
        torch.manual_seed(2)
        leaves = [leaf.requires_grad_() for leaf in problem.draw()]
        optimizer = torch.optim.Adam(leaves, lr=0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(*leaves).sum().backward()
            optimizer.step()
        return problem.angles(*leaves[:2])

    def penalty(w_e, w_r, root):
        scores = primal_scores(problem.q, problem.k, w_e, w_r, rows=problem.rows)
        return ksvd_objective(scores, w_e, w_r, root, form="sum").square()

    assert descend(lambda *leaves: nested_objective(problem.grams, *leaves)).max() < 1.0
    assert descend(penalty).max() > 10.0


def test_without_nesting_the_features_span_the_directions_in_no_order():
    """Any invertible map of the features is as good: f A and g A^{-T} give the same value."""
    problem = Problem(batch=1)
    w_e, w_r, root = problem.solution()
    mix = torch.randn(H, S, S, dtype=F64) + 3 * torch.eye(S, dtype=F64)
    mixed = (w_e * root[:, None]) @ mix, (w_r * root[:, None]) @ torch.linalg.inv(mix).mT
    ones = torch.ones_like(root)
    torch.testing.assert_close(
        nested_objective(problem.grams, *mixed, ones), nested_objective(problem.grams, w_e, w_r, root)
    )
    assert problem.angles(*mixed).max() > 5.0
    leaf = mixed[0].requires_grad_()
    for nesting, is_flat in (("none", True), ("joint", False), ("sequential", False)):
        value = nested_objective(problem.grams, leaf, mixed[1], ones, nesting=nesting)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        assert (grad.abs().max() < 1e-9) == is_flat


def test_padding_is_ignored_and_parts_of_a_sequence_add_up():
    problem = Problem()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 15:], mask[1, :4] = False, False
    padded = kernel_grams(problem.q, problem.k, query_mask=mask, attention_mask=mask)
    alone = kernel_grams(problem.q[:1, :, :15], problem.k[:1, :, :15])
    torch.testing.assert_close(padded.queries[:1], alone.queries)
    parts = [kernel_grams(problem.q[:, :, part], problem.k[:, :, part]) for part in (slice(9), slice(9, N))]
    torch.testing.assert_close(parts[0].keys + parts[1].keys, problem.grams.keys)
    nothing = kernel_grams(problem.q, problem.k, query_mask=~mask & mask, attention_mask=mask)
    assert torch.equal(nested_objective(nothing, *problem.draw()), torch.zeros(B, dtype=F64))


@pytest.mark.parametrize("same", [False, True])
def test_tokens_drawn_apart_for_queries_and_keys_estimate_it_without_bias(same):
    """The objective is linear in each Gram matrix, so independent samples of tokens give its mean.

    Here: the mean over all pairs of halves of the tokens, exactly. One half for both is biased.
    """
    problem = Problem(batch=1, heads=1)
    phi_q, phi_k = (F.normalize(x[0, 0, :6], dim=-1) for x in (problem.q, problem.k))
    weights = problem.draw()

    def unscaled(first: Tensor, second: Tensor) -> Tensor:
        grams = KernelGrams((first.mT @ first)[None, None], (second.mT @ second)[None, None], None)
        size = (grams.queries * grams.keys).sum()
        return nested_objective(grams, *weights) * size

    halves = list(itertools.combinations(range(6), 3))
    pairs = [(half, half) for half in halves] if same else list(itertools.product(halves, halves))
    # A half stands for twice as many tokens: its Gram matrix is multiplied by 2.
    values = [unscaled(phi_q[list(a)] * 2**0.5, phi_k[list(b)] * 2**0.5) for a, b in pairs]
    error = (torch.stack(values).mean() - unscaled(phi_q, phi_k)).abs().item()
    assert (error > 1e-3) if same else (error < 1e-12)


@pytest.mark.parametrize("data_dependent", [False, True])
@pytest.mark.parametrize("length", [19, 300])  # below and above the length from which the one-pass form runs
def test_the_layer_adds_eta_times_the_value_and_leaves_the_kernel_alone(data_dependent, length):
    layer = PrimalAttention(
        12, 2, rank=3, eta=0.7, data_dependent=data_dependent, objective_form="nested", dtype=F64
    )
    x = torch.randn(2, length, 12, dtype=F64, requires_grad=True)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, length - 5 :] = False
    layer(x, attention_mask=mask)
    scores = layer.scores(x, attention_mask=mask)
    f, g = (score * layer.sqrt_lambda[:, None] * mask[:, None, :, None] for score in scores)
    expected = residual(layer.kernel_matrix(x, attention_mask=mask), f, g).mean()
    torch.testing.assert_close(auxiliary_loss(layer), 0.7 * expected)
    auxiliary_loss(layer).backward()
    assert x.grad is None
    assert layer.q_proj.weight.grad is None
    assert layer.k_proj.weight.grad is None
    assert all(weight.grad.abs().sum() > 0 for weight in (layer.w_e, layer.w_r, layer.sqrt_lambda))
    torch.testing.assert_close(layer.measure_objective(x, attention_mask=mask), expected.detach())


@pytest.mark.parametrize(
    ("steps", "with_values"),
    [(300, True), *(pytest.param(2000, each, marks=pytest.mark.slow) for each in (False, True))],
)
def test_trained_with_its_input_it_stays_bounded(steps, with_values):
    """Joint steps of the input's scale, the projections and the weights, as in a whole model."""
    torch.manual_seed(0)
    if with_values:
        layer = PrimalValueAttention(8, 2, rank=3, eta=1.0)
    else:
        layer = PrimalAttention(8, 2, rank=3, eta=1.0, objective_form="nested")
    x, scale = torch.randn(4, 17, 8), torch.ones((), requires_grad=True)
    readout, target = torch.nn.Linear(8, 1), torch.randn(4, 17, 1)
    parameters = [scale, *layer.parameters(), *readout.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (readout(layer(scale * x)) - target).square().mean() + auxiliary_loss(layer)
        loss.backward()
        optimizer.step()
        values.append(layer.objective.mean().item())
    assert min(values[-100:]) >= -1.0
    assert max(values[-100:]) < -0.75, "the features explain most of the kernel"
    assert all(parameter.isfinite().all() and parameter.abs().max() < 100 for parameter in parameters)


def test_bad_input():
    with pytest.raises(InputError, match=r"nesting 'sequence'.*accepted: joint, none, sequential"):
        nested_objective(Problem().grams, *Problem().draw(), nesting="sequence")
    with pytest.raises(InputError, match="objective_form 'ksvd'"):
        PrimalAttention(8, 2, objective_form="ksvd")
    layer = PrimalAttention(8, 2, rank=2, max_len=9, eta=0.1, objective_form="nested")
    assert "every token has its own rows" in layer.why_not_causal()
    assert PrimalAttention(8, 2, rank=2, max_len=9, objective_form="nested").why_not_causal() is None


@pytest.mark.parametrize("feature_map", ["identity", "cosine"])
@pytest.mark.parametrize("impl", ["reference", "fused"])
@pytest.mark.parametrize("size", [1e-6, 1e2, 1e4, 1e6])
def test_the_objective_of_a_layer_does_not_depend_on_the_size_of_the_input(feature_map, impl, size):
    torch.manual_seed(0)
    options = {"rank": 2, "rank_multiplier": 1, "eta": 0.1, "bias": False, "feature_map": feature_map}
    layer = PrimalAttention(12, 2, objective_form="nested", impl=impl, **options)
    x = torch.randn(2, 300, 12)
    found = [layer.measure_objective(factor * x) for factor in (1.0, size)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=0.0)
    layer(size * x)
    auxiliary_loss(layer).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
