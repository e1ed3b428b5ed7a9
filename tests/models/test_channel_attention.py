"""Channel attention of FAN: its formula, what it does not see, and its place in the encoder layer."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from kernel_attention import InputError, create_attention
from kernel_attention.models import ChannelAttention, EncoderLayer, VisionTransformer

BATCH, LENGTH, EMBED_DIM = 3, 5, 7
DOUBLE = {"dtype": torch.float64}


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randn(BATCH, length, EMBED_DIM, **DOUBLE)


def module() -> ChannelAttention:
    """With weights of order 1 and more: the weights of a new one are all close to 1/2."""
    made = ChannelAttention(EMBED_DIM, **DOUBLE)
    torch.nn.init.normal_(made.q_proj.weight, std=20.0)
    return made


def softmax(values: list[float]) -> list[float]:
    exponentials = [math.exp(value - max(values)) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def weights_in_loops(z: list[list[float]], w_q: list[list[float]]) -> list[float]:
    """The formula without MLP, for one sequence of N tokens of d channels."""
    length, width = len(z), len(z[0])
    prototype = softmax([sum(row) / width for row in z])
    columns = [softmax([row[channel] for row in z]) for channel in range(width)]
    correlation = [sum(a * b for a, b in zip(column, prototype, strict=True)) for column in columns]
    scores = [sum(w * c for w, c in zip(row, correlation, strict=True)) / math.sqrt(length) for row in w_q]
    return [1 / (1 + math.exp(-score)) for score in scores]


def test_the_weights_are_those_of_the_formula():
    made, x, values = module(), tokens(), tokens()
    expected = torch.tensor([weights_in_loops(z, made.q_proj.weight.tolist()) for z in x.tolist()], **DOUBLE)
    weights = made.channel_weights(x)
    torch.testing.assert_close(weights, expected)
    assert weights.std() > 0.1, "weights of one size could not tell formulas apart"
    torch.testing.assert_close(made(x, values), values * expected[:, None])


def test_padding_changes_no_weight():
    made, x = module(), tokens()
    lengths = (5, 2, 1)
    mask = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    garbage = torch.where(mask[..., None], x, 1e4 * torch.randn_like(x))
    weights = made.channel_weights(garbage, mask)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(weights[b], made.channel_weights(x[b : b + 1, :length])[0])


def test_a_sequence_without_real_tokens_has_finite_weights_and_gradients():
    made, x = module(), tokens().requires_grad_()
    weights = made.channel_weights(x, torch.zeros(BATCH, LENGTH, dtype=torch.bool))
    weights.sum().backward()
    assert weights.isfinite().all()
    assert x.grad.isfinite().all()


def test_neither_the_order_of_tokens_nor_a_channels_level_matters():
    """A softmax over the tokens loses what all of them share."""
    made, x = module(), tokens()
    weights = made.channel_weights(x)
    torch.testing.assert_close(made.channel_weights(x[:, torch.randperm(LENGTH)]), weights)
    torch.testing.assert_close(made.channel_weights(x + torch.randn(EMBED_DIM, **DOUBLE)), weights)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post_norm", "pre_norm"])
def test_it_weighs_what_the_feed_forward_network_returns(norm_first):
    attention = create_attention("softmax", EMBED_DIM, 1, **DOUBLE)
    layer = EncoderLayer(attention, 11, 0.0, norm_first, channel_attention=True, **DOUBLE)
    torch.nn.init.normal_(layer.channel_attention.q_proj.weight, std=20.0)
    torch.nn.init.normal_(layer.norm2.weight)
    x, mask = tokens(), torch.arange(LENGTH)[None] < torch.tensor([5, 4, 2])[:, None]

    def feedforward(h):
        y = layer.linear2(F.gelu(layer.linear1(h)))
        return y * layer.channel_attention.channel_weights(h, mask)[:, None]

    if norm_first:
        h = x + attention(layer.norm1(x), attention_mask=mask)
        expected = h + feedforward(layer.norm2(h))
    else:
        h = layer.norm1(x + attention(x, attention_mask=mask))
        expected = layer.norm2(h + feedforward(h))
    torch.testing.assert_close(layer(x, mask), expected)


def test_it_has_no_causal_form():
    layer = EncoderLayer(
        create_attention("softmax", EMBED_DIM, 1, **DOUBLE), 11, channel_attention=True, **DOUBLE
    )
    with pytest.raises(InputError, match="channel_attention=True reads every token"):
        layer(tokens(), is_causal=True)


def test_rpc_fan_trains():
    """FAN with RPC-Attention in the first of its symmetric layers (kernel-PCA paper, E.7)."""
    rpc = {"rpc": {"iterations": 4, "lam": 4.0}}
    model = VisionTransformer(
        8, 2, 5, [rpc, "symmetric"], embed_dim=12, num_heads=4, num_layers=2, feedforward_dim=48,
        channel_attention=True,
    )  # fmt: skip
    F.cross_entropy(model(torch.rand(6, 3, 8, 8)), torch.arange(6) % 5).backward()
    for layer in model.layers:
        gradient = layer.channel_attention.q_proj.weight.grad
        assert gradient.isfinite().all()
        assert gradient.any()
    assert model.resized((4, 6)).layers[1].channel_attention is not None
