"""The plans whose figures are in docs/performance.md, and plans from the options of a command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernel_attention.errors import unknown
from kernel_attention.mechanisms import list_attention
from kernel_attention.specs import Spec
from kernel_attention_lab.benchmarking.comparisons import ROW_SUITES
from kernel_attention_lab.benchmarking.contenders import PEERS
from kernel_attention_lab.benchmarking.plans import ContenderSpec, Plan

_PRIMAL = {"primal": {"rank": 30, "eta": 0.1}}  # rank_multiplier 10 is the default
_NATIVE = {"primal": {"rank": 30, "eta": 0.1, "impl": "native"}}
_TWICE: tuple[list[Spec], ...] = tuple([peer.name] * 2 for peer in PEERS)
# Primal-Attention's released timing command on ListOps and Image; on Text its eta is 0.01. Every eta above 0
# takes the same time. The recipes lra/... have the values of the released training commands.
_RELEASED = {"primal": {"rank": 20, "eta": 0.05}}
_SQUARE_ROOT = {"stride": 64}  # of 4,096 tokens
_CAUSAL_PEERS = tuple(peer.name for peer in PEERS if peer.causal)
# Mechanisms that are quadratic with weights in memory, cubic, or need a token grid.
_LEFT_OUT = {"dual_multilinear", "tensor", "conv2d", "softmax"}
_IN_IMAGES = tuple(
    row.name for row in list_attention() if row.name not in {"softmax", "dual_multilinear", "tensor"}
)
_TORCHS = "nn.TransformerEncoderLayer"
_IN_MODELS = ("softmax", "linear", "cosine", "sparse", "primal", "primal_values", "multilinear")
_OF_RPC, _OF_PRIMAL = ("reference", "triton"), ("fused", "reference")  # engines
_DEIT_TINY = {"body": ("vit",), "threads": (2,), "batch_size": (8,), "embed_dim": (192,), "num_heads": (3,)}
_RPC_FIRST: tuple[list[Spec], ...] = tuple(
    [{"rpc": {"iterations": n, "lam": 4.0}}, *["symmetric"] * 11] for n in range(1, 7)
)

SUITES: dict[str, Plan] = {
    "all": Plan(
        title="Every mechanism with its default options",
        shows="the length from which each is faster",
        contenders=(
            "sdpa",
            "eager",
            "nn.MultiheadAttention",
            *(row.name for row in list_attention() if row.name not in _LEFT_OUT),
        ),
        grid={"length": (256, 1024, 2048)},
        rounds=7,
        memory=False,
    ),
    "short": Plan(
        title="Layers with a softmax kernel on short sequences",
        shows="a step and inference within 1.05 times SDPA's, where the products are those of softmax",
        contenders=(
            "sdpa", "nn.MultiheadAttention", "softmax", "symmetric", "batch_norm", "scaled_heads",
            "batch_norm_scaled_heads", "conv1d", "scaled",
        ),
        grid={"threads": (1,), "num_heads": (4, 8), "batch_size": (16,), "length": (29, 64, 197, 256)},
        rounds=31,
        memory=False,
        flops=False,
    ),
    "primal": Plan(
        title="A training step of Primal-Attention with its objective",
        shows="in C++ at N 4096 at least 25 times faster than SDPA and 1.4 times faster than the linear-time "
        "peers, by default at least 16 times and faster; peak under 0.85 of SDPA's; at N 16384 at least 80 "
        "and 50 times faster; at least 2 times faster than the released structure at half its memory",
        contenders=(
            "sdpa",
            _NATIVE,
            _PRIMAL,
            {"primal": {"rank": 30, "eta": 0.1, "impl": "reference"}},
            {"primal": {"rank": 20}},
            {"primal": {"rank": 20, "impl": "native"}},
            "released primal (structure)", "linear", *(peer.name for peer in PEERS),
        ),
        grid={"threads": (2,), "length": (4096, 16384)},
        rounds=31,
        rounds_at={16384: 5},
    ),
    "multilinear": Plan(
        title="Multilinear attention next to primal and SDPA",
        shows="standard and learnable diagonal within 1.6 times primal's time; faster than SDPA from N 256",
        contenders=(
            "sdpa", _PRIMAL, {"primal": {"rank": 20}}, "multilinear",
            {"multilinear": {"variant": "learnable_diagonal"}},
            {"multilinear": {"eta": 0.1}},
            {"multilinear": {"variant": "learnable_diagonal", "eta": 0.1}},
        ),
        grid={"threads": (2,), "length": (256, 1024, 4096)},
    ),
    "multilinear-thesis": Plan(
        title="Multilinear attention at the sizes of the KMLSVD thesis",
        shows="the thesis's own layer took about twice canonical attention's time",
        contenders=(
            "sdpa",
            {"multilinear": {"rank": 5, "eta": 0.1}},
            {"multilinear": {"rank": 5, "eta": 0.1, "variant": "learnable_diagonal"}},
            {"multilinear": {"rank": 3, "eta": 0.1, "variant": "learnable"}},
            {"multilinear": {"rank": 3, "eta": 0.1, "variant": "learnable", "core": "mlsvd"}},
            {"multilinear": {"rank": 5, "eta": 0.1, "variant": "data_dependent"}},
        ),
        grid={
            "embed_dim": (20,), "num_heads": (4,), "batch_size": (16,), "length": (29, 144, 300, 405, 1152)
        },
        passes=("step",),
        rounds=30,
        memory=False,
    ),
    "support-vector": Plan(
        title="The support-vector family next to SDPA and softmax with weights in memory",
        shows="batch_norm within 1.08 of SDPA, scaled_heads at most 0.8 of it",
        contenders=(
            "sdpa", "eager", "batch_norm",
            {"scaled_heads": {"factors": [1, 2]}}, {"batch_norm_scaled_heads": {"factors": [1, 2]}},
        ),
        grid={"threads": (2,), "length": (4096,)},
        rounds=9,
    ),
    "primal-dual": Plan(
        title="Figures 1 to 4 of the primal-dual paper: SH and BN+SH over softmax and over sparse attention",
        shows="at d 64, N 4096 against eager: operations -24.6 %, memory in training -32 %, in inference "
        "-47 %",
        baseline="eager",
        contenders=(
            "eager", "eager scaled_heads", "eager batch_norm_scaled_heads", "sdpa",
            {"scaled_heads": {"factors": [1, 2]}}, {"batch_norm_scaled_heads": {"factors": [1, 2]}},
            {"sparse": _SQUARE_ROOT},
            {"scaled_heads": {"kernel": {"sparse": _SQUARE_ROOT}, "factors": [1, 2]}},
            {"batch_norm_scaled_heads": {"kernel": {"sparse": _SQUARE_ROOT}, "factors": [1, 2]}},
        ),
        grid={
            "threads": (2,), "batch_size": (1,), "embed_dim": (64, 128, 256),
            "length": (512, 1024, 2048, 4096),
        },
        rounds=3,
    ),
    "rpc": Plan(
        title="RPC-Attention over the number of iterations",
        shows="n iterations within 1.05 n times symmetric attention, for n up to 6 in 1.5 times its peak",
        baseline="symmetric",
        contenders=(
            "symmetric", "sdpa", *({"rpc": {"iterations": n}} for n in range(2, 7)),
            *({"rpc": {"iterations": n, "impl": "reference"}} for n in (2, 4, 6)),
        ),
        grid={"threads": (1, 2), "length": (1024,)},
    ),
    "vision": Plan(
        title="Vision transformers of DeiT-tiny's sizes with one mechanism in all layers, beside timm's",
        shows="images a second; with softmax at least as fast as timm's",
        baseline="timm",
        contenders=(
            "timm", "softmax", *_IN_IMAGES, {"scaled": {"scaling": "matrix"}},
            ["softmax"] * 11 + [{"primal": {"rank": 96, "eta": 0.05}}],
        ),
        grid={**_DEIT_TINY, "length": (64, 197)},
        rounds=7,
        memory=False,
    ),
    "timm": Plan(
        title="DeiT-tiny with softmax beside timm's",
        shows="small differences that the suite vision leaves in its noise",
        baseline="timm",
        contenders=("timm", "softmax"),
        grid={**_DEIT_TINY, "length": (64, 197)},
        rounds=41,
        memory=False,
        flops=False,
    ),
    "rpc-vision": Plan(
        title="RPC-SymViT: DeiT-tiny with symmetric attention, n iterations in its first layer",
        shows="table 13 of the kernel-PCA paper: 4, 5, 6 iterations in the first layer take 1.04, 1.06, 1.08 "
        "of SymViT's time in training and 1.0, 1.0, 1.1 in inference; 2 in every layer 1.16 and 1.7",
        baseline="symmetric",
        contenders=(
            "symmetric", *_RPC_FIRST, {"rpc": {"iterations": 2, "lam": 3.0}}, "softmax",
        ),
        grid={**_DEIT_TINY, "length": (197,)},
        rounds=7,
    ),
    "causal": Plan(
        title="Causal attention in linear time",
        shows="time per token constant within 20 % up to N 65536",
        baseline="linear",
        contenders=(
            "linear", {"primal": {"rank": 20}}, {"primal": {"rank": 20, "data_dependent": False}},
            *_CAUSAL_PEERS,
        ),
        grid={
            "is_causal": (True,), "threads": (2,), "batch_size": (1,),
            "length": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
        },
        rounds=7,
        memory=False,
        flops=False,
    ),
    "million": Plan(
        title="One training step over 1,048,576 tokens",
        shows="a peak under 8 GB",
        baseline="",
        contenders=(_PRIMAL,),
        grid={"threads": (2,), "batch_size": (1,), "length": (1048576,)},
        passes=("step",),
        rounds=1,
    ),
    "lra": Plan(
        title="Classifiers of the Long Range Arena recipes, at about the lengths of its tasks",
        shows="the poster: on Text a step takes 7.4 times less time and 15.5 times less memory than eager "
        "softmax",
        baseline="2 x eager",
        contenders=(
            ["eager"] * 2, ["sdpa"] * 2, ["nn.TransformerEncoderLayer"] * 2, ["softmax"] * 2,
            [_RELEASED] * 2, ["sdpa", _RELEASED],
            [{"batch_norm_scaled_heads": {"factors": [1, 2], "dropout": 0.0}}] * 2, ["multilinear"] * 2,
            ["linear"] * 2, *_TWICE, ["no attention"] * 2,
        ),
        grid={"body": ("tokens",), "threads": (2,), "batch_size": (16,), "length": (1024, 2048, 4096)},
        rounds=5,
        rounds_at={4096: 2},
        flops=False,
    ),
    "series": Plan(
        title="Classifiers of series of the recipe demo's sizes",
        shows="what is left of a layer's speed in a model, and from which length a linear layer pays",
        baseline=_TORCHS,
        contenders=(
            _TORCHS, "sdpa", *_IN_MODELS, {"primal": {"rank": 20, "eta": 0.1, "rank_multiplier": 5}},
            "batch_norm", "linear-attention-transformer", "performer-pytorch", "no attention",
        ),
        grid={
            "body": ("series",), "threads": (2,), "batch_size": (16,), "num_heads": (4,),
            "length": (100, 500, 2000),
        },
        rounds=7,
        flops=False,
    ),
    "language": Plan(
        title="Language models of the sizes of the recipes language/ptb_...",
        shows="tokens a second in training, with the loss, and in reading a text up to the next token",
        baseline=_TORCHS,
        contenders=(
            _TORCHS, "sdpa", *_IN_MODELS, {"primal": {"rank": 20, "data_dependent": False}},
            "linear-attention-transformer", "no attention",
        ),
        grid={
            "body": ("language",), "is_causal": (True,), "threads": (2,), "batch_size": (4,),
            "embed_dim": (192,), "num_heads": (4,), "length": (512, 4096),
        },
        rounds=7,
        rounds_at={4096: 3},
        flops=False,
    ),
    "roofline": Plan(
        title="Primal-Attention against what the machine can do",
        shows="operations and bytes counted by hand, over measured ceilings",
        contenders=("sdpa", _NATIVE, _PRIMAL),
        grid={"threads": (1, 2), "length": (4096,)},
        memory=False,
        flops=False,
        roofline=True,
    ),
    "gpu": Plan(
        title="Triton kernels on a GPU",
        shows="RPC with n steps: time at most 1.05 n times symmetric attention's, peak at most 1.5 times",
        contenders=(
            "sdpa", "symmetric",
            *({"rpc": {"iterations": n, "impl": form}} for n in (2, 4, 6) for form in _OF_RPC),
            *({"primal": {"rank": 30, "eta": 0.1, "impl": form}} for form in _OF_PRIMAL),
            {"primal": {"rank": 30}}, "multilinear", "linear",
        ),
        causal_contenders=(
            "sdpa", "linear",
            *({"primal": {"rank": 30, "data_dependent": False, "impl": form}} for form in _OF_PRIMAL),
            *_CAUSAL_PEERS,
        ),
        grid={
            "device": ("cuda",), "dtype": ("float32", "bfloat16"), "is_causal": (False, True),
            "embed_dim": (512,), "num_heads": (8,), "length": (1024, 4096),
        },
        rounds=11,
        rounds_at={4096: 7},
        flops=False,
        roofline=True,
    ),
    "gpu-long": Plan(
        title="Linear-time attention over long sequences on a GPU",
        shows="time, memory and share of the copy bandwidth over N",
        contenders=(
            "sdpa", _PRIMAL, {"primal": {"rank": 30}}, "linear", *(peer.name for peer in PEERS),
        ),
        causal_contenders=(
            "sdpa", "linear", {"primal": {"rank": 30, "data_dependent": False}}, *_CAUSAL_PEERS,
        ),
        grid={
            "device": ("cuda",), "dtype": ("float32", "bfloat16"), "is_causal": (False, True),
            "length": (16384, 65536, 131072),
        },
        rounds=5,
        flops=False,
        roofline=True,
    ),
}  # fmt: skip


SIZES = ("length", "embed_dim", "num_heads", "batch_size", "dtype", "threads", "device")


def plan_from_options(
    suite: str | None,
    contenders: Sequence[ContenderSpec],
    options: Mapping[str, Any],
    is_causal: bool | None = None,
) -> Plan:
    """The suite, with the given options in place of its own.

    Args:
        suite: a name of ``SUITES``; None: every mechanism, or the given contenders, at the given sizes.
        contenders: replace those of the suite; its baseline stays.
        options: values by name of a size or of a field of the plan; None: not given.
        is_causal: whether the layers are causal.
    """
    if suite is not None and suite not in SUITES:
        raise unknown("suite", suite, [*SUITES, *ROW_SUITES])
    plan = SUITES[suite or "all"]
    given = {name: value for name, value in options.items() if value is not None}
    grid = {"threads": (torch.get_num_threads(),), **plan.grid}
    grid |= {name: tuple(given[name]) for name in SIZES if name in given}
    if is_causal is not None:
        grid["is_causal"] = (is_causal,)
    changed: dict[str, Any] = {"grid": grid}
    changed |= {name: given[name] for name in ("rounds", "memory", "flops") if name in given}
    if "passes" in given:
        changed["passes"] = tuple(given["passes"])
    if contenders:
        has_baseline = not plan.baseline or plan.baseline in contenders
        changed["causal_contenders"] = ()
        changed["contenders"] = (*(() if has_baseline else (plan.baseline,)), *contenders)
        if suite is None:
            changed |= {"title": "One attention layer", "shows": "", "memory": given.get("memory", True)}
    return dataclasses.replace(plan, **changed)
