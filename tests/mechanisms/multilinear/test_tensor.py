"""Tensor attention without KMLSVD: equal to eq. 4-10 in float64 loops, and the contract on its three
options.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention import InputError, TensorAttention
from kernel_attention.functional import tensor_scores
from reference import multilinear as reference

F64 = torch.float64
HEADS, HEAD_DIM, LENGTH, MAX_LEN = 2, 3, 4, 5
EMBED_DIM = HEADS * HEAD_DIM
MASKS = {
    "": None,
    "holes": torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]]).bool(),  # one of them is right padding too
}
options = pytest.mark.parametrize("option", [1, 2, 3])
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def build(option: int = 1, order: int = 3, dtype: torch.dtype = F64, **changes: object) -> TensorAttention:
    torch.manual_seed(1)
    arguments = {"max_len": MAX_LEN, "option": option, "order": order, "rank": 2, **changes}
    return TensorAttention(EMBED_DIM, HEADS, **arguments).to(dtype)


def inputs(batch: int = 2, length: int = LENGTH, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(batch, length, EMBED_DIM, dtype=dtype)


def leaves_of(layer: TensorAttention, x: Tensor) -> list[Tensor]:
    return [x, *layer.parameters()]


@options
@pytest.mark.parametrize("order", [2, 3, 4])
@every_mask
def test_the_layer_is_the_formula_of_the_thesis(option, order, mask):
    layer, x = build(option, order), inputs().requires_grad_()
    expected, by_hand = reference.tensor_attention(
        x, dict(layer.named_parameters()), mask, num_heads=HEADS, option=option
    )
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = layer(x, attention_mask=mask)
    torch.testing.assert_close(y[real], expected[real])
    for n, scores in enumerate(layer.scores(x, attention_mask=mask)):
        for (b, h), wanted in by_hand.items():
            torch.testing.assert_close(scores[b, h, real[b]], wanted[n])
    probe = torch.randn_like(y)
    found = torch.autograd.grad((y * probe)[real].sum(), leaves_of(layer, x))
    wanted = torch.autograd.grad((expected * probe)[real].sum(), leaves_of(layer, x))
    torch.testing.assert_close(found, wanted)


def test_option_1_is_option_2_with_a_kronecker_product_and_option_2_is_option_3_with_the_core():
    one, two, three = build(1), build(2), build(3)
    x = inputs()
    for layer in (two, three):
        layer.load_state_dict(
            {k: v for k, v in one.state_dict().items() if k not in ("w", "core")}, strict=False
        )
    with torch.no_grad():
        for n in range(3):
            first, second = (one.w[m] for m in range(3) if m != n)
            product = torch.einsum("hja,hkb->hjkab", first, second).flatten(3)
            two.w[n] = product
            two.core.copy_(one.core)
            three.w[n] = product @ one.core.movedim(1 + n, 1).flatten(2).mT[:, None]
    torch.testing.assert_close(two(x), one(x))
    torch.testing.assert_close(three(x), one(x))


def test_parameters_are_as_many_as_the_docstring_says():
    length, rank = MAX_LEN, 2
    expected = {1: 3 * length * rank + rank**3, 2: 3 * length**2 * rank**2 + rank**3, 3: 3 * length**2 * rank}
    for option, count in expected.items():
        layer = build(option)
        assert layer.w.numel() + (0 if layer.core is None else layer.core.numel()) == HEADS * count


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="max_len=None: tensor attention learns weights per position"):
        ka.create_attention("tensor", EMBED_DIM, HEADS)
    with pytest.raises(InputError, match="sequence length 6 exceeds max_len=5"):
        build()(inputs(length=6))
    with pytest.raises(
        InputError,
        match=re.escape("32 x 405 x 405^2 numbers takes 15.84 GiB, more than memory_limit=1.0 GiB"),
    ):
        build(max_len=405)(torch.empty(16, 405, EMBED_DIM, dtype=F64))
    with pytest.raises(InputError, match="is_causal=True"):
        build()(inputs(), is_causal=True)
    with pytest.raises(InputError, match="no cross-attention"):
        build()(inputs(), context=inputs())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"option": 4}, "option=4 must be 1, 2 or 3"),
        ({"order": 1}, "order=1 must be"),
        ({"rank": 0}, "rank=0 must be"),
        ({"max_len": 0}, "max_len=0 must be"),
        ({"memory_limit": -1.0}, "memory_limit=-1.0 must be"),
    ],
)
def test_bad_options_are_refused(arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ka.create_attention("tensor", EMBED_DIM, HEADS, **{"max_len": MAX_LEN, **arguments})


def test_the_function_refuses_what_it_cannot_read():
    sequences = [torch.randn(1, 1, 3, 2) for _ in range(3)]
    weights = [torch.randn(1, 3, 2) for _ in range(3)]
    with pytest.raises(InputError, match="option=5 must be"):
        tensor_scores(sequences, weights, option=5)
    with pytest.raises(InputError, match="core: option 1 needs one"):
        tensor_scores(sequences, weights, option=1)
