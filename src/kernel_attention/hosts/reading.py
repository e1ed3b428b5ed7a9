"""The facts that a host's attention module states: sizes, dropout, longest sequence."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts.known import HostedAttention, takes_cache
from kernel_attention.hosts.projections import Source, projections, require_own_weights

_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_HEAD_WIDTHS = ("head_dim", "attention_head_size")
_WIDTHS = ("all_head_size", "embed_dim", "hidden_size")  # of all heads together
_CAUSAL = ("is_causal", "is_decoder", "causal")
_DROPOUTS = ("attn_drop", "attention_dropout", "dropout")
_OWN_SIZES = ("max_len", "grid_size", "class_tokens")  # attributes of our models


@dataclass(frozen=True)
class HostDescription:
    """The values that a new layer takes over; ``sources`` has our names, such as ``q_proj.weight``."""

    embed_dim: int
    num_heads: int
    dropout: float
    sources: Mapping[str, Source]
    like: Tensor

    @property
    def bias(self) -> bool:
        """True where any projection has a bias."""
        return any(name.endswith(".bias") for name in self.sources)


def describe(module: nn.Module, parent: nn.Module) -> HostDescription:
    """Read a module that a host's class matches, one of our layers, or one of our layers in a host.

    Raises:
        InputError: for a module that is not a plain map from d to d features, or whose projections cannot
            be carried.
    """
    inner = module.attention if isinstance(module, HostedAttention) else module
    require_own_weights(inner, parent)
    sources = dict(projections(inner, parent))
    if isinstance(module, nn.MultiheadAttention):
        _require_plain(module)
    embed_dim = (
        inner.embed_dim if isinstance(inner, AttentionLayer) else sources["q_proj.weight"].tensor.size(1)
    )
    out = sources.get("out_proj.weight")
    if out is not None and out.tensor.size(0) != embed_dim:
        raise InputError(
            f"{type(module).__name__} maps {embed_dim} features to {out.tensor.size(0)}, expected as many"
        )
    like = next((source.parameter for source in sources.values()), None)
    if like is None:
        like = next(inner.parameters())
    return HostDescription(embed_dim, _heads(module), _dropout(module, parent), sources, like)


def describe_heads(module: nn.Module) -> HostDescription:
    """Read a module of which only the function between queries, keys and values is replaced."""
    num_heads = _heads(module)
    like = next(module.parameters(), torch.empty(0))  # a quantized module has no parameters
    return HostDescription(_all_heads(module, num_heads), num_heads, _dropout(module, module), {}, like)


def is_decoder(module: nn.Module, owners: Sequence[nn.Module]) -> bool:
    """True where a host's model is causal: the nearest of the host and its owners that says so decides.

    There are several words for it. A host without any of them that takes a cache is a decoder: the cache is
    of no use to others.
    """
    stated = _statements(module, owners)
    return any(stated.values()) or (not stated and takes_cache(module))


def may_cache(module: nn.Module, owners: Sequence[nn.Module]) -> bool:
    """True where a host's model may hand it a cache of keys and values."""
    stated = _statements(module, owners)
    return any(stated.values()) or ("is_decoder" not in stated and takes_cache(module))


def _statements(module: nn.Module, owners: Sequence[nn.Module]) -> dict[str, bool]:
    stated: dict[str, bool] = {}
    for part in (module, *reversed(owners)):
        for holder in (part, getattr(part, "config", None)):
            for name in _CAUSAL:
                if isinstance(value := getattr(holder, name, None), bool):
                    stated.setdefault(name, value)
    return stated


def known_sizes(owners: Sequence[nn.Module]) -> dict[str, Any]:
    """The facts about tokens that the nearest of a layer's owners (outermost first) states, as options.

    Returns:
        ``max_len``, and for a vision model ``grid_size`` and ``class_tokens``, as far as they are known.
    """
    for owner in reversed(owners):
        if sizes := _own_sizes(owner) or _timm_sizes(owner) or _transformers_sizes(owner):
            return sizes
    return next((sizes for owner in reversed(owners) if (sizes := _configured_length(owner))), {})


def _own_sizes(owner: nn.Module) -> dict[str, Any]:
    if not isinstance(getattr(owner, "max_len", None), int):
        return {}
    return {name: getattr(owner, name) for name in _OWN_SIZES if hasattr(owner, name)}


def _timm_sizes(owner: nn.Module) -> dict[str, Any]:
    grid = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
    if not isinstance(grid, tuple):
        return {}
    class_tokens = getattr(owner, "num_prefix_tokens", 0)
    return {"max_len": math.prod(grid) + class_tokens, "grid_size": grid, "class_tokens": class_tokens}


def _transformers_sizes(owner: nn.Module) -> dict[str, Any]:
    embeddings = getattr(owner, "embeddings", None)
    for name in ("position_embeddings", "position_embedding"):
        table = getattr(embeddings, name, None)
        if isinstance(table, nn.Embedding):
            return {"max_len": table.num_embeddings}
        if isinstance(table, nn.Parameter) and table.dim() == 3:
            return {"max_len": table.size(1), **_image_grid(embeddings, table.size(1))}
    return {}


def _configured_length(owner: nn.Module) -> dict[str, Any]:
    """The length in the config, for transformers' models that keep their positions elsewhere: BART, OPT."""
    longest = getattr(getattr(owner, "config", None), "max_position_embeddings", None)
    return {"max_len": longest} if isinstance(longest, int) else {}


def _image_grid(embeddings: object, num_tokens: int) -> dict[str, Any]:
    patches = getattr(embeddings, "patch_embeddings", None)
    image, patch = (getattr(patches, name, None) for name in ("image_size", "patch_size"))
    if not isinstance(image, Sequence) or not isinstance(patch, Sequence):
        return {}
    grid = (image[0] // patch[0], image[1] // patch[1])
    return {"grid_size": grid, "class_tokens": num_tokens - math.prod(grid)}


def _require_plain(module: nn.MultiheadAttention) -> None:
    if not module._qkv_same_embed_dim:
        raise InputError(
            f"MultiheadAttention with kdim={module.kdim} and vdim={module.vdim} cannot be replaced, "
            f"expected both to be embed_dim={module.embed_dim}"
        )
    if module.add_zero_attn:
        raise InputError("MultiheadAttention with add_zero_attn=True cannot be replaced")


def _heads(module: nn.Module) -> int:
    for owner in (module, getattr(module, "config", None)):
        for name in _HEADS:
            if isinstance(heads := getattr(owner, name, None), int):
                return heads
    raise InputError(f"{type(module).__name__} does not say how many heads it has")


def _all_heads(module: nn.Module, num_heads: int) -> int:
    """Width of all heads together."""
    config = getattr(module, "config", None)
    for owner in (module, config):
        for name in _HEAD_WIDTHS:
            if isinstance(width := getattr(owner, name, None), int):
                return width * num_heads
        for name in _WIDTHS:
            if isinstance(width := getattr(owner, name, None), int):
                return width // num_heads * num_heads
    raise InputError(f"{type(module).__name__} does not say how wide its heads are")


def _dropout(module: nn.Module, parent: nn.Module) -> float:
    """Probability of dropping an attention weight; our encoder keeps one dropout for the whole layer."""
    for owner in (module, parent) if isinstance(module, AttentionLayer) else (module,):
        for name in _DROPOUTS:
            value = getattr(owner, name, None)
            if isinstance(value, nn.Dropout):
                return value.p
            if isinstance(value, float):
                return value
    return 0.0
