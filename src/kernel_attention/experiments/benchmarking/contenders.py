"""The table of contenders, and how a name becomes a contender."""

from __future__ import annotations

import importlib.util
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.experiments.benchmarking import peers
from kernel_attention.experiments.benchmarking.baselines import (
    EagerScaledHeads,
    ReleasedPrimal,
    SoftmaxLayer,
    TorchMultihead,
)
from kernel_attention.experiments.benchmarking.layers import CausalCall, Encoder
from kernel_attention.experiments.benchmarking.plans import ContenderSpec, Setting
from kernel_attention.mechanisms import (
    MECHANISMS,
    create_attention,
    get_mechanism,
)
from kernel_attention.specs import SpecReader

Make = Callable[[Setting], nn.Module]


@dataclass(frozen=True)
class Contender:
    """A row of the table: a layer x -> y, and what it needs.

    Attributes:
        name: name of the row.
        make: the layer at a setting, on CPU, in float32.
        package: the package it needs, "" for none.
        device: the only device it runs on, "" for any.
        causal: whether it has a causal form, and whether it has another one.
        plain: the same layer in its plain form, whose operations are counted; None: ``make``.
        layers: the layers of an encoder, which needs what they need.
    """

    name: str
    make: Make
    package: str = ""
    device: str = ""
    causal: bool = True
    bidirectional: bool = True
    plain: Make | None = None
    layers: tuple[Contender, ...] = ()

    def absence(self, setting: Setting) -> str:
        """Why it cannot be measured; "" where it can."""
        for layer in self.layers:
            if why := layer.absence(setting):
                return why
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.device not in ("", setting.device):
            return f"runs on {self.device} only"
        if setting.is_causal and not self.causal:
            return "has no causal form"
        return "" if setting.is_causal or self.bidirectional else "has a causal form only"


def _baselines() -> list[Contender]:
    def softmax(form: Any) -> Make:
        return lambda s: SoftmaxLayer(s.embed_dim, s.num_heads, form, s.is_causal)

    def heads(beta: float) -> Make:  # factor 1 for the first half of the heads, 2 for the other
        def make(s: Setting) -> nn.Module:
            half = (s.num_heads + 1) // 2
            return EagerScaledHeads(s.embed_dim, s.num_heads, [1] * half + [2] * (s.num_heads - half), beta)

        return make

    return [
        Contender("sdpa", softmax("sdpa")),
        Contender("eager", softmax("eager")),
        Contender("eager scaled_heads", heads(0.0), causal=False),
        Contender("eager batch_norm_scaled_heads", heads(1.0), causal=False),
        Contender("nn.MultiheadAttention", lambda s: TorchMultihead(s.embed_dim, s.num_heads, s.is_causal)),
        Contender(
            "released primal (structure)",
            lambda s: ReleasedPrimal(s.embed_dim, s.num_heads, max_len=s.length),
            causal=False,
        ),
    ]


PEERS = (
    Contender(
        "linear-attention-transformer", peers.linear_attention_transformer, "linear_attention_transformer"
    ),
    Contender("pytorch-fast-transformers", peers.fast_transformers, "fast_transformers"),
    Contender("performer-pytorch", peers.performer, "performer_pytorch"),
    Contender("linformer", peers.linformer, "linformer", causal=False),
    Contender("nystrom-attention", peers.nystrom, "nystrom_attention", causal=False),
    Contender("reformer-pytorch", peers.reformer, "reformer_pytorch"),
    Contender(
        "flash-linear-attention", peers.flash_linear_attention, "fla", device="cuda", bidirectional=False
    ),
)
CONTENDERS = {contender.name: contender for contender in (*_baselines(), *PEERS)}


def contender_names(*, with_mechanisms: bool = True) -> list[str]:
    """Every name that ``find_contender`` knows: baselines, peers and, unless left out, our mechanisms."""
    return [*CONTENDERS, *(MECHANISMS if with_mechanisms else ())]


def find_contender(spec: ContenderSpec) -> Contender:
    """The contender of a name, of ``{mechanism: options}``, or of a list of these, an encoder.

    Raises:
        InputError: for an unknown name or option.
    """
    if isinstance(spec, list):
        return _encoder([find_contender(layer) for layer in spec])
    name, options = CONTENDER_SPECS.read(spec)
    return CONTENDERS[name] if name in CONTENDERS else _mechanism(name, options)


CONTENDER_SPECS = SpecReader(
    argument="contender",
    kind="contender",
    names=ChainMap[str, Any](CONTENDERS, MECHANISMS),
    options_of=lambda name: () if name in CONTENDERS else get_mechanism(name).options,
    listing="kernel-attention list contenders",
)


def _encoder(layers: Sequence[Contender]) -> Contender:
    """An encoder of the layers, first to last."""
    if not layers:
        raise InputError("contender []: an encoder has one layer or more")
    names = [layer.name for layer in layers]
    alike = len(set(names)) == 1

    def maker(of: Callable[[Contender], Make]) -> Make:
        return lambda setting: Encoder([of(layer)(setting) for layer in layers], setting.embed_dim)

    return Contender(
        f"{len(names)} x {names[0]}" if alike else " + ".join(names),
        maker(lambda layer: layer.make),
        plain=maker(lambda layer: layer.plain or layer.make),
        layers=tuple(layers),
    )


def _mechanism(name: str, options: Mapping[str, Any]) -> Contender:
    """A contender of our own; its layer's ``max_len`` is the setting's length where it has one."""
    mechanism = get_mechanism(name)

    def maker(**chosen: Any) -> Make:
        def make(setting: Setting) -> nn.Module:
            sized = {"max_len": setting.length} if "max_len" in mechanism.options else {}
            layer = create_attention(
                name, setting.embed_dim, setting.num_heads, **{**sized, **options, **chosen}
            )
            return CausalCall(layer) if setting.is_causal else layer

        return make

    _check_options(maker(), options)
    shown = ", ".join(f"{key} {value}" for key, value in options.items())
    return Contender(
        f"{name} ({shown})" if shown else name,
        maker(),
        causal=mechanism.causal,
        plain=maker(**reference) if (reference := mechanism.layer.reference_options) else None,
    )


def _check_options(make: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
    """InputError, before anything is measured, for options that the mechanism accepts at no size."""
    if "factors" not in options:  # they must fit the number of heads, which is not known yet
        with torch.random.fork_rng(devices=[]):
            make(Setting(length=16))
