"""Stems, views, positions and pooling of series: what they compute, and what padding may not do."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from kernel_attention import InputError
from kernel_attention.models import PositionClassifier, SequenceClassifier, SequenceEncoder, TokenEncoder
from kernel_attention.models.sequence import sinusoidal_positions
from kernel_attention.models.series_stem import (
    ConvolutionBlock,
    ConvolutionStem,
    TokenBatchNorm,
    automatic_patch_len,
    series_views,
)

CHANNELS, CLASSES, MAX_LEN, EMBED_DIM = 5, 7, 13, 24
LENGTHS = (13, 2, 1, 11, 6)
SMALL = {"embed_dim": EMBED_DIM, "num_heads": 3, "num_layers": 1, "feedforward_dim": 31}
ALL_VIEWS = ("raw", "normalized", "difference")
OPTIONS = {
    "convolution": {"stem": "convolution", "pooling": "mean"},
    "rocket": {"stem": "rocket", "patch_len": 3, "views": ("raw", "normalized"), "pooling": "mean_max"},
    "patches": {"patch_len": 4, "pooling": "flatten"},
    "patches of convolutions": {"stem": "convolution", "patch_len": 3, "pooling": "attention"},
    "views": {"views": ALL_VIEWS, "pooling": "mean_max"},
    "relative positions": {"positions": "convolutional", "pooling": "attention"},
    "time-absolute positions": {"positions": "time_absolute", "patch_len": 2, "pooling": "mean_max"},
    "no positions": {"positions": "none"},
    "all": {
        "stem": "convolution", "stem_layers": 2, "patch_len": 2, "views": ALL_VIEWS,
        "positions": "convolutional", "pooling": "mean_max",
    },
}  # fmt: skip
variants = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def build(attention="softmax", **options) -> SequenceClassifier:
    return SequenceClassifier(CHANNELS, CLASSES, MAX_LEN, attention, **{**SMALL, **options})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(MAX_LEN)[None] < torch.tensor(LENGTHS)[:, None]
    return torch.randn(len(LENGTHS), MAX_LEN, CHANNELS), mask


def trained(model: torch.nn.Module) -> torch.nn.Module:
    """The model after two batches, so that batch norms have statistics of their own."""
    for _ in range(2):
        model.train()(*batch())
    return model.eval()


@variants
@pytest.mark.parametrize("attention", ["softmax", {"primal": {"rank": 3, "rank_multiplier": 2}}])
def test_padding_changes_no_logit(options, attention):
    """In float64, where sums in another order differ by some 1e-15 of numbers of size 1 to 100."""
    model = trained(build(attention, **options)).double()
    x, mask = batch()
    x = x.double()
    with torch.no_grad():
        garbage = model(torch.where(mask[..., None], x, 1e4 * torch.randn_like(x)), mask)
        for b, length in enumerate(LENGTHS):
            alone = model(x[b : b + 1, :length])
            torch.testing.assert_close(garbage[b], alone[0], rtol=1e-9, atol=1e-10)


@variants
def test_padding_changes_no_gradient_and_no_statistic_of_training(options):
    """A batch padded further has the loss, the gradients and the running statistics that it had."""
    x, mask = batch()
    longer = F.pad(x.double(), (0, 0, 0, 4), value=3.0), F.pad(mask, (0, 4))
    outcomes = []
    for inputs, real in ((x.double(), mask), longer):
        torch.manual_seed(3)
        model = SequenceClassifier(CHANNELS, CLASSES, 20, "softmax", **SMALL | {"dropout": 0.0} | options)
        model.double().train()
        model(inputs, real).square().sum().backward()
        outcomes.append(
            [parameter.grad for parameter in model.parameters()]
            + [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        )
    for first, second in zip(*outcomes, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-9)


@variants
def test_every_parameter_is_trained_and_an_empty_series_is_finite(options):
    model, (x, mask) = build(**options), batch()
    mask[2] = False
    logits = model(x, mask)
    assert logits.shape == (len(LENGTHS), CLASSES)
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3, 4])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_whole_model_compiles_to_one_graph():
    torch.compiler.reset()
    model, (x, mask) = trained(build(**OPTIONS["all"])), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), model(x, mask))


# What is computed


def test_a_patch_is_a_linear_map_of_its_steps():
    encoder = SequenceEncoder(CHANNELS, MAX_LEN, "softmax", patch_len=4, **SMALL)
    assert (encoder.num_tokens, encoder.positions.shape) == (4, (4, EMBED_DIM))
    x = torch.randn(2, MAX_LEN, CHANNELS)
    filled = F.pad(x, (0, 0, 0, 3)).reshape(2, 4, 4 * CHANNELS)
    torch.testing.assert_close(encoder.project(x), F.linear(filled, *encoder.project.parameters()))
    assert encoder(x).shape == (2, 4, EMBED_DIM)


@pytest.mark.parametrize(
    ("max_len", "stem", "steps"),
    [
        (1, "linear", 1), (128, "linear", 1), (129, "convolution", 2), (896, "convolution", 7),
        (2500, "linear", 20), (7, "rocket", 1), (9, "rocket", 2), (2500, "rocket", 313),
    ],
)  # fmt: skip
def test_patches_chosen_by_the_length(max_len, stem, steps):
    assert automatic_patch_len(max_len, stem) == steps
    encoder = SequenceEncoder(2, max_len, "linear", patch_len=0, stem=stem, **SMALL)
    assert encoder.patch_len == steps
    assert encoder.num_tokens <= (8 if stem == "rocket" else 128)


def test_a_block_joins_its_branches():
    block = ConvolutionBlock(EMBED_DIM, EMBED_DIM).double().eval()
    x = torch.randn(2, MAX_LEN, EMBED_DIM, dtype=torch.float64)
    narrow = block.narrow(x).mT
    parts = [F.conv1d(narrow, conv.weight, padding=conv.kernel_size[0] // 2) for conv in block.convolutions]
    highest = F.pad(x, (0, 0, 1, 1), value=-torch.inf).unfold(1, 3, 1).amax(dim=-1)
    joined = torch.cat([*[part.mT for part in parts], block.after_maximum(highest)], dim=-1)
    torch.testing.assert_close(block(x), F.gelu(x + joined / (1 + block.norm.eps) ** 0.5))


@pytest.mark.parametrize("length", [1, 4, 11, 12, 13])
def test_a_stride_takes_every_so_manieth_step_of_the_convolutions(length):
    stem = ConvolutionStem(CHANNELS, EMBED_DIM, num_blocks=1, patch_len=4).double().eval()
    x = torch.randn(2, length, CHANNELS, dtype=torch.float64)
    (block,) = stem.blocks
    narrow = x.mT if block.narrow is None else block.narrow(x).mT
    parts = [F.conv1d(narrow, conv.weight, padding=conv.kernel_size[0] // 2) for conv in block.convolutions]
    joined = torch.cat([part.mT[:, ::4] for part in parts], dim=-1)
    highest = [x[:, max(start - 1, 0) : start + 5].amax(dim=1) for start in range(0, length, 4)]
    joined = torch.cat([joined, block.after_maximum(torch.stack(highest, dim=1))], dim=-1)
    torch.testing.assert_close(stem(x), F.gelu(joined / (1 + block.norm.eps) ** 0.5))


def test_batch_norm_of_whole_series_is_that_of_torch():
    ours, theirs = TokenBatchNorm(EMBED_DIM).double(), torch.nn.BatchNorm1d(EMBED_DIM).double()
    for _ in range(3):
        x = 3 + 2 * torch.randn(4, 11, EMBED_DIM, dtype=torch.float64)
        torch.testing.assert_close(ours(x), theirs(x.mT).mT)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x.mT).mT)


def test_views_of_a_series():
    x, mask = batch()
    raw, normalized, difference = series_views(x, mask, ALL_VIEWS).chunk(3, dim=-1)
    for b, length in enumerate(LENGTHS):
        real = x[b, :length]
        assert torch.equal(raw[b, :length], real)
        if length > 2:
            torch.testing.assert_close(
                normalized[b, :length],
                (real - real.mean(dim=0)) / real.std(dim=0, correction=0),
                rtol=1e-4, atol=1e-5,
            )  # fmt: skip
            change = F.pad(real.diff(dim=0), (0, 0, 1, 0))
            torch.testing.assert_close(
                difference[b, :length], change / change.square().mean(dim=0).sqrt(), rtol=1e-4, atol=1e-5
            )


def test_scale_and_level_of_a_series_do_not_reach_its_normalized_view():
    x = torch.randn(3, MAX_LEN, CHANNELS, dtype=torch.float64)
    torch.testing.assert_close(
        series_views(7 * x - 4, None, ("normalized", "difference")),
        series_views(x, None, ("normalized", "difference")),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_a_constant_series_has_no_views_of_noise():
    x = 5 + 1e-6 * torch.randn(2, MAX_LEN, CHANNELS)
    assert series_views(x, None, ("normalized", "difference")).abs().max() < 0.01


def test_time_absolute_positions_stretch_the_frequencies():
    encoder = SequenceEncoder(CHANNELS, 48, "softmax", positions="time_absolute", **SMALL)
    plain = sinusoidal_positions(48, EMBED_DIM)
    angle = torch.arange(48) * EMBED_DIM / 48
    torch.testing.assert_close(encoder.positions[:, 0], angle.sin())
    assert not torch.allclose(encoder.positions, plain)
    same = SequenceEncoder(CHANNELS, EMBED_DIM, "softmax", positions="time_absolute", **SMALL)
    torch.testing.assert_close(same.positions, sinusoidal_positions(EMBED_DIM, EMBED_DIM))


def test_relative_positions_do_not_know_the_place_in_the_series():
    encoder = SequenceEncoder(CHANNELS, 90, "softmax", positions="convolutional", **SMALL).eval()
    x = torch.zeros(1, 90, CHANNELS)
    x[0, 40:45] = torch.randn(5, CHANNELS)
    with torch.no_grad():
        tokens = encoder.relative_positions(encoder.project(x))
        moved = encoder.relative_positions(encoder.project(x.roll(6, dims=1)))
    torch.testing.assert_close(moved[:, 16:-16], tokens.roll(6, dims=1)[:, 16:-16])
    assert tokens[:, 40:45].std(dim=1).min() > 0


def test_attention_pooling_is_a_weighted_mean():
    model, (x, mask) = build(pooling="attention").eval(), batch()
    encoded = model.encoder(x, mask)
    for b, length in enumerate(LENGTHS):
        tokens = encoded[b, :length]
        weights = model.pooling.score(tokens).softmax(dim=0)
        expected = torch.cat([weights[:, h] @ tokens[:, 8 * h : 8 * h + 8] for h in range(3)])
        torch.testing.assert_close(model.embed(x, mask)[b], expected)


def test_mean_max_pooling_joins_mean_and_maximum():
    model, (x, mask) = build(pooling="mean_max").eval(), batch()
    encoded = model.encoder(x, mask)
    for b, length in enumerate(LENGTHS):
        tokens = encoded[b, :length]
        expected = torch.cat([tokens.mean(dim=0), tokens.amax(dim=0)])
        torch.testing.assert_close(model.embed(x, mask)[b], expected)


# Bad arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "conv"}, "unknown stem 'conv'"),
        ({"stem": "convolution", "stem_layers": 0}, "stem_layers=0 must be a whole number of at least 1"),
        ({"stem": "convolution", "embed_dim": 3}, "embed_dim=3 must be at least 4 for stem='convolution'"),
        ({"patch_len": -1}, "patch_len=-1 must be a whole number of at least 1"),
        ({"views": ()}, "views=() must list one or more of raw, normalized, difference"),
        ({"views": ("raw", "raw")}, "each at most once"),
        ({"views": ("raw", "normalised")}, "unknown view 'normalised'; did you mean 'normalized'?"),
        ({"positions": "relative"}, "unknown positions 'relative'"),
        ({"pooling": "median"}, "unknown pooling 'median'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(InputError, match=re.escape(message)) as error:
        build(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stem": "convolution"}, "stem='convolution'"),
        ({"stem": "rocket"}, "stem='rocket'"),
        ({"patch_len": 2}, "patch_len=2"),
        ({"views": ("normalized",)}, "views=('normalized',)"),
        ({"positions": "convolutional"}, "positions='convolutional'"),
    ],
)
def test_what_reads_later_steps_has_no_causal_form(options, named):
    model = PositionClassifier(CHANNELS, 2, MAX_LEN, is_real=True, is_causal=True, **SMALL | options)
    with pytest.raises(InputError, match=re.escape(f"is_causal=True, but {named} reads later steps")):
        model(torch.randn(2, MAX_LEN, CHANNELS))


@pytest.mark.parametrize("options", [{"stem": "convolution"}, {"patch_len": 2}, {"views": ("difference",)}])
def test_tokens_have_embeddings_instead_of_a_stem(options):
    with pytest.raises(InputError, match="tokens have a table of embeddings"):
        TokenEncoder(9, MAX_LEN, "softmax", **SMALL, **options)
