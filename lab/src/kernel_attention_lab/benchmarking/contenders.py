"""The table of contenders, and how a name becomes a contender."""

from __future__ import annotations

import importlib.util
import itertools
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.mechanisms import (
    MECHANISMS,
    create_attention,
    get_mechanism,
)
from kernel_attention.native import why_not_built
from kernel_attention.specs import Spec, SpecReader
from kernel_attention_lab.benchmarking import baselines
from kernel_attention_lab.benchmarking.bodies import (
    TorchEncoderLayer,
    timm_vision_transformer,
    whole_model,
)
from kernel_attention_lab.benchmarking.layers import CausalCall, Encoder
from kernel_attention_lab.benchmarking.plans import BODIES, LAYER, ContenderSpec, Setting

Make = Callable[[Setting], nn.Module]


@dataclass(frozen=True)
class Contender:
    """A row of the table: a layer x -> y, and what it needs.

    Attributes:
        name: name of the row.
        make: the layer at a setting, on CPU, in float32.
        package: the package it needs, "" for none.
        native: whether it needs the engines in C++.
        device: the only device it runs on, "" for any.
        causal: whether it has a causal form, and whether it has another one.
        reference: the same layer in its reference form, whose operations are counted; None: ``make``.
        layers: the layers of an encoder, which needs what they need.
        bodies: the values of ``Setting.body`` that it is measured with.
    """

    name: str
    make: Make
    package: str = ""
    native: bool = False
    device: str = ""
    causal: bool = True
    bidirectional: bool = True
    reference: Make | None = None
    layers: tuple[Contender, ...] = ()
    bodies: tuple[str, ...] = (LAYER, *BODIES)

    def absence(self, setting: Setting) -> str:
        """Why it cannot be measured; "" where it can."""
        for layer in self.layers:
            if why := layer.absence(setting):
                return why
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.native and (reason := why_not_built()) is not None:
            return reason
        if self.device not in ("", setting.device):
            return f"runs on {self.device} only"
        if setting.body not in self.bodies:
            return f"is measured with body {' or '.join(self.bodies)} only"
        if setting.is_causal and not self.causal:
            return "has no causal form"
        return "" if setting.is_causal or self.bidirectional else "has a causal form only"


def _plain_layers() -> list[Contender]:
    def softmax(form: Any) -> Make:
        return lambda s: baselines.SoftmaxLayer(s.embed_dim, s.num_heads, form, s.is_causal)

    def heads(beta: float) -> Make:  # factor 1 for the first half of the heads, 2 for the other
        def make(s: Setting) -> nn.Module:
            half = (s.num_heads + 1) // 2
            return baselines.EagerScaledHeads(
                s.embed_dim, s.num_heads, [1] * half + [2] * (s.num_heads - half), beta
            )

        return make

    return [
        Contender("sdpa", softmax("sdpa")),
        Contender("eager", softmax("eager")),
        Contender("eager scaled_heads", heads(0.0), causal=False),
        Contender("eager batch_norm_scaled_heads", heads(1.0), causal=False),
        Contender(
            "nn.MultiheadAttention", lambda s: baselines.TorchMultihead(s.embed_dim, s.num_heads, s.is_causal)
        ),
        Contender(
            "released primal (structure)",
            lambda s: baselines.ReleasedPrimal(s.embed_dim, s.num_heads, max_len=s.length),
            causal=False,
        ),
    ]


PEERS = (
    Contender(
        "linear-attention-transformer", baselines.linear_attention_transformer, "linear_attention_transformer"
    ),
    Contender("pytorch-fast-transformers", baselines.fast_transformers, "fast_transformers"),
    Contender("performer-pytorch", baselines.performer, "performer_pytorch"),
    Contender("linformer", baselines.linformer, "linformer", causal=False),
    Contender("nystrom-attention", baselines.nystrom, "nystrom_attention", causal=False),
    Contender("reformer-pytorch", baselines.reformer, "reformer_pytorch"),
    Contender(
        "flash-linear-attention", baselines.flash_linear_attention, "fla", device="cuda", bidirectional=False
    ),
)
_TIMM = Contender("timm", timm_vision_transformer, "timm", bodies=("vit",))
_IN_MODELS = (
    Contender("no attention", lambda setting: nn.Identity(), bodies=tuple(BODIES)),
    Contender("nn.TransformerEncoderLayer", TorchEncoderLayer, bodies=tuple(BODIES)),
    _TIMM,
)
CONTENDERS = {contender.name: contender for contender in (*_plain_layers(), *PEERS, *_IN_MODELS)}


def contender_names(*, with_mechanisms: bool = True) -> list[str]:
    """Every name that ``find_contender`` knows: baselines, peers and, unless left out, our mechanisms."""
    return [*CONTENDERS, *(MECHANISMS if with_mechanisms else ())]


def find_contender(spec: ContenderSpec) -> Contender:
    """The contender of a name, of ``{mechanism: options}``, or of a list of these, an encoder.

    In a whole model, a name is the attention of all its layers, and a list has one for each.

    Raises:
        InputError: for an unknown name or option.
    """
    contender = _encoder(list(map(_layer, spec))) if isinstance(spec, list) else _layer(spec)
    if contender is _TIMM:
        return contender
    if _TIMM in contender.layers:
        raise InputError(f"contender {spec!r}: {_TIMM.name!r} is a whole model, not a layer of one")
    reference = None
    if contender.reference is not None:
        layers = [layer.reference or layer.make for layer in contender.layers]
        reference = _in_body(contender.reference, layers)
    return replace(
        contender,
        make=_in_body(contender.make, [layer.make for layer in contender.layers]),
        reference=reference,
    )


def _layer(spec: Spec) -> Contender:
    name, options = CONTENDER_SPECS.read(spec)
    return CONTENDERS[name] if name in CONTENDERS else _mechanism(name, options)


def _in_body(alone: Make, layers: Sequence[Make]) -> Make:
    """The module of a setting: the contender alone, or a whole model of it or of the layers of a list."""

    def make(setting: Setting) -> nn.Module:
        if setting.body == LAYER:
            return alone(setting)
        of_model = layers or [alone] * BODIES[setting.body].num_layers
        return whole_model([layer(setting) for layer in of_model], setting)

    return make


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
    runs = [(name, len(list(run))) for name, run in itertools.groupby(layer.name for layer in layers)]
    names = [f"{count} x {name}" if count > 1 or len(runs) == 1 else name for name, count in runs]

    def maker(of: Callable[[Contender], Make]) -> Make:
        return lambda setting: Encoder([of(layer)(setting) for layer in layers], setting.embed_dim)

    return Contender(
        " + ".join(names),
        maker(lambda layer: layer.make),
        reference=maker(lambda layer: layer.reference or layer.make),
        layers=tuple(layers),
    )


def _mechanism(name: str, options: Mapping[str, Any]) -> Contender:
    """A contender of our own; its layer has the setting's length, and token grid, where it takes them."""
    mechanism = get_mechanism(name)
    needs_grid = "grid_size" in mechanism.options and "grid_size" not in options

    def maker(**chosen: Any) -> Make:
        def make(setting: Setting) -> nn.Module:
            known: dict[str, Any] = {"max_len": setting.length}
            if setting.body == "vit":
                known["grid_size"] = (setting.grid_size, setting.grid_size)
                known["class_tokens"] = setting.class_tokens
            if setting.body in BODIES:
                known["dropout"] = BODIES[setting.body].dropout
            sized = {key: value for key, value in known.items() if key in mechanism.options}
            layer = create_attention(
                name, setting.embed_dim, setting.num_heads, **{**sized, **options, **chosen}
            )
            return CausalCall(layer) if setting.is_causal and setting.body == LAYER else layer

        return make

    _check_options(maker(), options)
    shown = ", ".join(f"{key} {value}" for key, value in options.items())
    return Contender(
        f"{name} ({shown})" if shown else name,
        maker(),
        package="triton" if options.get("impl") == "triton" else "",
        native=options.get("impl") == "native",
        device={"triton": "cuda", "native": "cpu"}.get(options.get("impl", ""), ""),
        causal=mechanism.causal,
        bodies=("vit",) if needs_grid else (LAYER, *BODIES),
        reference=maker(**form) if (form := mechanism.layer.reference_options) else None,
    )


def _check_options(make: Callable[..., nn.Module], options: Mapping[str, Any]) -> None:
    """InputError, before anything is measured, for options that the mechanism accepts at no size."""
    if "factors" not in options:  # they must fit the number of heads, which is not known yet
        with torch.random.fork_rng(devices=[]):
            make(Setting(length=16, body="vit"))
