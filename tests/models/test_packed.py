"""Models give each of several sequences, end to end in one row, what they give it alone."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from kernel_attention import InputError, collect_objectives
from kernel_attention.models import (
    CausalLanguageModel,
    EncoderLayer,
    PositionClassifier,
    SequenceClassifier,
    SequenceEncoder,
    ShortConvolution,
    TokenClassifier,
    TokenPairClassifier,
)
from kernel_attention.models.encoder_layer import StochasticDepth, create_attentions

LENGTHS, C = (7, 1, 5), 3
N = sum(LENGTHS)
ENDS = torch.tensor((0, *LENGTHS)).cumsum(dim=0)
SMALL = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "feedforward_dim": 8, "dropout": 0.0}


def series() -> torch.Tensor:
    return torch.randn(1, N, C, dtype=torch.float64)


def tokens() -> torch.Tensor:
    return torch.randint(0, 11, (1, N))


def moved(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64, in training, with no parameter at its initial value."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def assert_packed_is_alone(model, x, *, join=lambda parts: torch.cat(parts, dim=1), **call) -> None:
    parts = x.split(LENGTHS, dim=1)
    weights = torch.tensor(LENGTHS) / N
    with collect_objectives() as objectives:
        y = model(x, cu_seqlens=ENDS, **call)
    alone, each = [], []
    for part in parts:
        with collect_objectives() as found:
            alone.append(model(part, **call))
        each.append([each_call.objective.value for each_call in found.calls])
    assert_close(y, join(alone))
    for place, packed in enumerate(objectives.calls):
        values = torch.stack([values[place] for values in each])
        assert_close(packed.objective.value, (values * weights).sum())


@pytest.mark.parametrize(
    "options",
    [
        {"attention": {"primal": {"rank": 2, "rank_multiplier": 2, "eta": 0.1}}, "short_convolution": 3},
        {"attention": "linear", "positions": "fixed", "norm_first": True},
        {"attention": ["softmax", "batch_norm"], "positions": "time_absolute"},
        {"attention": "rpc", "positions": "convolutional"},
        {"attention": "ridge", "patch_len": 2, "views": ("raw", "difference")},
        {"attention": "delta", "positions": "none"},
    ],
    ids=lambda options: str(options["attention"])[:20],
)
def test_an_encoder_of_series(options):
    model = moved(SequenceEncoder(C, 9, **SMALL, **options))
    assert_packed_is_alone(model, series())


def test_a_causal_encoder_with_a_short_convolution():
    assert_packed_is_alone(
        moved(SequenceEncoder(C, 9, "gated_delta", short_convolution=3, **SMALL)), series(), is_causal=True
    )


@pytest.mark.parametrize("pooling", ["flatten", "mean", "mean_max", "attention"])
def test_a_classifier_of_series_has_a_row_of_outputs_for_each(pooling):
    model = moved(SequenceClassifier(C, 4, 9, "linear", pooling=pooling, patch_len=2, **SMALL))
    assert_packed_is_alone(model, series(), join=torch.cat)


def test_a_classifier_with_a_readout():
    model = SequenceClassifier(
        C, 4, 9, "linear", pooling="mean", stem="rocket", readout=True, **SMALL
    ).double()
    model.eval().set_readout(torch.randn_like(model.readout_weight), torch.randn_like(model.readout_bias))
    assert_packed_is_alone(model, series(), join=torch.cat)


@pytest.mark.parametrize("is_causal", [False, True])
def test_models_of_tokens(is_causal):
    classifier = moved(TokenClassifier(11, 4, 9, "softmax", is_causal=is_causal, **SMALL))
    assert_packed_is_alone(classifier, tokens(), join=torch.cat)
    assert_packed_is_alone(
        moved(PositionClassifier(11, 4, 9, "primal_values", is_causal=is_causal, **SMALL)), tokens()
    )


def test_pairs_of_texts_are_refused():
    with pytest.raises(InputError, match="cu_seqlens was given, but pairs are not packed"):
        TokenPairClassifier(11, 4, 9, "linear", **SMALL)(tokens()[:, None].expand(1, 2, -1), cu_seqlens=ENDS)


def test_a_language_model_and_its_loss():
    model, x = (
        moved(CausalLanguageModel(11, 9, ["linear", "softmax"], short_convolution=2, **SMALL)),
        tokens(),
    )
    assert_packed_is_alone(model, x)
    targets = torch.randint(0, 11, (1, N))
    alone = [model.loss(*parts) for parts in zip(x.split(LENGTHS, 1), targets.split(LENGTHS, 1), strict=True)]
    together = model.loss(x, targets, cu_seqlens=ENDS, max_seqlen=8)
    assert_close(together, (torch.stack(alone) * torch.tensor(LENGTHS) / N).sum())
    with pytest.raises(InputError, match="sequence length 13 exceeds max_len=9"):
        model(x, cu_seqlens=torch.tensor([0, N]))
    with pytest.raises(InputError, match="CausalLanguageModel: attention_mask cannot be combined"):
        model(x, torch.ones(1, N, dtype=torch.bool), cu_seqlens=ENDS)


def test_an_encoder_layer_weighs_channels_and_drops_paths_by_sequence():
    (attention,) = create_attentions("softmax", 1, 16, 2, {})
    layer = moved(EncoderLayer(attention, 8, 0.0, channel_attention=True))
    assert_packed_is_alone(layer, torch.randn(1, N, 16, dtype=torch.float64))
    packed = SequenceEncoder(C, 9, "softmax", **SMALL).packed(torch.zeros(1, N, C), ENDS, None)
    drop = StochasticDepth(0.5)
    found = torch.stack([drop(torch.ones(1, N, 16), packed)[0] for _ in range(20)])
    for part in found.split(LENGTHS, dim=1):
        assert (part == part[:, :1, :1]).all()
    assert (found[:, 0] != found[:, -1]).any()


def test_a_short_convolution_does_not_look_across_a_boundary():
    module = moved(ShortConvolution(16, 4))
    x = torch.randn(1, N, 16, dtype=torch.float64)
    for is_causal in (False, True):
        assert_packed_is_alone(module, x, is_causal=is_causal)
    with pytest.raises(
        InputError, match="short_convolution: cu_seqlens was given, but its tokens are a grid"
    ):
        ShortConvolution(16, 2, (2, 6), 1)(x.float(), cu_seqlens=ENDS)
