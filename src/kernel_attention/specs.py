"""Specs: how users write a thing with options, as its name or as ``{name: options}``.

Mechanisms, the kernels of support-vector layers, feature maps, and the contenders of a benchmark are all
written this way, in Python, in recipes and on the command line. A list has one entry per layer.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kernel_attention.errors import InputError, unknown

Spec = str | Mapping[str, Mapping[str, Any] | None]
"""A name, or ``{name: options}``."""


class Choice(NamedTuple):
    """A spec after parsing."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class SpecReader:
    """Reads the specs of one kind of thing, and refuses unknown names and options.

    Args:
        argument: the name of the argument that users write, such as ``attention``.
        kind: what a name stands for, such as ``attention mechanism``.
        names: the accepted names. The table is read at every use, so it may grow.
        options_of: returns the accepted options of a name.
        listing: the command or call that lists the names, for messages about many names.
        forms: the accepted forms of the argument, for messages.
    """

    argument: str
    kind: str
    names: Collection[str]
    options_of: Callable[[str], Collection[str]]
    listing: str = ""
    forms: str = "a name or {name: options}"

    def read(self, spec: Any) -> Choice:
        """(name, options) of one spec; the options are a new dictionary.

        Raises:
            InputError: for anything but a name or ``{name: options}``, an unknown name, an unknown option.
        """
        choice = self._split(spec)
        self.require(choice.name)
        accepted = self.options_of(choice.name)
        for option in choice.options:
            if option not in accepted:
                raise unknown(f"option of {self.argument} {choice.name!r}", option, accepted)
        return choice

    def require(self, name: Any) -> None:
        """InputError with the nearest names unless ``name`` is accepted."""
        if not isinstance(name, str) or name not in self.names:
            raise unknown(self.kind, name, self.names, listing=self.listing)

    def read_layers(self, specs: Any, num_layers: int) -> list[Choice]:
        """(name, options) for every layer: one spec serves all layers, a list has one for each.

        Raises:
            InputError: as ``read``, and for a list of another length.
        """
        return [self.read(spec) for spec in self.per_layer(specs, num_layers)]

    def per_layer(self, specs: Any, num_layers: int) -> list[Any]:
        """The unread spec of every layer; InputError for a list of another length."""
        if not isinstance(specs, list):
            return [specs] * num_layers
        if len(specs) != num_layers:
            raise InputError(
                f"{self.argument}={specs!r} lists {len(specs)} entries for num_layers={num_layers}"
            )
        return specs

    def _split(self, spec: Any) -> Choice:
        if isinstance(spec, str):
            return Choice(spec, {})
        if isinstance(spec, Mapping) and len(spec) == 1:
            ((name, options),) = spec.items()
            if isinstance(name, str) and isinstance(options, Mapping | None):
                return Choice(name, dict(options or {}))
        raise InputError(f"{self.argument}={spec!r} must be {self.forms}")
