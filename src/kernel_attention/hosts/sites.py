"""The attention layers of a model: where they are, how they are called, and which of them a key names."""

import ast
import functools
import inspect
import operator
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError, unknown
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.known import (
    HostedAttention,
    TimmAttention,
    TorchAttention,
    TransformersAttention,
)

_ROLES = ("query", "key")  # the first two arguments of nn.MultiheadAttention


@functools.cache
def reads_other_tokens(owner: type, name: str) -> bool | None:
    """True where modules of this class call their attention ``name`` with other keys than queries.

    The attention is called as an ``nn.MultiheadAttention``. None where the source does not say.
    """
    found: list[bool] = []
    for cls in owner.__mro__[: owner.__mro__.index(nn.Module)]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # made in a session, or by a program
            continue
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                reader = _Reader(name)
                reader.visit(function)
                found += reader.differ
    return any(found) if found else None


class _Reader(ast.NodeVisitor):
    """The calls of ``self.<name>`` in a function, with what its variables hold at that place."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, str] = {}  # of variables: where two are equal, they hold the same tensor
        self.differ: list[bool] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            parts = value.elts if isinstance(value, ast.Tuple) else []
            if len(parts) == len(target.elts):
                held = [self._value(part) for part in parts]
            else:
                held = [f"{self._place(value)}[{index}]" for index in range(len(target.elts))]
            for part, holds in zip(target.elts, held, strict=True):
                if isinstance(part, ast.Name):
                    self.values[part.id] = holds
        elif isinstance(target, ast.Name):
            self.values[target.id] = self._value(value)

    def _value(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return self.values.get(node.id, node.id)
        return self._place(node)

    @staticmethod
    def _place(node: ast.expr) -> str:
        """One evaluation of an expression; another one, elsewhere, may give another tensor."""
        return f"{node.lineno}:{node.col_offset}"

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = node.func
        if not (isinstance(called, ast.Attribute) and called.attr == self.name):
            return
        if not (isinstance(called.value, ast.Name) and called.value.id == "self"):
            return
        given = dict(zip(_ROLES, node.args, strict=False))
        given |= {word.arg: word.value for word in node.keywords if word.arg in _ROLES}
        if len(given) == len(_ROLES) and not any(isinstance(part, ast.Starred) for part in given.values()):
            first, second = (given[role] for role in _ROLES)
            same = self._value(first) == self._value(second) or ast.dump(first) == ast.dump(second)
            self.differ.append(not same)


HostClass = (
    type[TorchAttention] | type[TimmAttention] | type[TransformersAttention] | type[InterfaceAttention]
)

_HOSTS: tuple[HostClass, ...] = (TorchAttention, TimmAttention, TransformersAttention, InterfaceAttention)

LayerKey = int | str | tuple[int | str, ...]

_PATTERN = re.compile(r"all|(first|last)(?:-([1-9]\d*))?")
_INDEX = re.compile(r"-?\d+")
_ACCEPTED = (
    "an index, 'all', 'first', 'last', 'first-K', 'last-K', a module's name, "
    "or several of these such as (0, 2) or '0,2'"
)
_CROSS = re.compile(r"cross|multihead_attn|encoder_attn")


@dataclass
class Site:
    """An attention layer in a model.

    Attributes:
        path: dotted name.
        module: the attention module.
        owners: the modules around it, the model first.
        host_class: the class of its replacement; None for a layer of ours, and for one that is in a host
            already.
        cross: whether it is cross-attention, which has no index.
        places: every (parent, name) that holds the module.
    """

    path: str
    module: nn.Module
    owners: tuple[nn.Module, ...]
    host_class: HostClass | None
    cross: bool
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def find_sites(model: nn.Module) -> list[Site]:
    """All attention layers that can be replaced, in the order of definition; a shared layer counts once."""
    sites: dict[int, Site] = {}
    for site in _walk(model, (model,), ""):
        sites.setdefault(id(site.module), site).places.append((site.owners[-1], site.path.rpartition(".")[2]))
    return list(sites.values())


def why_none(model: nn.Module) -> str | None:
    """Why the first attention of the model cannot be replaced; None where the model has no attention."""
    for module in model.modules():
        if "attention" in type(module).__name__.lower() and (reason := TransformersAttention.why_not(module)):
            return reason
    return None


def select(key: object, sites: Sequence[Site]) -> list[Site]:
    """The layers that a key names: an index, a pattern, a module's dotted name, or several of these.

    Raises:
        InputError: for a key that names no layer, or a module that holds more than one.
    """
    numbered = [site for site in sites if not site.cross]
    if isinstance(key, tuple) and key:
        found = {site.path: site for part in key for site in select(part, sites)}
        return [site for site in sites if site.path in found]
    if isinstance(key, str):
        if match := _PATTERN.fullmatch(key):
            return _by_pattern(key, match, numbered)
        parts = tuple(part.strip() for part in key.split(",") if part.strip())
        if len(parts) > 1:
            return select(parts, sites)
        if _INDEX.fullmatch(key) and not any(site.path.partition(".")[0] == key for site in sites):
            return select(int(key), sites)
        return [_by_name(key, sites, numbered)]
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise InputError(f"layers: key {key!r} must be {_ACCEPTED}")
    index = operator.index(key)
    if not -len(numbered) <= index < len(numbered):
        raise InputError(
            f"layers: index {index} is out of range; the model has {len(numbered)} attention layers"
        )
    return [numbered[index]]


def _by_pattern(key: str, match: re.Match[str], numbered: list[Site]) -> list[Site]:
    if match[1] is None:
        return numbered
    count = int(match[2] or 1)
    if count > len(numbered):
        raise InputError(f"layers: {key!r} asks for more than the model's {len(numbered)} attention layers")
    return numbered[:count] if match[1] == "first" else numbered[-count:]


def _by_name(name: str, sites: Sequence[Site], numbered: list[Site]) -> Site:
    for site in sites:
        if site.path == name:
            return site
    inside = [site for site in numbered if site.path.startswith(f"{name}.")]
    if not inside:
        error = unknown("layer", name, [site.path for site in sites])
        raise InputError(f"layers: {error}; a key is {_ACCEPTED}")
    if len(inside) > 1:
        raise InputError(
            f"layers: {name!r} holds {len(inside)} attention layers; name one of {_paths(inside)}"
        )
    return inside[0]


def _paths(sites: list[Site]) -> str:
    return ", ".join(site.path for site in sites)


def _is_cross(attention: nn.Module, owner: nn.Module, path: str) -> bool:
    """True where keys and values come from other tokens than the queries.

    The owner's call says so where the attention is called with queries and keys; otherwise the attention says
    so itself. Where there is neither, the names of the attention and of its owner count.
    """
    if isinstance(attention, (nn.MultiheadAttention, TorchAttention)):
        caller: Any = type(owner)
        stated = reads_other_tokens(caller, path.rpartition(".")[2])
    else:
        stated = getattr(attention, "is_cross_attention", None)
    if isinstance(stated, bool):
        return stated
    return named_cross(path)


def named_cross(path: str) -> bool:
    """True where an attention, or the module around it, has a name of cross-attention."""
    return _CROSS.search(".".join(path.split(".")[-2:])) is not None


def _walk(module: nn.Module, owners: tuple[nn.Module, ...], prefix: str) -> Iterator[Site]:
    for name, child in module._modules.items():  # named_children() lists a shared module only once
        if child is None:
            continue
        path = f"{prefix}{name}"
        host_class = next((host for host in _HOSTS if host.matches(child, module)), None)
        cross = _is_cross(child, module, path)
        if host_class in (TransformersAttention, InterfaceAttention) and cross:
            continue  # its call has key-value caches
        if host_class is not None or isinstance(child, (AttentionLayer, HostedAttention)):
            yield Site(path, child, owners, host_class, cross)
        else:
            yield from _walk(child, (*owners, child), f"{path}.")
