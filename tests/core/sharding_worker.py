"""What runs in the processes of the sharding tests; a module of its own, which they import by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from contracts.workers import train_one_step
from core.collector_worker import check_collected
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kernel_attention as ka
from kernel_attention.models import EncoderLayer

BATCH, HEADS, HEAD_DIM = 3, 2, 5
EMBED_DIM = HEADS * HEAD_DIM
LENGTH = 23
# Where the parts end, by the number of ranks; one rank has a single token.
CUTS = {1: [LENGTH], 2: [8, LENGTH], 4: [8, 9, 14, LENGTH]}
PRIMAL = {"rank": 4, "rank_multiplier": 2, "eta": 0.3}
MULTILINEAR = {"rank": 3, "eta": 0.3}


def convolved(embed_dim: int, num_heads: int, taps: int) -> EncoderLayer:
    """An encoder layer whose short convolution is not the identity, as it is at first."""
    attention = ka.LinearAttention(embed_dim, num_heads)
    layer = EncoderLayer(attention, 2 * embed_dim, dropout=0.0, short_convolution=taps)
    nn.init.normal_(layer.short_convolution.weight)
    return layer


LAYERS = {
    "primal": (ka.PrimalAttention, PRIMAL),
    "primal, sum": (ka.PrimalAttention, PRIMAL | {"objective_form": "sum"}),
    "primal, per sequence": (ka.PrimalAttention, PRIMAL | {"square_per": "sequence"}),
    "primal, no objective": (ka.PrimalAttention, PRIMAL | {"eta": 0.0, "bias": False}),
    "primal, identity": (ka.PrimalAttention, PRIMAL | {"feature_map": "identity"}),
    "primal, rows for a longer sequence": (ka.PrimalAttention, PRIMAL | {"rank": 19}),
    "primal, data-independent": (ka.PrimalAttention, PRIMAL | {"data_dependent": False}),
    "primal, no running means": (
        ka.PrimalAttention, PRIMAL | {"data_dependent": False, "running_means": False}
    ),
    "multilinear": (ka.MultilinearAttention, MULTILINEAR),
    "multilinear, mean": (ka.MultilinearAttention, MULTILINEAR | {"objective_form": "mean"}),
    "multilinear, diagonal": (ka.MultilinearAttention, MULTILINEAR | {"variant": "learnable_diagonal"}),
    "multilinear, data-dependent": (
        ka.MultilinearAttention, MULTILINEAR | {"variant": "data_dependent", "rank_multiplier": 2}
    ),
    "multilinear, identity": (
        ka.MultilinearAttention, MULTILINEAR | {"feature_map": "identity", "objective_form": "mean"}
    ),
    "multilinear, core": (ka.MultilinearAttention, MULTILINEAR | {"core": "cost", "eta_core": 0.2}),
    "multilinear, no objective": (ka.MultilinearAttention, MULTILINEAR | {"eta": 0.0, "bias": False}),
    "linear": (ka.LinearAttention, {}),
    "linear, taylor": (ka.LinearAttention, {"feature_map": "taylor"}),
    "ridge": (ka.RidgeAttention, {}),
    "ridge, elu": (ka.RidgeAttention, {"feature_map": "elu", "lam": 0.1}),
    "values": (ka.PrimalValueAttention, {"rank": 3}),
    "values, keys": (ka.PrimalValueAttention, {"rank": 3, "normalize": "keys"}),
    "values, rows": (ka.PrimalValueAttention, {"rank": 3, "feature_map": "elu", "normalize": "rows"}),
    "batch norm": (
        ka.SupportVectorAttention, {"kernel": "linear", "beta": 0.7, "learn_beta": True, "factors": 1}
    ),
    "batch norm, scaled": (
        ka.SupportVectorAttention,
        {"kernel": "linear", "beta": 0.7, "learn_beta": True, "normalize": True, "factors": 1},
    ),
    "4 taps": (convolved, {"taps": 4}),
    "13 taps, longer than a part": (convolved, {"taps": 13}),
}  # fmt: skip
CAUSAL = (
    "primal, data-independent", "primal, no running means", "linear", "values", "ridge",
    "values, keys", "values, rows", "multilinear", "multilinear, mean", "multilinear, diagonal",
    "multilinear, identity", "multilinear, core", "multilinear, no objective",
    "4 taps", "13 taps, longer than a part",
)  # fmt: skip


def masks() -> dict[str, Tensor | None]:
    """None; holes; and one where the first sequence has no real token on the first rank, nor the second
    any on the last.
    """
    holes = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7
    empty = holes.clone()
    empty[0, : CUTS[4][0]] = False
    empty[:, CUTS[4][0] : CUTS[4][2]] = False  # with four ranks, the second and third see padding alone
    empty[1, CUTS[4][2] :] = False
    empty[1, 0] = True
    return {"none": None, "holes": holes, "empty": empty}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    kind, options = LAYERS[name]
    return kind(EMBED_DIM, HEADS, **options).to(dtype).train()


@contextmanager
def traffic() -> Iterator[list[tuple[str, int]]]:
    """Every collective called inside, with the bytes that this rank puts in."""
    sent: list[tuple[str, int]] = []
    original = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def all_reduce(x: Tensor, **options) -> None:
        sent.append(("all_reduce", x.nbytes))
        original["all_reduce"](x, **options)

    def all_gather(parts: list[Tensor], x: Tensor, **options) -> None:
        sent.append(("all_gather", x.nbytes))
        original["all_gather"](parts, x, **options)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        yield sent
    finally:
        dist.all_reduce, dist.all_gather = original["all_reduce"], original["all_gather"]


def train(
    model: nn.Module, layer: nn.Module, x: Tensor, mask: Tensor | None, target: Tensor, weight: float,
    *, is_causal: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """One step of the loss ``weight`` * sum of squares over the real tokens + the objective."""
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = model(x, attention_mask=mask, is_causal=is_causal)
    objective = ka.auxiliary_loss(layer)
    (weight * (y - target)[real].square().sum() + objective).backward()
    return {"y": y.detach().masked_fill(~real[..., None], 0.0), "x": x.grad, "objective": objective.detach()}


def check(name: str, mask: Tensor | None, dtype: torch.dtype, is_causal: bool, parallel: bool) -> None:
    """One step over the ranks gives one device's outputs, objective and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, BATCH, LENGTH, EMBED_DIM, generator=generator, dtype=dtype)
    num_real = BATCH * LENGTH if mask is None else int(mask.sum())
    alone = build(name, dtype)
    expected = train(alone, alone, x, mask, target, 1 / num_real, is_causal=is_causal)

    layer = ka.shard_sequence(build(name, dtype))
    model = DistributedDataParallel(layer) if parallel else layer
    part = slice(([0] + CUTS[world])[rank], CUTS[world][rank])
    found = train(
        model, layer, x[:, part], None if mask is None else mask[:, part], target[:, part], world / num_real,
        is_causal=is_causal,
    )  # fmt: skip
    expected = {key: value if value.dim() == 0 else value[:, part] for key, value in expected.items()}
    found["x"] /= world
    for key, parameter in layer.named_parameters():
        if not parallel:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        found[key], expected[key] = parameter.grad, alone.get_parameter(key).grad
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, rtol=tolerance, atol=tolerance,
            msg=lambda text, key=key: f"{name}, {dtype}, causal {is_causal}: {key}: {text}",
        )  # fmt: skip


def check_traffic(name: str, is_causal: bool) -> None:
    """As many bytes for four times the tokens, all of them in float32 sums and counts."""
    counted = []
    for length in (16, 64):
        layer = ka.shard_sequence(build(name, torch.float32))
        x = torch.randn(BATCH, length, EMBED_DIM, requires_grad=True)
        with traffic() as sent:
            (layer(x, is_causal=is_causal).square().mean() + ka.auxiliary_loss(layer)).backward()
        counted.append(sent)
    assert counted[0] == counted[1], (name, counted)
    assert counted[0], name
    if (
        name == "primal"
    ):  # forward and backward: sums (B, h, 2, p, s) and of the energy (B,), counts (B,) int64 twice
        small, count = 4 * BATCH * HEADS * 2 * HEAD_DIM * 4, 8 * BATCH
        assert sorted(size for _, size in counted[0]) == sorted(
            [*[small] * 2, *[4 * BATCH] * 2, *[count] * 2]
        )


def check_second_derivatives(name: str) -> None:
    """The gradient of a gradient's norm, over the ranks and on one device."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(BATCH, LENGTH, EMBED_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    part = slice(([0] + CUTS[world])[rank], CUTS[world][rank])
    found = {}
    for sharded in (False, True):
        layer = build(name, torch.float64)
        tokens = (x[:, part] if sharded else x).clone().requires_grad_()
        y = (ka.shard_sequence(layer) if sharded else layer)(tokens)
        (slope,) = torch.autograd.grad(y.square().sum(), tokens, create_graph=True)
        own = slope if sharded else slope[:, part]
        slope.square().sum().backward()
        if sharded:
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        grad = tokens.grad if sharded else tokens.grad[:, part]
        found[sharded] = {"first": own.detach(), "second": grad} | {
            key: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for key, parameter in layer.named_parameters()
        }
    torch.testing.assert_close(found[True], found[False], rtol=1e-9, atol=1e-9)


def check_offset() -> None:
    """Tokens far from the origin, which the projections take away: the squares are those of centred parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = slice(([0] + CUTS[world])[rank], CUTS[world][rank])
    x = torch.randn(BATCH, LENGTH, EMBED_DIM, generator=torch.Generator().manual_seed(1)) + 1e4
    layers = []
    for dtype in (torch.float64, torch.float32):
        layer = build("multilinear", torch.float32)
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj, layer.f_proj):
                projection.weight -= projection.weight.mean(dim=1, keepdim=True)
        layers.append(layer.to(dtype).eval())
    exact = layers[0](x.double())[:, part]
    found = ka.shard_sequence(layers[1])(x[:, part])
    # Measured with the norms from uncentred tokens: 0.5.
    assert (found - exact).norm() < 1e-2 * exact.norm()


def check_layer_without_coupling() -> None:
    """A data-independent layer without an objective mixes no tokens, so its ranks say nothing."""
    layer = ka.shard_sequence(ka.PrimalAttention(EMBED_DIM, HEADS, data_dependent=False, eta=0.0))
    with traffic() as sent:
        layer(torch.randn(BATCH, 7, EMBED_DIM)).sum().backward()
    assert not sent


def check_copies() -> None:
    """A copy stays sharded; a pickle is whole, and so is a state dict."""
    layer = ka.shard_sequence(build("primal", torch.float32))
    assert copy.deepcopy(layer).sequence_group is layer.sequence_group
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False).sequence_group is None
    assert pickle.loads(pickle.dumps(layer)).sequence_group is None
    assert layer.state_dict().keys() == build("primal", torch.float32).state_dict().keys()


def run_all(rank: int, world: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group("gloo", init_method=Path(meeting_point).as_uri(), rank=rank, world_size=world)
    try:
        for name in LAYERS:
            for is_causal in [False, True] if name in CAUSAL else [False]:
                for mask in ("none", "empty") if world == 2 and "," not in name else ("empty",):
                    check(name, masks()[mask], torch.float64, is_causal, parallel=False)
                if "," not in name:  # of every class
                    check(name, masks()["holes"], torch.float32, is_causal, parallel=True)
                    check_traffic(name, is_causal)
        for name in ("primal", "primal, data-independent", "multilinear", "multilinear, data-dependent"):
            check_second_derivatives(name)
        check_offset()
        check_layer_without_coupling()
        check_copies()
        if world == 2:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of a view that nobody writes to
                check_collected(rank, world)
            train_one_step(rank)
    finally:
        dist.destroy_process_group()
