"""Sequences cut over processes: the numbers of one device, for a number of bytes that no length changes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from core.sharding_worker import run_all
from torch import nn

import kernel_attention as ka
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.tensors.sampling import Samples, part_positions, sample_rows

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting_point").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_give_the_outputs_gradients_and_objective_of_one_device(world, tmp_path):
    """With masks, uneven parts, ranks without a real token; under DistributedDataParallel too; bytes
    counted. Two processes are started once for all that needs two, such as every mechanism under DDP.
    """
    torch.multiprocessing.spawn(run_all, args=(world, str(tmp_path / "meeting_point")), nprocs=world)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 40])
def test_the_parts_rows_together_are_the_sequences(num_rows):
    x = torch.randn(5, 31, 3)
    mask = torch.rand(5, 31) < torch.tensor([0.05, 0.3, 0.5, 0.9, 0.0])[:, None]
    for padding in (None, mask):
        cuts = [0, 1, 12, 13, 31]
        parts = [slice(*cut) for cut in itertools.pairwise(cuts)]
        counts = torch.stack(
            [torch.full((5,), x[:, p].size(1)) if padding is None else mask[:, p].sum(1) for p in parts]
        )
        total = torch.zeros(5, num_rows, 3)
        for index, part in enumerate(parts):
            own = None if padding is None else padding[:, part]
            before = counts[:index].sum(0)
            positions = part_positions(x[:, part], num_rows, own, before, counts.sum(0))
            total += Samples(*positions).read(x[:, part])
        rows = sample_rows(x, num_rows, padding)
        assert torch.equal(total[:, : rows.size(1)], rows)
        assert not total[:, rows.size(1) :].any()


SIZES = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "feedforward_dim": 8}
REFUSED = {
    "softmax": (lambda: ka.SoftmaxAttention(8, 2), "every key"),
    "batch norm of a softmax": (lambda: ka.SupportVectorAttention(8, 2), "softmax needs every key"),
    "pooled": (lambda: ka.SupportVectorAttention(8, 2, kernel="linear", factors=[1, 2]), "factors=1"),
    "random features": (lambda: ka.LinearAttention(8, 2, feature_map="softmax_plus"), "feature map"),
    "frobenius": (lambda: ka.LinearAttention(8, 2, feature_map="frobenius"), "feature map"),
    "rpc": (lambda: ka.create_attention("rpc", 8, 2), "every token"),
    "reference primal": (lambda: ka.PrimalAttention(8, 2, impl="reference"), "impl"),
    "other features": (lambda: ka.PrimalAttention(8, 2, feature_map="elu"), "feature map"),
    "reference multilinear": (lambda: ka.MultilinearAttention(8, 2, impl="reference"), "impl"),
    "delta": (lambda: ka.DeltaAttention(8, 2), "token after token"),
    "fading ridge": (lambda: ka.RidgeAttention(8, 2, forgetting=0.95), "fade on the way"),
    "torch's own": (lambda: nn.MultiheadAttention(8, 2), "whole sequence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_need_the_whole_sequence_are_refused_by_name(name, alone):
    build, reason = REFUSED[name]
    fine, refused = ka.PrimalAttention(8, 2), build()
    with pytest.raises(ka.InputError, match=rf"1 \({type(refused).__name__}\).*{reason}"):
        ka.shard_sequence(nn.Sequential(fine, refused))
    assert fine.sequence_group is None  # nothing is changed where something is refused
    assert fine.supports(sharding=True)
    assert isinstance(refused, nn.MultiheadAttention) or not refused.supports(sharding=True)


MODELS = {
    "pooling": (lambda: ka.models.SequenceClassifier(3, 2, 16, **SIZES), "pooling='flatten' reads all"),
    "patches": (lambda: ka.models.SequenceEncoder(3, 16, patch_len=2, **SIZES), "patch_len=2 reads"),
    "stem": (
        lambda: ka.models.SequenceEncoder(3, 16, stem="convolution", **SIZES),
        "stem='convolution' reads",
    ),
    "experts": (lambda: ka.models.SequenceEncoder(3, 16, experts=3, **SIZES), "experts reads tokens"),
    "a grid": (
        lambda: ka.models.EncoderLayer(ka.LinearAttention(8, 2), 8, short_convolution=3, grid_size=(4, 4)),
        "short_convolution.*are a grid",
    ),
    "language": (lambda: ka.models.CausalLanguageModel(11, 16, "linear", **SIZES), "of the first part"),
    "images": (lambda: ka.models.VisionTransformer(8, 4, 2, "linear", **SIZES), "of the first part"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_read_more_than_a_token_elsewhere_are_refused(name, alone):
    build, reason = MODELS[name]
    with pytest.raises(ka.InputError, match=reason):
        ka.shard_sequence(build())


@pytest.mark.parametrize("form", ["mean", "sum"])
def test_averaged_over_one_process_an_objective_is_itself(form, alone):
    """The value and the gradient; a batch that does not count adds nothing; J per sequence stays."""
    torch.manual_seed(0)
    layer = ka.PrimalAttention(8, 2, rank=3, eta=0.3, objective_form=form).train()
    x, mask = torch.randn(3, 11, 8), torch.rand(3, 11) < 0.7
    found = {}
    for averaged in (False, True):
        layer.zero_grad()
        layer(x, attention_mask=mask)
        if averaged:
            ka.average_objectives(layer, 3, SequenceGroup())
        loss = ka.auxiliary_loss(layer)
        loss.backward()
        found[averaged] = loss.detach(), layer.w_e.grad, torch.as_tensor(layer.last_objective.unit)
    torch.testing.assert_close(found[True], found[False])
    layer(x)
    ka.average_objectives(layer, 0, SequenceGroup())
    assert layer.objective == 0.0
    each = ka.PrimalAttention(8, 2, rank=3, eta=0.3, square_per="sequence").train()
    each(x)
    before = each.objective
    ka.average_objectives(each, 3, SequenceGroup())
    assert each.objective is before


def test_one_part_is_the_whole_sequence(alone):
    """Positions and pooling over a group of one; a sequence beyond max_len is refused by its whole length."""
    torch.manual_seed(0)
    model = ka.models.SequenceClassifier(3, 2, 16, pooling="mean", **SIZES).eval()
    x, mask = torch.randn(2, 13, 3), torch.rand(2, 13) < 0.7
    expected = model(x, mask), model(x)
    ka.shard_sequence(model)
    torch.testing.assert_close((model(x, mask), model(x)), expected)
    with pytest.raises(ka.InputError, match="sequence length 17 exceeds max_len=16"):
        model(torch.randn(2, 17, 3))


def test_a_model_without_our_layers_and_a_missing_group_are_refused(alone):
    with pytest.raises(ka.InputError, match="no attention layer"):
        ka.shard_sequence(nn.Linear(2, 2))
    dist.destroy_process_group()
    with pytest.raises(ka.InputError, match="no process group"):
        ka.shard_sequence(ka.PrimalAttention(8, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("build", "call"),
    [
        (lambda: ka.PrimalAttention(8, 2, max_len=11), {"is_causal": True}),
        (lambda: ka.MultilinearAttention(8, 2, variant="data_dependent", max_len=11), {"is_causal": True}),
        (lambda: ka.LinearAttention(8, 2), {"context": torch.randn(1, 5, 8)}),
    ],
)
def test_calls_without_a_sharded_form_are_refused(build, call, alone):
    layer = ka.shard_sequence(build())
    with pytest.raises(ka.InputError, match="over a sharded sequence"):
        layer(torch.randn(1, 11, 8), **call)
    layer.sequence_group = None
    assert layer(torch.randn(1, 11, 8), **call).shape == (1, 11, 8)


@pytest.mark.slow
def test_lightnings_data_parallelism_trains_a_sharded_layer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "trainer"))  # where `make test-slow` puts it
    pytest.importorskip("lightning")
    from core import sharding_lightning_worker as worker

    worker.fit(tmp_path, num_processes=2)
    expected = worker.trained_alone()
    found = torch.load(tmp_path / "trained.pt")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, start in worker.build().state_dict().items():
        assert (found[name] - start).norm() > 1e-3 * start.norm(), name


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_a_long_sequence_trains_in_little_memory_and_on_four_ranks():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / "long_sequence.py", "--length", "65536", "--steps", "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    one, four = (line.split("s a step") for line in done.stdout.splitlines())
    assert float(one[1].split()[0]) < 1.0, done.stdout
    assert "30,744 bytes" in four[1], done.stdout
