"""Packed sequences: which boundaries divide a row, and what they make of it; `testing` has the contract."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing import assert_close

import kernel_attention as ka
from kernel_attention.tensors.packing import pack_sequences

WIDTH, LENGTHS = 15, (5, 0, 3, 1, 2)
N = sum(LENGTHS)


def boundaries(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor((0, *LENGTHS)).cumsum(dim=0).to(dtype)


def row(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, N, WIDTH, dtype=torch.float64)


def test_what_is_packed_is_the_row_and_what_is_unpacked_the_padded_batch():
    x = row()
    packed = pack_sequences("row", x, boundaries(torch.int32))
    padded = packed.unpack(x)
    assert padded.shape == (len(LENGTHS), 5, WIDTH)
    assert torch.equal(packed.pack(padded), x)
    assert not padded[~packed.attention_mask].any()
    for place, part in enumerate(x[0].split(LENGTHS)):
        assert torch.equal(padded[place, : len(part)], part)
    assert packed.sequence.tolist() == [0, 0, 0, 0, 0, 2, 2, 2, 3, 4, 4]
    assert packed.place.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1]
    heads = x.unflatten(-1, (3, 5)).transpose(1, 2)
    assert torch.equal(packed.pack_heads(packed.unpack_heads(heads)), heads)
    patches = packed.in_patches(2)
    assert patches.boundaries.tolist() == [0, 3, 3, 5, 6, 7]
    assert patches.attention_mask.sum(dim=1).tolist() == [3, 0, 2, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": boundaries() + 1}, "softmax: cu_seqlens begins with 1, expected 0"),
        ({"cu_seqlens": boundaries()[:-1]}, "cu_seqlens ends with 9, expected the number of tokens, 11"),
        ({"cu_seqlens": torch.tensor([0, 7, 4, 11])}, "cu_seqlens decreases from 7 to 4"),
        ({"cu_seqlens": boundaries().float()}, "cu_seqlens has shape (6,) and dtype torch.float32"),
        ({"cu_seqlens": boundaries()[None]}, "cu_seqlens has shape (1, 6)"),
        ({"cu_seqlens": boundaries()[:1]}, "cu_seqlens has shape (1,)"),
        ({"max_seqlen": 4}, "max_seqlen=4, but cu_seqlens has a sequence of 5 tokens"),
        ({"max_seqlen": 0}, "max_seqlen=0 must be at least 1"),
        ({"max_seqlen": 5, "cu_seqlens": None}, "max_seqlen=5 needs cu_seqlens"),
        ({"x": row(2)}, "cu_seqlens was given, and x has 2 rows, expected 1"),
        ({"x": row()[:, 1:], "cu_seqlens": pack_sequences("", row(), boundaries())}, "is for 11 tokens"),
        ({"attention_mask": torch.ones(1, N).bool()}, "attention_mask cannot be combined with cu_seqlens"),
        ({"context": row()}, "context cannot be combined with cu_seqlens"),
    ],
)  # fmt: skip
def test_boundaries_that_do_not_divide_the_row_are_refused(changes, message):
    layer = ka.create_attention("softmax", WIDTH, 3).double()
    call = {"x": row(), "cu_seqlens": boundaries(), **changes}
    with pytest.raises(ka.InputError, match=re.escape(message)) as error:
        layer(**call)
    assert "\n" not in str(error.value)


def test_a_grid_has_no_packed_sequences():
    layer = ka.create_attention("conv2d", WIDTH, 3, grid_size=(2, 5), class_tokens=1).double()
    assert not layer.supports(packing=True)
    with pytest.raises(ka.InputError, match=r"^conv2d: cu_seqlens was given, but its tokens are a grid"):
        layer(row(), cu_seqlens=boundaries())


def test_a_layer_says_which_ways_exclude_one_another():
    layer = ka.create_attention("linear", WIDTH, 3)
    assert layer.supports(packing=True, causal=True)
    assert layer.why_not(packing=True, decoding=True) == "packed sequences do not decode"
    assert "divided among processes" in layer.why_not(packing=True, sharding=True)


def test_a_larger_maximum_and_empty_sequences_change_nothing():
    layer, x = ka.create_attention("primal", WIDTH, 3, max_len=20, rank=2, eta=0.3).double(), row()
    with ka.collect_objectives() as objectives:
        y = layer(x, cu_seqlens=boundaries())
    (y.sum() + objectives.total()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert_close(layer(x, cu_seqlens=boundaries(torch.int32), max_seqlen=9), y)
    assert_close(layer(x, cu_seqlens=pack_sequences("", x, boundaries())), y)


def test_a_compiled_layer_takes_any_boundaries_in_one_graph():
    layer, x = ka.create_attention("softmax", WIDTH, 3).double(), row()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for ends in (boundaries(), torch.tensor([0, 2, 4, 9, 9, N])):
        y = compiled(x, cu_seqlens=ends, max_seqlen=5, is_causal=True)
        assert_close(y, layer(x, cu_seqlens=ends, is_causal=True))
    with pytest.raises(Exception, match=r"cu_seqlens needs max_seqlen under torch\.compile"):
        compiled(x, cu_seqlens=boundaries())
