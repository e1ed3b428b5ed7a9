"""Primal attention with values from a softmax layer: exact where phi has its kernel, else the best model."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_attention as ka
from kernel_attention.analysis import distill_primal_values, primal_from_softmax, primal_values_from_softmax
from kernel_attention.functional import nested_objective
from kernel_attention.mechanisms.nested_objective.functional import kernel_factors

F64 = torch.float64
BATCH, TOKENS, HEADS, P = 4, 13, 3, 5
D = HEADS * P


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def sequences(batch: int = BATCH, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(batch, tokens, D, dtype=F64)


def padded(batch: int = BATCH) -> torch.Tensor:
    mask = torch.ones(batch, TOKENS, dtype=torch.bool)
    mask[0, 9:] = False
    return mask


@pytest.mark.parametrize("normalize", ["keys", "rows"])
def test_a_layer_whose_kernel_has_the_features_is_reproduced(normalize):
    """W_e Lambda W_r^T is the identity, times n where n divides.

    The value is exact to 1e-16, and the weights to its root, 1e-8.
    """
    feature_map = {"keys": "cosine", "rows": "elu"}[normalize]
    layer = ka.LinearAttention(D, HEADS, feature_map=feature_map, dtype=F64).eval()
    options = {"feature_map": feature_map, "normalize": normalize, "ridge": 0.0}
    found = primal_values_from_softmax(layer, sequences(1, 41), **options)
    assert found.error < 1e-6
    kernel = found.layer.kernel
    product = (kernel.w_e * kernel.sqrt_lambda[:, None].square()) @ kernel.w_r.mT
    expected = torch.eye(P, dtype=F64) * {"keys": 41, "rows": 1}[normalize]
    torch.testing.assert_close(product, expected.expand_as(product), rtol=1e-6, atol=1e-6)


def test_of_one_sequence_the_start_is_the_best_model_between_the_spans():
    """P_q A P_k truncated, with the orthogonal projections P on the columns of phi(q) and phi(k)."""
    layer = ka.SoftmaxAttention(D, HEADS, dtype=F64).eval()
    x = sequences(1)
    found = primal_values_from_softmax(layer, x, rank=2, ridge=0.0, steps=0, normalize="keys").layer
    attention = layer.kernel_matrix(x)[0]
    phi_q, phi_k = (torch.nn.functional.normalize(y[0], dim=-1) for y in layer.queries_and_keys(x, x))
    left, right = (torch.linalg.qr(phi)[0] for phi in (phi_q, phi_k))
    u, sigma, vh = torch.linalg.svd(left @ left.mT @ attention @ right @ right.mT)
    best = (u[..., :2] * sigma[:, None, :2]) @ vh[:, :2]
    torch.testing.assert_close(found.kernel_matrix(x)[0], best)


def test_the_descent_brings_shared_weights_nearer_to_every_sequences_attention():
    layer = ka.SoftmaxAttention(D, HEADS, dtype=F64).eval()
    with torch.no_grad():
        layer.q_proj.weight.mul_(4)
    x, mask = 2 * sequences(8), padded(8)
    target = layer.kernel_matrix(x, attention_mask=mask)
    distances = []
    for steps in (0, 200):
        found = primal_values_from_softmax(
            layer, x, rank=3, attention_mask=mask, steps=steps, normalize="keys"
        )
        model = found.layer.kernel_matrix(x, attention_mask=mask)
        squares = (model - target).square().sum((-2, -1)) / target.square().sum((-2, -1))
        distances.append(squares.mean().item())
    assert distances[1] < distances[0] - 1e-3, "the start is near the solution, and not the solution"


def test_the_objective_against_another_kernel_is_its_residual():
    q, k = torch.randn(2, BATCH, HEADS, TOKENS, P, dtype=F64)
    target = torch.randn(BATCH, HEADS, TOKENS, TOKENS, dtype=F64)
    w_e, w_r = torch.randn(2, HEADS, P, 2, dtype=F64)
    root = torch.rand(HEADS, 2, dtype=F64)
    f, g = ((torch.nn.functional.normalize(y, dim=-1) @ w) * root[:, None] for y, w in ((q, w_e), (k, w_r)))
    size = target.square().sum((-2, -1))
    expected = (((target - f @ g.mT).square().sum((-2, -1)) - size) / size).mean(dim=1)
    factors = kernel_factors(q, k, target)
    for form in (factors, factors.grams()):
        torch.testing.assert_close(nested_objective(form, w_e, w_r, root), expected)


@pytest.mark.parametrize("nesting", ["sequential", "joint", "none"])
def test_factors_and_their_gram_matrices_have_one_gradient(nesting):
    q, k = torch.randn(2, BATCH, HEADS, TOKENS, P, dtype=F64)
    target = torch.rand(BATCH, HEADS, TOKENS, TOKENS, dtype=F64)
    mask = padded()
    weights = [torch.randn(HEADS, *shape, dtype=F64, requires_grad=True) for shape in ((P, 2), (P, 2), (2,))]
    factors = kernel_factors(q, k, target, query_mask=mask, attention_mask=mask)
    found, expected = (
        torch.autograd.grad(nested_objective(form, *weights, nesting=nesting).sum(), weights)
        for form in (factors, factors.grams())
    )
    torch.testing.assert_close(found, expected)


class LargestTensor(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, *(x.numel() for x in tree_leaves(out) if torch.is_tensor(x)), 0)
        return out


def test_short_sequences_of_many_features_make_no_gram_matrix_each():
    batch, tokens, width = 29, 5, 11
    features = 1 + width + width * (width + 1) // 2
    layer = ka.SoftmaxAttention(2 * width, 2, dtype=F64).eval()
    x = torch.randn(batch, tokens, 2 * width, dtype=F64)
    with LargestTensor() as largest:
        primal_values_from_softmax(layer, x, steps=2, feature_map="taylor", normalize="rows")
    assert largest.numbers <= 2 * batch * max(tokens, width) * features  # not 2 * batch * features^2


def test_with_values_a_layer_says_more_of_softmax_attention_than_its_scores_do():
    """A data-independent primal layer mixes no tokens; here values travel."""
    layer = ka.SoftmaxAttention(D, HEADS, dtype=F64).eval()
    with torch.no_grad():
        layer.q_proj.weight.mul_(3)
    x = sequences(16)
    scores = primal_from_softmax(layer, x, method="values", data_dependent=False)
    for normalize in ("keys", "rows"):
        values = primal_values_from_softmax(layer, x, rank=12, feature_map="taylor", normalize=normalize)
        assert values.error < 0.5 * scores.error


def test_it_keeps_the_projections_the_precision_and_the_generator():
    layer = ka.SoftmaxAttention(D, HEADS)
    x = sequences().float()
    before = torch.get_rng_state()
    found = primal_values_from_softmax(layer, x, steps=3)
    assert torch.equal(torch.get_rng_state(), before), "the draws of a new layer are its own"
    assert found.layer.training
    assert found.layer.q_proj.weight.dtype == torch.float32
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(found.layer, name).weight, getattr(layer, name).weight)


def test_the_layers_of_a_model_are_replaced_from_the_first_to_the_last():
    """The second layer is fitted to what the new first layer gives."""
    torch.manual_seed(1)
    model = ka.models.SequenceClassifier(5, 3, 23, "softmax", embed_dim=12, num_heads=2, num_layers=2).eval()
    batch = (
        torch.randn(6, 17, 5),
        torch.arange(17).expand(6, -1) < torch.tensor([[17], [9], [17], [5], [17], [12]]),
    )
    expected = model(*batch)
    found = distill_primal_values(model, batch, rank=6, normalize="keys", steps=20)
    new = [module for module in model.modules() if isinstance(module, ka.PrimalValueAttention)]
    assert [each.layer for each in found.values()] == new
    assert not any(isinstance(module, ka.SoftmaxAttention) for module in model.modules())
    assert all(each.error < each.constant_error for each in found.values())
    assert (model(*batch) - expected).norm() < 0.5 * (expected - expected.mean(dim=0)).norm()


def test_causal_layers_are_refused():
    model = ka.models.PositionClassifier(
        7, 3, 23, "softmax", embed_dim=12, num_heads=2, num_layers=1, is_causal=True
    )
    with pytest.raises(ka.InputError, match="is causal; accepted: self-attention that is not causal"):
        distill_primal_values(model, torch.randint(0, 7, (2, 9)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"ridge": -1.0}, "ridge=-1"),
        ({"rank": 0}, "rank=0"),
        ({"bias": False}, "bias"),
        ({"samples": torch.full((2, 3, D), torch.nan)}, "finite"),
        ({"layer": torch.nn.Linear(3, 3)}, "SoftmaxAttention"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"layer": ka.SoftmaxAttention(D, HEADS), "samples": sequences(), **change}
    with pytest.raises(ka.InputError, match=message):
        primal_values_from_softmax(arguments.pop("layer"), arguments.pop("samples"), **arguments)
