"""Plans of a benchmark: contenders by name, and the settings in which they are measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from kernel_attention.errors import InputError, unknown
from kernel_attention.specs import Spec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("cpu", "cuda")
PASSES = ("forward", "step")
LAYER = "layer"  # the body of a plan that measures layers by themselves

ContenderSpec = Spec | list[Spec]
"""A contender: a name of the table, ``{mechanism: options}``, or a list of these, an encoder."""


@dataclass(frozen=True)
class Body:
    """The sizes of a whole model around its attention, besides those of ``Setting``.

    Attributes:
        num_layers: layers, unless a contender is a list of them.
        feedforward_factor: hidden width of the feed-forward networks over the model's width.
        dropout: of the layers.
        norm_first: whether the layers are pre-norm.
        is_causal: whether a token reads only those up to it.
    """

    num_layers: int
    feedforward_factor: int
    dropout: float
    norm_first: bool = True
    is_causal: bool = False


BODIES = {
    "vit": Body(12, 4, 0.0),  # DeiT's
    "series": Body(2, 2, 0.1, norm_first=False),  # the recipe demo's
    "tokens": Body(2, 2, 0.1),  # those of the recipes lra/...
    "language": Body(2, 4, 0.1, is_causal=True),  # those of the recipes language/ptb_...
}


@dataclass(frozen=True)
class Setting:
    """The sizes that are measured: of a layer, or of a whole model whose layers attend by it.

    A layer's input is (batch_size, length, embed_dim). ``body`` names a whole model of ``BODIES``. Its input
    is batch_size images, series, sequences or texts, each of which is ``length`` tokens in the model.
    """

    length: int = 4096
    embed_dim: int = 64
    num_heads: int = 2
    batch_size: int = 4
    dtype: str = "float32"
    threads: int = 1
    device: str = "cpu"
    is_causal: bool = False
    body: str = LAYER

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and input."""
        return DTYPES[self.dtype]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch_size * self.length

    @property
    def grid_size(self) -> int:
        """Rows of patches, and columns, of the images of ``body="vit"``; 0 where the length is no image's."""
        side = math.isqrt(self.length)
        return side if side**2 in (self.length, self.length - 1) else 0

    @property
    def class_tokens(self) -> int:
        """Tokens in front of the patches: 1 where the length is a square and 1 more."""
        return self.length - self.grid_size**2

    def record(self) -> dict[str, Any]:
        """The sizes, in JSON's types."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """Contenders and a grid of settings. Every combination of values in the grid is a setting.

    Attributes:
        title: the comparison.
        shows: the expected result.
        contenders: see ``ContenderSpec``; several rows may be one mechanism.
        baseline: the contender whose time the others are divided by.
        grid: values by name of a field of ``Setting``.
        causal_contenders: those of the causal settings; empty: the same.
        passes: "forward" (inference), "step" (forward and backward in training).
        rounds: number of timed rounds in every setting.
        rounds_at: number of rounds for given lengths, where a round takes long.
        memory: whether peaks are measured, each contender in a separate process.
        flops: whether operations are counted.
        roofline: whether the ceilings of the machine are measured too.
    """

    title: str
    contenders: tuple[ContenderSpec, ...]
    shows: str = ""
    baseline: str = "sdpa"
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    causal_contenders: tuple[ContenderSpec, ...] = ()
    passes: tuple[str, ...] = PASSES
    rounds: int = 15
    rounds_at: Mapping[int, int] = field(default_factory=dict)
    memory: bool = True
    flops: bool = True
    roofline: bool = False

    def settings(self) -> Iterator[Setting]:
        """All combinations; the length changes fastest."""
        names = [name for name in self.grid if name != "length"] + ["length"]
        values = [self.grid.get(name, (getattr(Setting(), name),)) for name in names]
        for chosen in itertools.product(*values):
            yield Setting(**dict(zip(names, chosen, strict=True)))

    def contenders_of(self, setting: Setting) -> tuple[ContenderSpec, ...]:
        """The contenders at a setting."""
        return self.causal_contenders if setting.is_causal and self.causal_contenders else self.contenders

    def rounds_of(self, setting: Setting) -> int:
        """Rounds at a setting: those of the longest length in ``rounds_at`` that it reaches."""
        reached = [length for length in self.rounds_at if length <= setting.length]
        return min(self.rounds_at[max(reached)], self.rounds) if reached else self.rounds


def check_plan(plan: Plan) -> None:
    """InputError for sizes, names and devices that are not accepted."""
    for name, values in plan.grid.items():
        if name not in {entry.name for entry in fields(Setting)}:
            raise unknown("size", name, (entry.name for entry in fields(Setting)))
        for value in values:
            if isinstance(getattr(Setting(), name), int) and value < (0 if name == "is_causal" else 1):
                raise InputError(f"{name}={value} must be at least 1")
    for setting in plan.settings():
        if setting.dtype not in DTYPES:
            raise unknown("dtype", setting.dtype, DTYPES)
        if setting.device not in DEVICES:
            raise unknown("device", setting.device, DEVICES)
        if setting.body not in (LAYER, *BODIES):
            raise unknown("body", setting.body, (LAYER, *BODIES))
        if setting.body in BODIES and BODIES[setting.body].is_causal != setting.is_causal:
            raise InputError(
                f"is_causal={setting.is_causal} with body={setting.body!r}: that model has "
                f"is_causal={BODIES[setting.body].is_causal}"
            )
        if setting.body == "vit" and not setting.grid_size:
            raise InputError(
                f"length={setting.length} with body='vit': a vision transformer has a square number of "
                "patches, or one token more"
            )
        if setting.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device='cuda': PyTorch finds no CUDA device here (accepted: cpu)")
        if setting.embed_dim % setting.num_heads:
            raise InputError(
                f"embed_dim={setting.embed_dim} must be divisible by num_heads={setting.num_heads}"
            )
    for name in plan.passes:
        if name not in PASSES:
            raise unknown("pass", name, PASSES)
    if plan.rounds < 1 or not plan.passes or not plan.contenders:
        raise InputError(f"rounds={plan.rounds}: at least one round, one pass and one contender are needed")
