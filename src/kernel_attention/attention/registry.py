"""The table of mechanisms: one line each, and layers made by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_attention.attention.base import AttentionLayer
from kernel_attention.attention.primal import PrimalAttention
from kernel_attention.attention.softmax import SoftmaxAttention
from kernel_attention.errors import InputError, unknown

AttentionSpec = str | Mapping[str, Mapping[str, Any] | None] | tuple[str, Mapping[str, Any]]
"""A mechanism: its name, ``{name: options}`` or ``(name, options)``."""


@dataclass(frozen=True)
class Mechanism:
    """A row of the table: a layer class with a preset, and what there is to know before choosing it.

    Costs are per head; N tokens, p head width, s rank.
    """

    name: str
    layer: type[AttentionLayer]
    paper: str
    equation: str
    time: str
    memory: str
    causal: str
    cross: bool
    mixes_tokens: str
    padding: str = "any mask"
    preset: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the arguments a user may set."""
        accepted = inspect.signature(self.layer).parameters
        return tuple(key for key in accepted if key not in {"embed_dim", "num_heads", *self.preset})


_PRIMAL = "Chen et al. 2023, Primal-Attention"

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        Mechanism(
            "softmax", SoftmaxAttention, "Vaswani et al. 2017", "softmax(q k^T / sqrt(p)) v", "N^2 p", "N p",
            causal="yes", cross=True, mixes_tokens="yes", preset={"kernel": "softmax", "symmetric": False},
        ),
        Mechanism(
            "symmetric", SoftmaxAttention, "Teo & Nguyen 2024, kernel PCA", "softmax(q q^T / sqrt(p)) v",
            "N^2 p", "N p",
            causal="yes", cross=False, mixes_tokens="yes", preset={"kernel": "softmax", "symmetric": True},
        ),
        Mechanism(
            "cosine", SoftmaxAttention, "released code of Primal-Attention",
            "phi(q) phi(k)^T v, phi(x) = x/||x||", "N p^2", "N p",
            causal="yes", cross=True, mixes_tokens="yes",
            preset={"kernel": "cosine", "symmetric": False, "dropout": 0.0},
        ),
        Mechanism(
            "primal", PrimalAttention, _PRIMAL, "W_c [W_e|X^T phi(q); W_r|X^T phi(k)]", "N p s", "N s",
            causal="yes", cross=False, mixes_tokens="data-dependent or causal forms only",
        ),
    )
}  # fmt: skip


def list_attention() -> tuple[Mechanism, ...]:
    """Every mechanism with its paper, equation, costs and abilities."""
    return tuple(MECHANISMS.values())


def get_mechanism(name: str) -> Mechanism:
    """The row of that name; InputError with the nearest names otherwise."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise unknown("attention mechanism", name, MECHANISMS)
    return MECHANISMS[name]


def create_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> AttentionLayer:
    """An attention layer by name: ``create_attention("primal", embed_dim=64, num_heads=2, rank=20)``.

    Raises:
        InputError: for an unknown name, an option the mechanism does not have, or a value it does not accept.
    """
    mechanism = get_mechanism(name)
    _check_options(mechanism, options)
    return mechanism.layer(embed_dim, num_heads, **{**mechanism.preset, **options})


def _check_options(mechanism: Mechanism, options: Mapping[str, Any]) -> None:
    for option in options:
        if option not in mechanism.options:
            raise unknown(f"option of attention {mechanism.name!r}", option, mechanism.options)


def layer_specs(
    attention: AttentionSpec | Sequence[AttentionSpec], num_layers: int
) -> list[tuple[str, dict[str, Any]]]:
    """(name, options) for every layer: one spec serves all layers, a list gives one for each.

    >>> layer_specs(["softmax", {"primal": {"rank": 30}}], 2)
    [('softmax', {}), ('primal', {'rank': 30})]
    """
    if isinstance(attention, list):
        if len(attention) != num_layers:
            raise InputError(
                f"attention={attention!r} lists {len(attention)} mechanisms for num_layers={num_layers}"
            )
        return [_spec(entry) for entry in attention]
    return [_spec(attention) for _ in range(num_layers)]


def _spec(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, options),) = entry.items()
    elif isinstance(entry, tuple) and len(entry) == 2:
        name, options = entry
    else:
        name, options = entry, {}
    options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise InputError(f"attention={entry!r} must be a name, {{name: options}} or (name, options)")
    _check_options(get_mechanism(name), options)  # here too: create_attention could not take a size twice
    return name, dict(options)
