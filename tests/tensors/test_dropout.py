"""Dropout: which entries are dropped, and how often; gradients; where PyTorch's own takes over."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.tensors.dropout import Dropout, draws_masks, dropout
from kernel_attention.tensors.softmax.attention import fused_attention

SHAPE = (7, 11, 1301)  # no multiple of the four entries of a draw


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_zero_or_divided_by_the_chance_of_staying(p, dtype):
    torch.manual_seed(0)
    x = torch.rand(SHAPE, dtype=dtype) + 0.5
    y = dropout(x, p)
    kept = y != 0
    staying = 1 - round(p * 2**16) / 2**16
    torch.testing.assert_close(y[kept], x[kept] / staying)
    # Five deviations of a binomial share.
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / x.numel())


def test_entries_are_dropped_independently():
    """The four entries of a draw among them: pairs at a distance of 1 to 8 are dropped together p^2 times."""
    torch.manual_seed(1)
    p, count = 0.3, 2**19
    dropped = dropout(torch.ones(count), p) == 0
    for distance in range(1, 9):
        both = (dropped[distance:] & dropped[:-distance]).double().mean().item()
        assert abs(both - p**2) < 5 * p * (1 - p) * math.sqrt(2 / count) + 1e-4


def test_every_place_of_a_draw_has_the_same_chance():
    torch.manual_seed(2)
    p, draws = 0.1, 2**17
    shares = (dropout(torch.ones(draws, 4), p) == 0).double().mean(dim=0)
    assert (shares - p).abs().max() < 5 * math.sqrt(p * (1 - p) / draws)


def test_masks_follow_the_seed():
    x = torch.ones(SHAPE)
    torch.manual_seed(3)
    first, second = dropout(x, 0.2), dropout(x, 0.2)
    torch.manual_seed(3)
    assert torch.equal(dropout(x, 0.2), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("layout", ["dense", "transposed", "sliced", "expanded", "empty", "scalar"])
def test_any_layout(layout):
    x = {
        "dense": torch.ones(5, 6),
        "transposed": torch.ones(5, 6, 7).transpose(0, 2),
        "sliced": torch.ones(5, 6)[:, ::2],
        "expanded": torch.ones(1, 6).expand(5, 6),
        "empty": torch.ones(0, 3),
        "scalar": torch.ones(()),
    }[layout]
    y = dropout(x, 0.5)
    assert y.shape == x.shape
    assert ((y == 0) | (y == 2)).all()
    if layout == "transposed":
        assert y.stride() == x.stride()


def test_the_gradient_passes_where_the_entry_did():
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).double() / 0.75)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9])
def test_nothing_and_everything(p):
    x = torch.randn(SHAPE)
    assert torch.equal(dropout(x, p), torch.zeros_like(x) if p == 1 else x)


def test_the_module_does_nothing_in_evaluation():
    x, layer = torch.randn(SHAPE), Dropout(0.5)
    assert layer.eval()(x) is x
    assert not torch.equal(layer.train()(x), x)
    assert repr(layer) == "Dropout(p=0.5, inplace=False)"
    with pytest.raises(InputError, match=r"dropout=1\.5"):
        SequenceClassifier(2, 2, 5, dropout=1.5)


def test_pytorchs_own_takes_over():
    """In 16 bits and under compilers and transforms, with the same masks for the same seed."""
    x = torch.randn(9, 5)
    assert draws_masks(x)
    assert not draws_masks(x.to(torch.bfloat16))
    assert not draws_masks(x.to("meta"))
    for call in (
        torch.compile(dropout, backend="eager"),
        torch.vmap(dropout, (0, None), randomness="different"),
    ):
        torch.manual_seed(4)
        mine = call(x, 0.3)
        assert ((mine == 0) | ((mine - x / 0.7).abs() < 1e-6)).all()
    torch.manual_seed(5)
    mine = dropout(x.to(torch.bfloat16), 0.3)
    torch.manual_seed(5)
    assert torch.equal(mine, F.dropout(x.to(torch.bfloat16), 0.3))


@pytest.mark.parametrize("reads", ["all", "past", "masked"])
def test_attention_drops_weights(reads):
    """The mean over many masks is attention without dropout, with the spread of dropped weights."""
    torch.manual_seed(6)
    q, k, v = (torch.randn(2, 3, 13, 5, dtype=torch.float64) for _ in range(3))
    seen = {
        "is_causal": reads == "past",
        "mask": torch.rand(2, 1, 1, 13) < 0.7 if reads == "masked" else None,
    }
    weights = fused_attention(q, k, torch.eye(13, dtype=q.dtype).expand(2, 3, 13, 13), **seen)
    p, count = 0.2, 1000
    drawn = torch.stack([fused_attention(q, k, v, dropout_p=p, **seen) for _ in range(count)])
    deviation = (weights.square() @ v.square() * p / (1 - p)).sqrt()
    assert ((drawn.mean(dim=0) - weights @ v).abs() <= 6 * deviation / math.sqrt(count) + 1e-12).all()
    assert (drawn.std(dim=0) - deviation).abs().max() < 0.2 * deviation.max()


def test_a_query_that_sees_no_key_gets_zeros():
    q, k, v = (torch.randn(1, 1, 4, 3, requires_grad=True) for _ in range(3))
    y = fused_attention(q, k, v, mask=torch.zeros(1, 1, 1, 4, dtype=torch.bool), dropout_p=0.5)
    y.sum().backward()
    assert (y == 0).all()
    assert all((each.grad == 0).all() for each in (q, k, v))
