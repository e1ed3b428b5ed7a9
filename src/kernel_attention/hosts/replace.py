"""Replace the attention layers of a model by ours, in place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from kernel_attention.core.layer import AttentionLayer, require_causal_form
from kernel_attention.errors import InputError
from kernel_attention.hosts.comparing import HARM, HostComparison, compare, is_trained, random_error
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.known import (
    HostedAttention,
    HostFacts,
    TimmAttention,
    TransformersAttention,
    needed_arguments,
)
from kernel_attention.hosts.projections import Source, carry, foreign_projection, output_owner
from kernel_attention.hosts.reading import (
    HostDescription,
    describe,
    describe_heads,
    is_decoder,
    known_sizes,
    may_cache,
)
from kernel_attention.hosts.sites import LayerKey, Site, find_sites, select, why_none
from kernel_attention.hosts.trace import NewLayer, leave_trace
from kernel_attention.mechanisms import AttentionSpec, create_attention, get_mechanism, layer_specs

PATTERNS: Mapping[str, Mapping[LayerKey, AttentionSpec]] = MappingProxyType(
    {
        "primalformer": {"all": "primal"},
        "primal+": {"last": "primal"},
        "symvit": {"all": "symmetric"},
        "rpc-first": {"first": {"rpc": {"iterations": 4, "lam": 4.0}}},
        "rpc-all": {"all": {"rpc": {"iterations": 2, "lam": 3.0}}},
        "flt": {"all": "multilinear"},
        "llt": {"last": "multilinear"},
    }
)
"""The layers that the papers replace: PrimalFormer and Primal.+ of Primal-Attention, SymViT and two RPC
settings of the kernel-PCA paper, FLT (every layer) and LLT (the last layer) of the KMLSVD thesis."""


@dataclass(frozen=True)
class Replacement:
    """The replacement of one layer.

    Attributes:
        layer: index among the model's self-attention layers; None for cross-attention.
        path: dotted name of the module.
        old: class of the module that was replaced.
        attention: name of the new mechanism.
        options: its options, including those taken from the host.
        carried: parameters that hold the host's values.
        new: parameters with a fresh initialisation.
        dropped: parameters of the host that were not taken over.
        differs: how the host is not softmax attention of its projections, found out on random weights and a
            short random sequence, or why it was not compared. None where it is softmax attention or one of
            our layers, and where the function between its projections was replaced alone.
    """

    layer: int | None
    path: str
    old: str
    attention: str
    options: Mapping[str, Any]
    carried: tuple[str, ...]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    differs: str | None = None

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        number = "cross-attention" if self.layer is None else f"layer {self.layer}"
        lines = [f"{number} ({self.path}): {self.old} -> {self.attention}({options})"]
        for what in ("carried", "new", "dropped"):
            lines.append(f"  {what + ':':9}{', '.join(getattr(self, what)) or 'nothing'}")
        if self.differs is not None:
            lines.append(f"  differs: {self.differs}")
        return "\n".join(lines)


class ReplacementReport(tuple[Replacement, ...]):
    """The layers replaced, first to last; ``str`` gives a readable text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(str(replacement) for replacement in self)


def replace_attention(
    model: nn.Module, layers: Mapping[LayerKey, AttentionSpec], **options: Any
) -> ReplacementReport:
    """Replace attention layers of a torch, timm, Hugging Face or kernel-attention model, in place.

    Projection weights are carried over where shapes allow, fused ones part by part. Device, dtype, training
    mode and requires_grad do not change. Width, heads and biases come from the host. So do the options
    ``dropout`` and ``max_len``, and a vision model's ``grid_size`` and ``class_tokens``, where the mechanism
    has them and the host knows the value. After an error the model is unchanged.

    Create the optimizer afterwards, because the layers have new parameters. Weights saved from a changed
    model load into another model changed in the same way. A Hugging Face model says in its configuration
    what was replaced: ``from_pretrained`` makes the model again once ``kernel_attention.hosts.hugging_face``
    is imported, and its ``loss`` in training includes the auxiliary loss.

    Args:
        model: any module that holds attention layers (``nn.MultiheadAttention``, timm's and transformers'
            self-attention, ours).
        layers: {which: mechanism}. Which: an index (negative from the end), "all", "first", "last",
            "first-K", "last-K", the dotted name of the attention module or of the module around it, or
            several of these such as (0, 2) or "0,2".
            Mechanism: a name or ``{name: options}``. ``PATTERNS`` holds the papers' choices.
        options: options of every replaced layer; options given with a mechanism take precedence.

    Returns:
        One record per layer, with what was carried, what is new and what was dropped.

    Warns:
        UserWarning: for a trained model whose layers lose what they have learnt, since the new ones make
            outputs unlike the old. ``convert_attention`` trains them.

    Raises:
        InputError: for a layer or mechanism that does not exist, a layer chosen twice, an option that the
            mechanism does not have, a host that is not a plain map from d to d features, does not attend over
            tokens, or needs arguments that no layer here can use.
    """
    plans = plan_replacement(model, layers, options)
    if (harm := describe_harm(model, plans)) is not None:
        warnings.warn(harm, stacklevel=2)
    return install_layers(model, plans)


def plan_replacement(
    model: nn.Module,
    layers: Mapping[LayerKey, AttentionSpec],
    options: Mapping[str, Any],
    *,
    is_complete: bool = False,
) -> list[PlannedLayer]:
    """The new layers of ``replace_attention``, made and not yet in place, in the order of definition.

    With ``is_complete`` an option that is not stated has the value of a layer alone, as in files of models
    that were replaced before ``replacement_options``.
    """
    if not isinstance(layers, Mapping) or not layers:
        raise InputError(
            f"layers={layers!r} must be a mapping such as {{-1: 'primal'}} or {{'all': 'softmax'}}"
        )
    sites = find_sites(model)
    if not sites:
        reason = why_none(model) or (
            "accepted: nn.MultiheadAttention, timm's or transformers' self-attention, "
            "or a layer of kernel-attention"
        )
        raise InputError(
            f"model: {type(model).__name__} holds no attention layer that can be replaced: {reason}"
        )
    plans: dict[str, PlannedLayer] = {}
    for key, spec in layers.items():
        name, own = layer_specs(spec, 1)[0]
        for site in select(key, sites):
            if site.path in plans:
                raise InputError(f"layers: {site.path} is chosen twice, the second time by {key!r}")
            stated = {**options, **own}
            added = {} if is_complete else get_mechanism(name).layer.replacement_options(stated)
            plans[site.path] = PlannedLayer.make(site, name, {**added, **stated})
    return [plans[site.path] for site in sites if site.path in plans]


def describe_harm(model: nn.Module, plans: Sequence[PlannedLayer]) -> str | None:
    """The warning about layers of a trained model whose outputs a constant resembles more than the new ones.

    None: there is no such layer, or the model is not trained.
    """
    if not is_trained(model):
        return None
    harmed = {plan.site.path: error for plan in plans if (error := plan.random_error()) > HARM}
    if not harmed:
        return None
    path = max(harmed, key=lambda each: harmed[each])
    names = ", ".join(sorted({repr(plan.name) for plan in plans if plan.site.path in harmed}))
    return (
        f"replace_attention: {names} does not do what {len(harmed)} trained layers did (on random inputs "
        f"{path} misses {harmed[path]:.1f} times the variance of the old outputs), so the model forgets what "
        "it has learnt; ka.convert_attention takes the same arguments and data, and trains the new layers to "
        "do it"
    )


def install_layers(model: nn.Module, chosen: Sequence[PlannedLayer]) -> ReplacementReport:
    """Put planned layers in place."""
    numbered = [site.path for site in find_sites(model) if not site.cross]
    report = ReplacementReport(
        plan.record(numbered.index(plan.site.path) if not plan.site.cross else None) for plan in chosen
    )
    for plan in chosen:
        plan.install()
    leave_trace(NewLayer(plan.site, plan.name, plan.options) for plan in chosen)
    return report


@dataclass(frozen=True)
class PlannedLayer:
    """A layer that is made but not yet in place, so that an error leaves the model unchanged."""

    site: Site
    host: HostDescription
    name: str
    options: Mapping[str, Any]
    layer: AttentionLayer
    carried: tuple[str, ...]
    facts: HostFacts
    differs: str | None

    @classmethod
    def make(cls, site: Site, name: str, options: dict[str, Any]) -> PlannedLayer:
        """Make the new layer of a site; an error leaves the model unchanged."""
        mechanism = get_mechanism(name)
        if site.cross and not mechanism.cross:
            raise InputError(f"layers: {site.path} is cross-attention, which {name!r} does not have")
        behind_interface = site.host_class is InterfaceAttention
        host = describe_heads(site.module) if behind_interface else describe(site.module, site.owners[-1])
        sizes = known_sizes(site.owners)
        comparison = _compare(site, host, sizes.get("max_len"))
        # Options that only the host knows; the user's options come last and take precedence.
        shared = {"bias": host.bias, "dropout": host.dropout, **sizes}
        options = {**{key: value for key, value in shared.items() if key in mechanism.options}, **options}
        layer = create_attention(name, host.embed_dim, host.num_heads, **options)
        if decodes := _decodes(site):
            require_causal_form(layer, name)
        if behind_interface:
            if (reason := layer.why_not_heads()) is not None:
                if (found := foreign_projection(site.module, site.owners[-1])) is not None:
                    reason = f"{reason}. Nor can the whole layer be replaced: {found}"
                raise InputError(
                    f"layers: {name!r} cannot take the queries, keys and values that "
                    f"{type(site.module).__name__} makes: {reason}"
                )
            layer.drop_projections()
        layer.to(device=host.like.device, dtype=host.like.dtype).train(site.module.training)
        facts = HostFacts(host.dropout, decodes, comparison.outputs)
        return cls(site, host, name, options, layer, carry(layer, host.sources), facts, comparison.differs)

    def record(self, index: int | None) -> Replacement:
        """The record of what is carried, new and dropped; ``index`` among the self-attention layers."""
        module = self.site.module
        old = module.attention if isinstance(module, HostedAttention) else InterfaceAttention.old_of(module)
        kept = old is module and self.site.host_class is InterfaceAttention
        names = [name for name, _ in self.layer.named_parameters()]
        return Replacement(
            index,
            self.site.path,
            type(old).__name__,
            self.name,
            MappingProxyType(dict(self.options)),
            self.carried,
            tuple(name for name in names if name not in self.carried),
            () if kept else _dropped(old, self.host.sources, self.carried),
            self.differs,
        )

    def random_error(self) -> float:
        """The share of the variance of softmax attention's outputs that the new layer misses.

        It is measured on random inputs, and is 0 where it cannot be.
        """
        if self.layer.mechanism_name == "softmax" or self.host.like.is_meta:
            return 0.0
        return random_error(self.layer, self.host, self.site.host_class is InterfaceAttention)

    def install(self) -> None:
        """Put the layer into the model."""
        module, host_class = self.site.module, self.site.host_class
        if isinstance(module, HostedAttention):
            module.attention = self.layer
            return
        if host_class is InterfaceAttention:
            if not self.layer.reads_queries_alone():
                _forget_cache(module, self.site.owners)
            host_class.install(module, self.layer, self.host.dropout)
            return
        new: nn.Module = self.layer
        if host_class is not None:
            assert not issubclass(host_class, InterfaceAttention)
            new = host_class.around(self.layer, module, self.facts).train(module.training)
        if host_class is TransformersAttention:
            _settle_transformers(module, self.site.owners)
        for owner in self.site.owners:
            if isinstance(owner, nn.TransformerEncoder):
                owner.use_nested_tensor = False  # otherwise it passes nested tensors in eval mode
        for parent, name in self.site.places:
            setattr(parent, name, new)


def _compare(site: Site, host: HostDescription, longest: int | None) -> HostComparison:
    """Compare a host of which the whole layer is replaced with softmax attention.

    Raises:
        InputError: for a host that does not attend over tokens, or needs what no layer here can use.
    """
    if site.host_class is None or site.host_class is InterfaceAttention:
        return HostComparison()
    name = type(site.module).__name__
    if site.host_class is TimmAttention and (needed := needed_arguments(site.module)):
        raise InputError(
            f"layers: {site.path}: {name} needs {', '.join(needed)}, which no layer here can use"
        )
    try:
        return compare(site.module, site.owners, host.num_heads, longest)
    except InputError as error:
        raise InputError(f"layers: {site.path}: {error}") from None


def _decodes(site: Site) -> bool:
    """True where the layer belongs to a causal model."""
    if site.cross:
        return False
    if site.host_class in (TransformersAttention, InterfaceAttention):
        return is_decoder(site.module, site.owners)
    return any(getattr(site.module, name, False) is True for name in ("is_causal", "is_decoder"))


def _settle_transformers(module: nn.Module, owners: Sequence[nn.Module]) -> None:
    """Remove the host's output projection and key-value cache: our layer has no such cache."""
    owner = output_owner(module, owners[-1])
    if owner is not None and owner[0] is not module:
        setattr(owner[0], owner[1], nn.Identity())
    _forget_cache(module, owners)


def _forget_cache(module: nn.Module, owners: Sequence[nn.Module]) -> None:
    """Let a decoder not use its key-value cache."""
    if not may_cache(module, owners):
        return
    # ``generate`` reads the model's generation_config, a copy of the config that the layers read.
    kinds = ("config", "generation_config")
    configs: list[Any] = [getattr(part, kind, None) for part in (module, *owners) for kind in kinds]
    for config in configs:
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _dropped(old: nn.Module, sources: Mapping[str, Source], carried: tuple[str, ...]) -> tuple[str, ...]:
    kept = {sources[name].label for name in carried}
    # A projection that is both query and key is a source twice.
    parts = dict.fromkeys(source.label for source in sources.values() if source.label not in kept)
    known = {id(source.parameter) for source in sources.values()}
    return (*parts, *(name for name, parameter in old.named_parameters() if id(parameter) not in known))
