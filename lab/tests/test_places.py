"""A network over places in the place of attention, and images that are shifted cyclically."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.data.tokens.sets import TokenData, TokenSplit, shifted_images
from kernel_attention_lab.evidence import Cell, read_suite


def test_it_reads_places_and_compares_nothing(mixer):
    """The same network for every channel."""
    torch.manual_seed(0)
    layer = mixer.TokenMixer(8, 2, max_len=6, hidden=4).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    v = layer.v_proj(x)
    by_hand = torch.stack(
        [layer.gather(torch.nn.functional.gelu(layer.spread(v[:, :, channel]))) for channel in range(8)], -1
    )
    torch.testing.assert_close(layer(x), layer.out_proj(by_hand))
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    torch.testing.assert_close(layer(x, attention_mask=mask)[:, :4], layer(x[:, :4]))
    with pytest.raises(InputError, match="sequence length 7 exceeds max_len=6"):
        layer(torch.randn(1, 7, 8, dtype=torch.float64))


def images(name: str) -> TokenData:
    rows = [np.arange(16) + 20 * at for at in range(5)]
    split = TokenSplit.of(rows, [0, 1, 0, 1, 0])
    return TokenData(name, split, None, split, 256, 16, ("a", "b"))


def test_every_image_is_shifted_by_numbers_of_its_own():
    data = images("pathfinder16")
    shifted = shifted_images(data)
    moves = set()
    for before, after in zip(
        data.train.tokens.reshape(5, 4, 4), shifted.train.tokens.reshape(5, 4, 4), strict=True
    ):
        (down, right), = np.argwhere(after == before[0, 0])  # fmt: skip
        np.testing.assert_array_equal(after, np.roll(before, (down, right), (0, 1)))
        moves.add((down, right))
    assert len(moves) > 1
    np.testing.assert_array_equal(shifted.train.tokens, shifted_images(data).train.tokens)
    assert (shifted.train.tokens != shifted.test.tokens).any(), "splits have numbers of their own"
    with pytest.raises(InputError, match="shift=True: dataset sst2 has no square images"):
        shifted_images(images("sst2"))


def test_the_suite_differs_from_that_of_equal_time_in_time_and_evaluations_alone(mixer):
    ours, theirs = read_suite("places"), read_suite("equal_time")
    assert all(ours.recipe(cell)[1].seeds == [cell.seed] for cell in ours.cells())
    for column in ("Pathfinder-16", "Image"):
        for row in ("softmax", "primal"):
            cell = Cell(row, column, 0)
            here, there = ours.recipe(cell)[1].keys(), theirs.recipe(cell)[1].keys()
            differing = {key for key in here if here[key] != there[key]}
            assert differing <= {"max_seconds", "plugins", "evaluate_every"}
