"""The projections of a host's attention module under our names, and their copy into a new layer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kernel_attention.core.parameters import is_ordinary
from kernel_attention.errors import InputError

_INPUTS = ("q_proj", "k_proj", "v_proj")
_SEPARATE = (("query", "key", "value"), _INPUTS, ("q_lin", "k_lin", "v_lin"))
# A layer whose queries are its keys, as in symmetric attention, has one projection for both.
_STAND_INS = ("k_proj", "q_proj", "v_proj")
_OUTPUTS = ("out_proj", "o_proj", "out_lin", "proj")
_BEFORE = "replace attention before adapting or quantizing, or merge the adapters (peft: merge_and_unload)"


@dataclass(frozen=True)
class Source:
    """A weight or bias of a host's projection; ``tensor`` is ``parameter``, or a part of a fused one."""

    label: str
    tensor: Tensor
    parameter: Tensor


def projections(module: nn.Module, parent: nn.Module) -> Iterator[tuple[str, Source]]:
    """The module's projections as (``q_proj.weight``, ``q_proj.bias``, ... of ours, source)."""
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        yield from _fused("in_proj_weight", module.in_proj_weight, "weight")
        if module.in_proj_bias is not None:
            yield from _fused("in_proj_bias", module.in_proj_bias, "bias")
    elif isinstance(fused := getattr(module, "qkv", None), nn.Linear):
        yield from _fused("qkv.weight", fused.weight, "weight")
        if fused.bias is not None:
            yield from _fused("qkv.bias", fused.bias, "bias")
        for name in ("q", "k", "v"):  # BEiT and EVA keep the biases apart
            if isinstance(bias := getattr(module, f"{name}_bias", None), nn.Parameter):
                yield f"{name}_proj.bias", Source(f"{name}_bias", bias, bias)
    else:
        names = dict(zip(_INPUTS, separate_names(module) or _INPUTS, strict=True))
        for ours, other in zip(_INPUTS, _STAND_INS, strict=True):
            name = names[ours] if isinstance(getattr(module, names[ours], None), nn.Linear) else names[other]
            yield from _linear(ours, name, getattr(module, name, None))
    if (owner := output_owner(module, parent)) is not None:
        yield from _linear("out_proj", owner[2], getattr(owner[0], owner[1]))


def carry(layer: nn.Module, sources: Mapping[str, Source]) -> tuple[str, ...]:
    """Fill the layer's parameters from the host's where name and shape agree; return the names filled.

    A carried parameter is trainable if its source was. Where a carried projection had no bias, the new bias
    is zero.
    """
    carried = []
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            source = sources.get(name)
            if source is not None and source.tensor.shape == parameter.shape:
                parameter.copy_(source.tensor).requires_grad_(source.parameter.requires_grad)
                carried.append(name)
            elif (
                source is None and name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in sources
            ):
                parameter.zero_()
    return tuple(carried)


def require_own_weights(module: nn.Module, parent: nn.Module) -> None:
    """Refuse a module with a projection whose weight is not simply its own, so that it cannot be carried."""
    if getattr(parent, "base_layer", None) is module:
        raise InputError(f"layers: {_what(parent)} adapts a {type(module).__name__}: {_BEFORE}")
    if (found := foreign_projection(module, parent)) is not None:
        raise InputError(
            f"layers: {type(module).__name__}: {found}, expected an nn.Linear as PyTorch makes it: {_BEFORE}"
        )


def foreign_projection(module: nn.Module, parent: nn.Module) -> str | None:
    """A projection that computes with more than a weight of its own; None: the module has none.

    Such are adapters (LoRA), quantized layers and parametrizations.
    """
    names = ("qkv", *dict.fromkeys(sum(_SEPARATE, ())), *_OUTPUTS)
    children = {name: getattr(module, name, None) for name in names}
    if all(children[name] is None for name in _OUTPUTS):
        children["output.dense"] = getattr(getattr(parent, "output", None), "dense", None)
    for name, child in children.items():
        if not isinstance(child, nn.Module) or isinstance(child, nn.Identity):
            continue
        if parametrize.is_parametrized(child):
            return f"{name} has a parametrization"
        if not is_ordinary(child):
            is_linear_class = type(child).forward is nn.Linear.forward
            weight = f" with a weight of type {type(child.weight).__name__}" if is_linear_class else ""
            return f"{name} is a {_what(child)}{weight}"
    return None


def is_linear(module: object) -> bool:
    """True where the module is an ``nn.Linear``, or an adapter of peft around one."""
    return isinstance(module, nn.Linear) or isinstance(getattr(module, "base_layer", None), nn.Linear)


def separate_names(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of a module's query, key and value projections, where it has three."""
    for names in _SEPARATE:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    return None


def output_owner(module: nn.Module, parent: nn.Module) -> tuple[nn.Module, str, str] | None:
    """Owner, name and label of the output projection, which BERT keeps in a module next to the attention."""
    for name in _OUTPUTS:
        if isinstance(getattr(module, name, None), nn.Linear):
            return module, name, name
    beside = getattr(parent, "output", None)
    if isinstance(beside, nn.Module) and isinstance(getattr(beside, "dense", None), nn.Linear):
        return beside, "dense", "output.dense"
    return None


def _what(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _fused(label: str, parameter: Tensor, kind: str) -> Iterator[tuple[str, Source]]:
    for ours, part in zip(_INPUTS, parameter.detach().chunk(3), strict=True):
        yield f"{ours}.{kind}", Source(f"{label}[{ours[0]}]", part, parameter)


def _linear(ours: str, label: str, linear: object) -> Iterator[tuple[str, Source]]:
    if isinstance(linear, nn.Linear):
        for kind, parameter in linear.named_parameters():
            yield f"{ours}.{kind}", Source(f"{label}.{kind}", parameter, parameter)
