"""Baselines are what they are called; contenders are found by name; what is not there is reported."""

from __future__ import annotations

import warnings

import pytest
import torch

import kernel_attention as ka
from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import SUITES, Setting, contender_names, find_contender, run_benchmark
from kernel_attention_lab.benchmarking.baselines import (
    EagerScaledHeads,
    ReleasedPrimal,
    SoftmaxLayer,
    TorchMultihead,
)
from kernel_attention_lab.benchmarking.contenders import PEERS
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.plans import check_plan

D, HEADS, N, B = 14, 2, 12, 3


def tokens():
    return torch.randn(B, N, D, dtype=torch.float64)


def same_weights(layer, other):
    other.load_state_dict(layer.state_dict())
    return layer.double(), other.double()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_softmax_baselines_are_softmax_attention(form, is_causal):
    ours, baseline = same_weights(
        ka.create_attention("softmax", D, HEADS), SoftmaxLayer(D, HEADS, form, is_causal)
    )
    x = tokens()
    torch.testing.assert_close(baseline(x), ours(x, is_causal=is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_multihead_baseline_is_softmax_attention(is_causal):
    plain, multihead = (
        SoftmaxLayer(D, HEADS, "eager", is_causal).double(),
        TorchMultihead(D, HEADS, is_causal),
    )
    projections = (plain.q_proj, plain.k_proj, plain.v_proj)
    multihead.double().layer.load_state_dict(
        {
            "in_proj_weight": torch.cat([part.weight for part in projections]),
            "in_proj_bias": torch.cat([part.bias for part in projections]),
            "out_proj.weight": plain.out_proj.weight,
            "out_proj.bias": plain.out_proj.bias,
        }
    )
    x = tokens()
    torch.testing.assert_close(multihead(x), plain(x))


@pytest.mark.parametrize(("mechanism", "beta"), [("scaled_heads", 0.0), ("batch_norm_scaled_heads", 1.0)])
def test_eager_scaled_heads_are_ours_in_memory(mechanism, beta):
    ours = ka.create_attention(mechanism, D, HEADS, factors=[1, 3])
    ours, baseline = same_weights(ours, EagerScaledHeads(D, HEADS, [1, 3], beta))
    x = tokens()
    torch.testing.assert_close(baseline(x), ours(x))


@pytest.mark.parametrize("rank", [3, 11])
def test_the_released_structure_computes_the_same_layer(rank):
    """Rank 3 samples rows (2 per direction), rank 11 takes fewer rows than its weights have."""
    ours = ka.PrimalAttention(
        D, HEADS, rank=rank, eta=0.3, rank_multiplier=2, square_per="sequence", impl="reference"
    )
    baseline = ReleasedPrimal(D, HEADS, rank=rank, eta=0.3, rank_multiplier=2)
    ours, baseline = same_weights(ours, baseline)
    x = tokens()
    torch.testing.assert_close(baseline(x), ours(x))
    torch.testing.assert_close(penalty(baseline), penalty(ours))
    assert penalty(baseline) > 0


@pytest.mark.parametrize("name", contender_names())
def test_every_contender_maps_tokens_to_tokens(name, tiny):
    contender = find_contender(name)
    if contender.absence(tiny):
        pytest.skip(contender.absence(tiny))
    x = torch.randn(2, 8, 8)
    with warnings.catch_warnings():
        if name in {peer.name for peer in PEERS}:  # they want whole buckets, and use what their own day had
            tiny, x = Setting(length=128, embed_dim=8, num_heads=2, batch_size=2), torch.randn(2, 128, 8)
            warnings.simplefilter("ignore")
        assert contender.make(tiny)(x).shape == x.shape


def test_causal_contenders_see_no_future():
    setting = Setting(length=8, embed_dim=8, batch_size=1, is_causal=True)
    x = torch.randn(1, 8, 8)
    changed = torch.cat([x[:, :5], torch.randn(1, 3, 8)], dim=1)
    for name in ("sdpa", "eager", "nn.MultiheadAttention", "linear", "primal"):
        layer = find_contender(name).make(setting).eval()
        torch.testing.assert_close(layer(x)[:, :5], layer(changed)[:, :5])
        assert not torch.equal(layer(x)[:, 5:], layer(changed)[:, 5:])


def test_options_reach_the_layer_and_its_name(tiny):
    contender = find_contender({"primal": {"rank": 3, "eta": 0.5}})
    assert contender.name == "primal (rank 3, eta 0.5)"
    assert contender.make(tiny).rank == 3
    assert contender.reference(tiny).impl == "reference"


def test_a_list_is_an_encoder_of_its_layers(tiny):
    spec = ["sdpa", {"primal": {"rank": 3, "eta": 0.5}}]
    contender = find_contender(spec)
    assert contender.name == "sdpa + primal (rank 3, eta 0.5)"
    assert find_contender(["linear", "linear"]).name == "2 x linear"
    encoder = contender.make(tiny).eval()
    x = torch.randn(2, 8, 8)
    y = x
    for layer in encoder.layers:
        y = layer(y)
    torch.testing.assert_close(encoder(x), y)
    encoder.train()(x)
    torch.testing.assert_close(penalty(encoder), encoder.layers[1].attention.penalty())
    assert [layer.attention.impl for layer in contender.reference(tiny).layers[1:]] == ["reference"]
    causal = find_contender(["linear", "linformer"])
    assert causal.absence(Setting(is_causal=True)) in ("linformer is not installed", "has no causal form")


def test_an_absent_contender_is_reported(tiny_plan, enter):
    enter("nobody's", lambda setting: None, package="no_such_package_anywhere")
    enter("elsewhere", lambda setting: None, device="cuda")
    enter("one way", lambda setting: None, bidirectional=False)
    plan = tiny_plan.__class__(
        **{**vars(tiny_plan), "contenders": ("sdpa", "nobody's", "elsewhere", "one way")}
    )
    record = run_benchmark(plan)
    assert {entry["contender"]: entry["reason"] for entry in record["absent"]} == {
        "nobody's": "no_such_package_anywhere is not installed",
        "elsewhere": "runs on cuda only",
        "one way": "has a causal form only",
    }
    assert [row["contender"] for row in record["cells"][0]["rows"]] == ["sdpa"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("sdpaa", r"unknown contender 'sdpaa'; did you mean 'sdpa'"),
        ({"primal": {"ranks": 3}}, r"option of contender 'primal' 'ranks'; did you mean 'rank'"),
        ({"primal": {"rank": 0}}, r"rank=0"),
        ({"sdpa": {"rank": 3}}, r"unknown option of contender 'sdpa' 'rank' \(accepted: none\)"),
        ({"primal": 3}, r"contender=\{'primal': 3\} must be a name or \{name: options\}"),
        ([], r"contender \[\]: an encoder has one layer or more"),
        (["sdpa", "sdpaa"], r"unknown contender 'sdpaa'"),
        (("sdpa", {}), r"must be a name or \{name: options\}"),
        ({"primal": {}, "linear": {}}, r"must be a name or \{name: options\}"),
    ],
)
def test_contenders_that_do_not_exist(spec, said):
    with pytest.raises(InputError, match=said):
        find_contender(spec)


@pytest.mark.parametrize("name", sorted(SUITES))
def test_suites_name_contenders_and_sizes_that_exist(name):
    plan = SUITES[name]
    names = [find_contender(spec).name for spec in plan.contenders]
    assert len(set(names)) == len(names)
    assert plan.baseline in {*names, ""}
    if plan.grid.get("device") == ("cuda",) and not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            check_plan(plan)
    else:
        check_plan(plan)
