"""The sequence encoder and its heads: what they compute, what padding may not do, what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.nn import functional as F

from kernel_attention import InputError, auxiliary_loss, list_attention
from kernel_attention.models import EncoderLayer, SequenceClassifier
from kernel_attention.models.sequence import sinusoidal_positions
from kernel_attention.models.tokens import TokenEncoder

CHANNELS, CLASSES, MAX_LEN, HEADS, EMBED_DIM = 5, 7, 13, 3, 24
LENGTHS = (13, 2, 1, 11, 6)
SMALL = {"embed_dim": EMBED_DIM, "num_heads": HEADS, "num_layers": 2, "feedforward_dim": 31}
PRIMAL = {"primal": {"rank": 3, "rank_multiplier": 2, "eta": 0.2}}

# A mechanism of a token grid has no place in a model of sequences of any length.
mechanisms = pytest.mark.parametrize(
    "mechanism", [row.name for row in list_attention() if "grid_size" not in row.options]
)


def build(attention=PRIMAL, **options) -> SequenceClassifier:
    return SequenceClassifier(CHANNELS, CLASSES, MAX_LEN, attention, **{**SMALL, **options})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(MAX_LEN)[None] < torch.tensor(LENGTHS)[:, None]
    return torch.randn(len(LENGTHS), MAX_LEN, CHANNELS), mask


# Padding


def padding_changes_no_logit(model: SequenceClassifier) -> None:
    model.eval()
    x, mask = batch()
    with torch.no_grad():
        zeros = model(x.masked_fill(~mask[..., None], 0.0), mask)
        garbage = model(torch.where(mask[..., None], x, 1e4 * torch.randn_like(x)), mask)
        assert (garbage - zeros).abs().max() <= 1e-5
        for b, length in enumerate(LENGTHS):
            alone = model(x[b : b + 1, :length])
            assert (zeros[b] - alone[0]).abs().max() <= 1e-5


@mechanisms
def test_padding_changes_no_logit_by_more_than_1e_5(mechanism):
    padding_changes_no_logit(build(mechanism))


@pytest.mark.parametrize("options", [{"pooling": "mean"}, {"norm_first": True}], ids=str)
def test_padding_changes_no_logit_in_another_model(options):
    padding_changes_no_logit(build(**options))


# What is computed


@pytest.mark.parametrize("norm_first", [False, True], ids=["post_norm", "pre_norm"])
@pytest.mark.parametrize("positions", ["learnt", "fixed"])
def test_the_encoder_is_projection_positions_layers_norm_gelu(positions, norm_first):
    encoder = build(positions=positions, norm_first=norm_first).double().eval().encoder
    x = torch.randn(3, 11, CHANNELS, dtype=torch.float64)
    h = (x @ encoder.project.weight.T + encoder.project.bias) * math.sqrt(EMBED_DIM) + encoder.positions[:11]
    for layer in encoder.layers:

        def feedforward(h, layer=layer):
            return layer.linear2(F.gelu(layer.linear1(h)))

        if norm_first:
            h = h + layer.attention(layer.norm1(h))
            h = h + feedforward(layer.norm2(h))
        else:
            h = layer.norm1(h + layer.attention(h))
            h = layer.norm2(h + feedforward(h))
    torch.testing.assert_close(encoder(x), F.gelu(encoder.norm(h)))


def test_the_post_norm_layer_is_that_of_torch():
    class Theirs(torch.nn.Module):
        """torch's attention behind our layer's call."""

        embed_dim = EMBED_DIM

        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def forward(self, x, *, attention_mask=None, is_causal=False):
            return self.attention(x, x, x, key_padding_mask=~attention_mask, need_weights=False)[0]

    theirs = torch.nn.TransformerEncoderLayer(
        EMBED_DIM, HEADS, 31, activation="gelu", batch_first=True
    ).eval()
    ours = EncoderLayer(Theirs(theirs.self_attn), 31).eval()
    for name in ("linear1", "linear2", "norm1", "norm2"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    x, mask = torch.randn(5, MAX_LEN, EMBED_DIM), batch()[1]
    expected = theirs(x, src_key_padding_mask=~mask)
    torch.testing.assert_close(ours(x, mask)[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_mean_pooling_is_the_mean_of_the_real_tokens():
    model, (x, mask) = build(pooling="mean").eval(), batch()
    encoded = model.encoder(x, mask)
    means = torch.stack([encoded[b, :length].mean(0) for b, length in enumerate(LENGTHS)])
    torch.testing.assert_close(model(x, mask), model.head(means))
    torch.testing.assert_close(model(x), model.head(model.encoder(x).mean(1)))


def test_flattening_gives_every_position_its_own_weights():
    model = build(pooling="flatten").eval()
    assert model.head.weight.shape == (CLASSES, MAX_LEN * EMBED_DIM)
    x = torch.randn(2, 11, CHANNELS)
    by_position = model.head.weight.unflatten(1, (MAX_LEN, EMBED_DIM))[:, :11]
    expected = torch.einsum("bnd,cnd->bc", model.encoder(x), by_position) + model.head.bias
    torch.testing.assert_close(model(x), expected)


def test_normal_positions_are_as_large_as_embedded_tokens_and_trained():
    torch.manual_seed(0)
    encoder = TokenEncoder(1000, 200, "softmax", positions="learnt_normal", embed_dim=24, num_heads=3)
    assert isinstance(encoder.positions, torch.nn.Parameter)
    tokens = encoder.embed.weight * math.sqrt(24)
    for entries in (encoder.positions, tokens):  # 4,800 entries or more: a deviation of 0.01
        assert entries.std().item() == pytest.approx(1.0, abs=0.05)
    encoder.positions.detach().zero_()
    encoder.reset_parameters()
    assert encoder.positions.std().item() == pytest.approx(1.0, abs=0.05)


def test_without_a_final_activation_the_encoder_ends_in_its_norm():
    encoder = build().encoder.eval()
    x = torch.randn(3, 11, CHANNELS)
    ended = encoder(x)
    encoder.final_activation = "none"
    torch.testing.assert_close(F.gelu(encoder(x)), ended)
    assert encoder(x).mean(dim=-1).abs().max() < 1e-5  # layer norm's, at its first weights


@pytest.mark.parametrize("embed_dim", [24, 7, 1])
def test_fixed_positions_are_sines_and_cosines(embed_dim):
    table = sinusoidal_positions(MAX_LEN, embed_dim)
    assert table.shape == (MAX_LEN, embed_dim)
    for n in range(MAX_LEN):
        for i in range(embed_dim):
            angle = n / 10000 ** (2 * (i // 2) / embed_dim)
            assert table[n, i].item() == pytest.approx(
                math.cos(angle) if i % 2 else math.sin(angle), abs=1e-5
            )


def test_the_causal_encoder_does_not_see_the_future():
    for attention in (PRIMAL, "softmax", "cosine"):
        encoder = build(attention).encoder.eval()
        x = torch.randn(2, MAX_LEN, CHANNELS)
        y = encoder(x, is_causal=True)
        for now in range(1, MAX_LEN):
            future = x.clone()
            future[:, now:] = 100 * torch.randn(2, MAX_LEN - now, CHANNELS)
            assert torch.equal(encoder(future, is_causal=True)[:, :now], y[:, :now])


# Configurations


def test_the_length_and_the_dropout_reach_the_layers_that_know_them_unless_said_otherwise():
    model = build(["softmax", {"primal": {"rank": 3}}], dropout=0.3)
    assert model.encoder.layers[0].attention.dropout == 0.3
    assert model.encoder.layers[1].attention.max_len == MAX_LEN
    model = build([{"softmax": {"dropout": 0.0}}, {"primal": {"max_len": 29}}], dropout=0.3)
    assert model.encoder.layers[0].attention.dropout == 0.0
    assert model.encoder.layers[1].attention.max_len == 29


@pytest.mark.parametrize("pooling", ["flatten", "mean"])
@mechanisms
def test_every_parameter_is_trained(mechanism, pooling):
    model, (x, mask) = build(mechanism, pooling=pooling), batch()
    logits = model(x, mask)
    assert logits.shape == (len(LENGTHS), CLASSES)
    (F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4])) + auxiliary_loss(model)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_dropout_acts_in_training_only():
    model, (x, mask) = build(dropout=0.5), batch()
    assert not torch.equal(model(x, mask), model(x, mask))
    model.eval()
    assert torch.equal(model(x, mask), model(x, mask))


# Bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embed_dim": 25}, "embed_dim=25 must be divisible by num_heads=3"),
        ({"embed_dim": 0}, "embed_dim=0 must be a whole number of at least 1"),
        ({"num_heads": 0}, "num_heads=0 must be a whole number of at least 1"),
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1"),
        ({"feedforward_dim": 1.5}, "feedforward_dim=1.5 must be a whole number of at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be a probability in [0, 1)"),
        ({"positions": "learned"}, "unknown positions 'learned'; did you mean 'learnt'"),
        ({"pooling": "max"}, "unknown pooling 'max'"),
        ({"final_activation": "relu"}, "unknown final_activation 'relu'; did you mean 'gelu'?"),
        ({"attention": "primale"}, "unknown attention mechanism 'primale'; did you mean 'primal' or "),
        ({"attention": ["primal"]}, "lists 1 entries for num_layers=2"),
        (
            {"attention": {"primal": {"ranks": 3}}},
            "unknown option of attention 'primal' 'ranks'; did you mean 'rank'",
        ),
        ({"attention": {"primal": {"rank": 0}}}, "rank=0 must be a whole number of at least 1"),
        ({"attention": {"primal": {"embed_dim": 3}}}, "unknown option of attention 'primal' 'embed_dim'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        build(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["in_features", "num_outputs", "max_len"])
def test_sizes_below_one_are_refused(name):
    sizes = {"in_features": CHANNELS, "num_outputs": CLASSES, "max_len": MAX_LEN, name: 0}
    with pytest.raises(InputError, match=f"{name}=0 must be a whole number of at least 1"):
        SequenceClassifier(**sizes, **SMALL)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, MAX_LEN + 1, CHANNELS), "sequence length 14 exceeds max_len=13"),
        ((2, MAX_LEN, CHANNELS + 1), "x has shape (2, 13, 6), expected (B, N, 5)"),
        ((MAX_LEN, CHANNELS), "x has shape (13, 5), expected (B, N, 5)"),
        ((2, 0, CHANNELS), "(2, 0, "),
    ],
)
def test_bad_inputs_are_refused(shape, message):
    with pytest.raises(InputError, match=re.escape(message)):
        build()(torch.randn(shape))


def test_a_bad_mask_is_refused():
    x, mask = batch()
    with pytest.raises(InputError, match=r"attention_mask has shape .*True = real token"):
        build()(x, mask.float())
    with pytest.raises(InputError, match=re.escape("attention_mask has shape (5, 12)")):
        build()(x, mask[:, 1:])
