"""The sparse mixture of experts: what it computes, its gradients, its balance, and models that have it."""

from __future__ import annotations

import copy

import pytest
import torch

from kernel_attention import InputError, auxiliary_loss
from kernel_attention.models import CausalLanguageModel, SequenceEncoder, SparseExperts
from kernel_attention.models.sublayers import balancing_term

B, N, D, HIDDEN, E = 2, 7, 5, 11, 3


def mixture(k: int = 2, **options) -> SparseExperts:
    torch.manual_seed(0)
    return SparseExperts(D, HIDDEN, E, k, dtype=torch.float64, **options)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, N, D)), dtype=torch.float64)


def dense(model: SparseExperts, x: torch.Tensor) -> torch.Tensor:
    """Every expert on every token; the weights of those that were not chosen are 0."""
    scores = x @ model.router.weight.T
    kept = scores >= scores.topk(model.experts_per_token, dim=-1).values[..., -1:]
    weights = torch.where(kept, scores, -torch.inf).softmax(dim=-1)
    outputs = torch.stack([expert(x) for expert in model.experts], dim=-1)
    return (outputs * weights[..., None, :]).sum(dim=-1)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_equal_experts_are_one_feed_forward_network(k):
    """Whatever the router says, as the weights of a token add up to 1."""
    model, x = mixture(k), tokens()
    for expert in model.experts[1:]:
        expert.load_state_dict(model.experts[0].state_dict())
    torch.testing.assert_close(model(x), model.experts[0](x), rtol=0, atol=1e-14)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_output_and_every_gradient_are_those_of_the_dense_sum(k, activation):
    model, x = mixture(k, activation=activation), tokens().requires_grad_()
    weight = tokens()
    found, expected = ((f(x) * weight).sum() for f in (model, lambda x: dense(model, x)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    inputs = [x, *model.parameters()]
    gradients = (torch.autograd.grad(y, inputs, materialize_grads=True) for y in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    if k == 1:
        assert torch.autograd.grad((model(x) * weight).sum(), model.router.weight)[0].abs().max() < 1e-15


# The balancing term


def test_the_balancing_term_by_hand_and_without_padded_tokens():
    scores = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 1.0], [3.0, 3.0, 9.0]], dtype=torch.float64)
    chosen = scores.topk(2).indices
    real = torch.tensor([True, True, False])
    mean = scores[:2].softmax(-1).mean(0)
    expected = 3 * (mean[0] * 1 / 4 + mean[1] * 2 / 4 + mean[2] * 1 / 4)
    assert balancing_term(scores, chosen, real).item() == pytest.approx(expected.item(), rel=1e-14)
    assert balancing_term(scores[:2], chosen[:2]).item() == pytest.approx(expected.item(), rel=1e-14)
    nothing = balancing_term(scores, chosen, torch.zeros(3, dtype=torch.bool))
    assert nothing.item() == 0.0


def test_half_precision_counts_tokens_exactly():
    """In bfloat16, 1001 tokens would be 1000 and a share of 1/1001 would have an error of 2^-9."""
    scores = torch.zeros(1001, E, dtype=torch.bfloat16)
    scores[0, 2] = 1.0
    chosen = torch.zeros(1001, 1, dtype=torch.int64)
    chosen[0] = 2
    found = balancing_term(scores, chosen)
    expected = balancing_term(scores.double(), chosen)
    assert found.dtype is torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)  # 1001 roundings of 6e-8 in a sum


def test_the_auxiliary_loss_has_the_balance_of_every_layer():
    """Also beside an objective of the attention, of which the mean over the layers is taken."""
    torch.manual_seed(0)
    primal = {"primal": {"rank": 2, "rank_multiplier": 2, "eta": 0.3}}
    model = SequenceEncoder(
        3, N, primal, embed_dim=8, num_heads=2, num_layers=2, feedforward_dim=6, experts=E, dropout=0.0
    )
    with pytest.raises(RuntimeError, match="no forward in training mode"):
        auxiliary_loss(model)
    mask = torch.arange(N) < torch.tensor([[N], [3]])
    model(torch.randn(B, N, 3), mask)
    balance = [layer.experts.penalty() for layer in model.layers]
    own = [layer.attention.penalty() for layer in model.layers]
    assert all(0.005 < term < 0.03 for term in balance)
    torch.testing.assert_close(auxiliary_loss(model), sum(own) + sum(balance))
    torch.testing.assert_close(auxiliary_loss(model, "mean"), sum(own) / 2 + sum(balance))
    auxiliary_loss(model).backward()
    assert model.layers[0].experts.router.weight.grad.abs().max() > 0
    assert copy.deepcopy(model).layers[0].experts.objective is None
    fresh = copy.deepcopy(model).eval()
    fresh(torch.randn(B, N, 3), mask)
    assert auxiliary_loss(fresh) == 0.0, "nothing in evaluation"


# Models


def test_a_layer_with_equal_experts_is_the_layer_without():
    torch.manual_seed(0)
    options = {"embed_dim": 8, "num_heads": 2, "num_layers": 2, "feedforward_dim": 6, "dtype": torch.float64}
    plain = CausalLanguageModel(13, N, "softmax", **options).eval()
    model = CausalLanguageModel(13, N, "softmax", experts=E, **options).eval()
    state = model.state_dict()
    for name in state:
        if ".experts.experts." in name:
            layer, _, rest = name.partition(".experts.experts.")
            state[name] = plain.state_dict()[f"{layer}.{rest.partition('.')[2]}"]
        elif not name.endswith("router.weight"):
            state[name] = plain.state_dict()[name]
    model.load_state_dict(state)
    read = torch.randint(13, (B, N))
    torch.testing.assert_close(model(read), plain(read), rtol=0, atol=1e-13)


def test_decoding_token_by_token_gives_the_logits_of_one_pass():
    torch.manual_seed(0)
    model = CausalLanguageModel(
        13, N, ["softmax", "linear"], embed_dim=8, num_heads=2, num_layers=2, feedforward_dim=6, experts=E,
        dtype=torch.float64,
    ).eval()  # fmt: skip
    read = torch.randint(13, (B, N))
    state, steps = model.initial_state(B), []
    for n in range(N):
        logits, state = model.step(read[:, n], state)
        steps.append(logits)
    torch.testing.assert_close(torch.stack(steps, dim=1), model(read), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 4}, "experts_per_token=4 exceeds experts=3"),
        ({"experts_per_token": 0}, "experts_per_token=0 must be a whole number"),
        ({"experts": 0}, "experts=0 must be a whole number"),
        ({"balance": -1.0}, r"balance=-1.0 must be a finite number"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"activation": "tanh"}, "activation 'tanh'"),
    ],
    ids=str,
)
def test_wrong_options(changes, message):
    with pytest.raises(InputError, match=message):
        SparseExperts(**({"embed_dim": D, "feedforward_dim": HIDDEN, "experts": E} | changes))
