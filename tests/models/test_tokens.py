"""Token classifiers: padding and order of a batch change nothing, pairs are compared as the head says."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.models import TokenClassifier, TokenPairClassifier

SIZES = {"embed_dim": 12, "num_heads": 3, "num_layers": 2, "feedforward_dim": 14, "norm_first": True}
MECHANISMS = [
    "softmax",
    {"primal": {"rank": 3, "rank_multiplier": 2}},
    {"conv1d": {"kernel_size": 5}},
    "linear",
]


def tokens(batch, length):
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", MECHANISMS, ids=str)
def test_padding_changes_nothing(attention):
    model = TokenClassifier(11, 5, 17, attention, **SIZES).double().eval()
    x, mask = tokens(3, 17), torch.ones(3, 17, dtype=torch.bool)
    mask[1, 7:] = False
    padded = model(x, mask)[1]
    x[1, 7:] = 10  # whatever stands there
    torch.testing.assert_close(model(x, mask)[1], padded)
    torch.testing.assert_close(model(x[1:2, :7])[0], padded)


def test_the_logits_are_the_head_of_the_mean_of_the_real_tokens():
    model = TokenClassifier(11, 5, 17, "softmax", **SIZES).double().eval()
    x, mask = tokens(2, 13), torch.ones(2, 13, dtype=torch.bool)
    mask[0, 9:] = False
    encoded = model.encoder(x, mask)
    means = torch.stack([encoded[0, :9].mean(dim=0), encoded[1].mean(dim=0)])
    torch.testing.assert_close(model(x, mask), means @ model.head.weight.T + model.head.bias)


def test_positions_and_embeddings_enter_the_first_layer_as_their_sum():
    model = TokenClassifier(11, 5, 17, "softmax", **SIZES | {"dropout": 0.0}).double()
    x, seen = tokens(2, 13), []
    model.encoder.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(x)
    expected = model.encoder.embed.weight[x] * 12**0.5 + model.encoder.positions[:13]
    torch.testing.assert_close(seen[0], expected)


def test_a_pair_is_compared_through_product_and_difference():
    model = TokenPairClassifier(11, 2, 17, "softmax", **SIZES).double().eval()
    x, mask = tokens(10, 13).view(5, 2, 13), torch.ones(5, 2, 13, dtype=torch.bool)
    mask[2, 0, 6:] = False
    a, b = model.pooled(x[:, 0], mask[:, 0]), model.pooled(x[:, 1], mask[:, 1])
    torch.testing.assert_close(model(x, mask), model.head(torch.cat([a, b, a * b, a - b], dim=1)))
    assert model.head[0].in_features == 4 * 12
    assert not torch.allclose(model(x, mask), model(x.flip(1), mask.flip(1))), "the order matters"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 18, dtype=torch.long), "sequence length 18 exceeds max_len=17"),
        (torch.zeros(2, 3), "whole numbers"),
        (torch.zeros(2, 3, 4, dtype=torch.long), r"expected \(B, N\)"),
    ],
    ids=str,
)
def test_bad_input(x, message):
    with pytest.raises(InputError, match=message):
        TokenClassifier(11, 5, 17, **SIZES)(x)


def test_pairs_must_be_pairs():
    with pytest.raises(InputError, match=r"expected \(B, 2, N\)"):
        TokenPairClassifier(11, 2, 17, **SIZES)(tokens(2, 13))


def test_bad_vocabulary():
    with pytest.raises(InputError, match="vocabulary_size=0"):
        TokenClassifier(0, 5, 17)
