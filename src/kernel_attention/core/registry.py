"""The table of mechanisms: layer classes register themselves, and layers are made by name."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.parameters import Device
from kernel_attention.errors import InputError, unknown
from kernel_attention.specs import Choice, Spec, SpecReader

AttentionSpec = Spec
"""A mechanism: its name or ``{name: options}``."""

AttentionFactory = Callable[..., AttentionLayer]
"""A maker of a layer from ``(embed_dim, num_heads, **options)``: a layer's class, or a function."""

_OF_EVERY_LAYER = ("embed_dim", "num_heads", "device", "dtype")

Layer = TypeVar("Layer", bound=type[AttentionLayer])


@dataclass(frozen=True)
class Mechanism:
    """A row of the table: a layer class with a preset, and the facts that help to choose it.

    Attributes:
        name: the name in [`create_attention`][kernel_attention.create_attention], recipes and commands.
        layer: the layer's class.
        paper: its source.
        equation: what it computes, in one line.
        summary: the same in words; may be empty.
        time: operations of a head; N tokens, p head width, s rank, f the head's factor.
        memory: numbers that a head keeps for the backward pass.
        state: how the state of step-by-step decoding grows with the tokens read.
        mixes_tokens: whether an output depends on tokens other than its own, and in which form.
        preset: options that the name fixes.
        example: small values of the options that the mechanism requires.
    """

    name: str
    layer: type[AttentionLayer]
    paper: str
    equation: str
    time: str
    memory: str
    state: str = "N"
    mixes_tokens: str = "yes"
    preset: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    summary: str = ""

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The names of the arguments that a user may set."""
        accepted = inspect.signature(self.layer).parameters
        return tuple(key for key in accepted if key not in {*_OF_EVERY_LAYER, *self.preset})

    def build(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> AttentionLayer:
        """A layer with these options; InputError for an option that the mechanism does not have."""
        options = ATTENTION_SPECS.read({self.name: options}).options
        given = {key: value for key, value in {"device": device, "dtype": dtype}.items() if value is not None}
        for key in given:
            if key not in inspect.signature(self.layer).parameters:
                raise InputError(f"{key}={given[key]!r}: {self.layer.__name__} has no argument {key}")
        layer = self.layer(embed_dim, num_heads, **{**self.preset, **options, **given})
        layer.mechanism_name = self.name
        return layer

    @cached_property
    def default_layer(self) -> AttentionLayer:
        """A small layer with the default options, to ask what it supports."""
        sizes = {"max_len": 16} if "max_len" in self.options else {}
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            return self.build(16, 2, **{**sizes, **self.example})

    @property
    def causal(self) -> bool:
        """True where the default options have a causal form."""
        return self.default_layer.supports(causal=True)

    @property
    def cross(self) -> bool:
        """True where the default options have cross-attention."""
        return self.default_layer.supports(context=True)

    @property
    def decoding(self) -> str:
        """How the state of step-by-step decoding grows: "constant", "N", "N / f", or "no"."""
        return self.state if self.default_layer.supports(decoding=True) else "no"


MECHANISMS: dict[str, Mechanism] = {}


def register_attention(
    name: str,
    *,
    paper: str,
    equation: str,
    time: str,
    memory: str,
    summary: str = "",
    state: str = "N",
    mixes_tokens: str = "yes",
    preset: Mapping[str, Any] | None = None,
    example: Mapping[str, Any] | None = None,
) -> Callable[[Layer], Layer]:
    """A class decorator that adds a layer class to the table of mechanisms, under one name with one preset.

    ``create_attention``, ``list_attention``, recipes, the command line, benchmarks and
    ``kernel_attention.testing.check_attention`` then know the mechanism. Several decorators give one class
    several names.

        @register_attention("mine", paper="..", equation="mean(v)", time="N p", memory="N p")
        class MyAttention(AttentionLayer): ...

    Args:
        name: a free name of lower-case letters, digits and underscores.
        paper: the source of the mechanism.
        equation: what it computes, in one line.
        time: operations of a head, in N tokens, p head width and the mechanism's own symbols.
        memory: numbers that a head keeps for the backward pass.
        summary: what it computes in words, for the tables of the documentation.
        state: how the state of step-by-step decoding grows with the tokens read.
        mixes_tokens: whether an output depends on tokens other than its own, and in which form.
        preset: options that the name fixes and a user cannot set.
        example: small values of the options that the mechanism requires.

    Raises:
        InputError: for a name that is taken or malformed, a class that is not an ``AttentionLayer``, or a
            preset of options that its constructor does not have.
    """
    preset, example = dict(preset or {}), dict(example or {})

    def register(layer: Layer) -> Layer:
        if not name.isidentifier() or name != name.lower():
            raise InputError(f"name={name!r} must be lower-case letters, digits and underscores")
        if not (isinstance(layer, type) and issubclass(layer, AttentionLayer)):
            raise InputError(f"register_attention({name!r}): {layer!r} is not a subclass of AttentionLayer")
        taken = MECHANISMS.get(name)
        if taken is not None and (taken.layer.__module__, taken.layer.__qualname__) != (
            layer.__module__,
            layer.__qualname__,
        ):
            raise InputError(f"name={name!r} is taken by {taken.layer.__module__}.{taken.layer.__qualname__}")
        accepted = inspect.signature(layer).parameters
        for option in (*preset, *example):
            if option not in accepted:
                raise unknown(f"option of {layer.__name__}", option, accepted)
        MECHANISMS[name] = Mechanism(
            name, layer, paper, equation, time, memory, state, mixes_tokens, preset, example, summary
        )
        return layer

    return register


def list_attention() -> tuple[Mechanism, ...]:
    """Every mechanism with its paper, equation, costs and abilities."""
    return tuple(MECHANISMS.values())


def dropped_objective(layers: Iterable[Choice]) -> str | None:
    """A sentence that names the mechanisms whose auxiliary objective is off because ``eta`` is not given.

    None where there are no such mechanisms.
    """
    silent = {
        name for name, options in layers if "eta" in get_mechanism(name).options and "eta" not in options
    }
    if not silent:
        return None
    name = min(silent)
    return (
        f"attention {', '.join(map(repr, sorted(silent)))} trains without an auxiliary objective: eta is 0 "
        f"unless it is given. {{{name}: {{eta: 0.1}}}} adds it, {{{name}: {{eta: 0}}}} keeps it out without "
        "this note"
    )


ATTENTION_SPECS = SpecReader(
    argument="attention",
    kind="attention mechanism",
    names=MECHANISMS,
    options_of=lambda name: MECHANISMS[name].options,
    listing="kernel-attention list attention",
)


def get_mechanism(name: str) -> Mechanism:
    """The row with this name; InputError with the nearest names where there is none."""
    ATTENTION_SPECS.require(name)
    return MECHANISMS[name]


def mechanism_name(layer: AttentionLayer) -> str:
    """The name of a layer's mechanism: the name it was made by, or else the one whose preset it has.

    Where several fit, the preset that fixes most options wins. A class outside the table has its own name.
    """
    if layer.mechanism_name:
        return layer.mechanism_name
    rows = [row for row in MECHANISMS.values() if row.layer is type(layer) and layer.has_options(row.preset)]
    return max(rows, key=lambda row: len(row.preset)).name if rows else type(layer).__name__


def create_attention(
    name: str,
    embed_dim: int,
    num_heads: int,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> AttentionLayer:
    """An attention layer by name: ``create_attention("primal", embed_dim=64, num_heads=2, rank=20)``.

    ``device`` and ``dtype`` are those of the parameters, as PyTorch's modules have them.

    Raises:
        InputError: for an unknown name, an option the mechanism does not have, or a value it does not accept.
    """
    return get_mechanism(name).build(embed_dim, num_heads, device=device, dtype=dtype, **options)


def factory_options(factory: AttentionFactory) -> tuple[str, ...]:
    """The names that a class or a function takes after ``embed_dim`` and ``num_heads``."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())[2:]
    except ValueError:  # a function without a signature takes what every layer takes
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(parameter.name for parameter in parameters if parameter.kind in named)


def make_attention(
    factory: AttentionFactory,
    embed_dim: int,
    num_heads: int,
    known: Mapping[str, Any],
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> AttentionLayer:
    """The layer that a class or a function makes.

    Args:
        factory: called as ``factory(embed_dim, num_heads, **options)``.
        embed_dim: model width d.
        num_heads: heads of the layer.
        known: options that are given where the factory has them.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Raises:
        InputError: for a factory that cannot be called so, or gives anything but a layer of this width.
    """
    if isinstance(factory, type) and not issubclass(factory, AttentionLayer):
        raise InputError(f"attention={factory!r} is not a subclass of AttentionLayer")
    accepted = factory_options(factory)
    where = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
    given = {name: value for name, value in {**known, **where}.items() if name in accepted}
    try:
        inspect.signature(factory).bind(embed_dim, num_heads, **given)
    except ValueError:
        pass
    except TypeError as error:
        raise InputError(
            f"attention={factory!r} cannot be called as attention(embed_dim, num_heads): {error}"
        ) from None
    layer = factory(embed_dim, num_heads, **given)
    if not isinstance(layer, AttentionLayer) or layer.embed_dim != embed_dim:
        raise InputError(
            f"attention={factory!r} made {type(layer).__name__}, expected an AttentionLayer of "
            f"embed_dim={embed_dim}"
        )
    return layer.to(device=device, dtype=dtype)


def layer_specs(attention: AttentionSpec | Sequence[AttentionSpec], num_layers: int) -> list[Choice]:
    """(name, options) for every layer: one spec serves all layers, a list gives one for each.

    >>> [tuple(choice) for choice in layer_specs(["softmax", {"primal": {"rank": 30}}], 2)]
    [('softmax', {}), ('primal', {'rank': 30})]

    Raises:
        InputError: for an unknown name or option, or a list without one entry per layer.
    """
    return ATTENTION_SPECS.read_layers(attention, num_layers)
