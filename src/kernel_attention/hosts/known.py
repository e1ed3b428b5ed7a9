"""Our layers behind the calls of torch's nn.MultiheadAttention, timm, and Hugging Face transformers.

timm and transformers are not imported: a host is recognised by its attributes and its signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts.masks import (
    PACKING,
    causal_hint,
    join_padding,
    kept,
    packing_of_mask,
    padding_of_tokens,
    read_attention_mask,
    read_packing,
)
from kernel_attention.hosts.projections import is_linear, output_owner, separate_names

CACHES = ("past_key_values", "past_key_value")
"""The names that transformers gives a cache of keys and values."""


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host that its own replacement keeps.

    Attributes:
        dropout: of the attention weights.
        is_decoder: whether its model is causal.
        outputs: how many outputs it returns; 0: one tensor; None: not known.
    """

    dropout: float = 0.0
    is_decoder: bool = False
    outputs: int | None = None


class HostedAttention(nn.Module):
    """An attention layer behind another library's call.

    Args:
        attention: the layer.
        dropout: the host's attention dropout, kept for a later replacement. This layer may not use it.

    Attributes:
        call_names: names of the host's positional arguments, but for the first, which are the tokens.
    """

    call_names: tuple[str, ...] = ()

    def __init__(self, attention: AttentionLayer, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = attention
        self.dropout = dropout

    @property
    def embed_dim(self) -> int:
        """Model width d."""
        return self.attention.embed_dim

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.attention.num_heads

    def _bound(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments after the tokens by the names that they have in the host's signature."""
        if len(arguments) > len(self.call_names):
            raise InputError(
                f"the host passes {1 + len(arguments)} arguments by position, expected at most "
                f"{1 + len(self.call_names)} ({', '.join(self.call_names)} after the tokens)"
            )
        given = dict(zip(self.call_names, arguments, strict=False))
        if twice := sorted(given.keys() & named.keys()):
            raise InputError(f"the host passes {', '.join(twice)} twice, by position and by name")
        return {**given, **named}


class TorchAttention(HostedAttention):
    """Replaces an ``nn.MultiheadAttention``.

    Args:
        attention: the layer.
        dropout: see ``HostedAttention``.
        batch_first: whether tensors are (B, N, d) rather than (N, B, d).
    """

    # nn.TransformerEncoderLayer reads these before it takes the fused path, which would bypass this module.
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None

    def __init__(self, attention: AttentionLayer, dropout: float = 0.0, *, batch_first: bool = False) -> None:
        super().__init__(attention, dropout)
        self.batch_first = batch_first

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **host_arguments: Any,
    ) -> tuple[Tensor, None]:
        """The call of nn.MultiheadAttention with its polarity: True in a mask = ignored. Returns no weights.

        Raises:
            InputError: for key and value that differ, nested tensors, a mask that is neither padding nor
                causal, or another argument that is not None.
        """
        _refuse_others(host_arguments)
        if key is not value:
            raise InputError("key and value must be one tensor, because this attention computes both from it")
        if query.is_nested:
            raise InputError("nested tensors are not supported: pass a padded tensor and key_padding_mask")
        context = None if key is query else self._batch_first(key)
        x = self._batch_first(query)
        padding = None
        if key_padding_mask is not None:
            padding = kept(key_padding_mask, true_is_kept=False)
            padding = padding[None] if padding.dim() == 1 else padding
        if attn_mask is not None:
            keep = kept(attn_mask, true_is_kept=False)
            keep = keep[None, None] if keep.dim() == 2 else keep.unflatten(0, (x.size(0), -1))
            masked, is_causal = read_attention_mask(keep, x.size(0), x.size(1), is_causal)
            padding = join_padding(padding, masked)
        y = self.attention(x, context=context, attention_mask=padding, is_causal=is_causal)
        if query.dim() == 2:
            return y[0], None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _batch_first(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    @staticmethod
    def matches(module: nn.Module, parent: nn.Module) -> bool:
        """True where the module can be replaced by one of this class."""
        return isinstance(module, nn.MultiheadAttention)

    @classmethod
    def around(cls, attention: AttentionLayer, host: nn.Module, facts: HostFacts) -> TorchAttention:
        """The layer with the settings of the module it replaces."""
        return cls(attention, facts.dropout, batch_first=bool(host.batch_first))


class TimmAttention(HostedAttention):
    """Replaces a timm attention: one tensor in, one tensor out.

    Args:
        attention: the layer.
        dropout: see ``HostedAttention``.
        proj_drop: dropout of the output, which in timm belongs to the attention.
    """

    call_names: tuple[str, ...] = ("attn_mask", "is_causal")

    def __init__(self, attention: AttentionLayer, dropout: float = 0.0, *, proj_drop: float = 0.0) -> None:
        super().__init__(attention, dropout)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, *arguments: Any, **host_arguments: Any) -> Tensor:
        """(B, N, d) -> (B, N, d).

        Args:
            x: (B, N, d).
            arguments: those of the host by position.
            host_arguments: ``attn_mask`` as in scaled_dot_product_attention (True = attended) and
                ``is_causal``; others must be None.

        Raises:
            InputError: for a mask other than padding and causal, or another argument that is not None, such
                as rotary embeddings, the size of a grid, or the mask of a shifted window.
        """
        given = self._bound(arguments, host_arguments)
        attn_mask, is_causal = given.pop("attn_mask", None), bool(given.pop("is_causal", False))
        _refuse_others(given)
        padding = None
        if attn_mask is not None:
            keep = kept(_mask("attn_mask", attn_mask, (1, 2, 3, 4)), true_is_kept=True)
            keep = keep[(None,) * (4 - keep.dim())]
            padding, is_causal = read_attention_mask(keep, x.size(0), x.size(1), is_causal)
        return self.proj_drop(self.attention(x, attention_mask=padding, is_causal=is_causal))

    @staticmethod
    def matches(module: nn.Module, parent: nn.Module) -> bool:
        """True where the module can be replaced by one of this class."""
        inputs = is_linear(getattr(module, "qkv", None)) or separate_names(module) is not None
        output = is_linear(getattr(module, "proj", None))
        return inputs and output and hasattr(module, "num_heads") and "x" in _parameters(module)

    @classmethod
    def around(cls, attention: AttentionLayer, host: nn.Module, facts: HostFacts) -> TimmAttention:
        """The layer with the settings of the module it replaces."""
        proj_drop = getattr(host, "proj_drop", None)
        rate = proj_drop.p if isinstance(proj_drop, nn.Dropout) else 0.0
        new = cls(attention, facts.dropout, proj_drop=rate)
        new.call_names = positional_names(host)
        return new


class TransformersAttention(HostedAttention):
    """Replaces a Hugging Face self-attention; returns (output, None), or as many outputs as the host.

    Args:
        attention: the layer.
        dropout: see ``HostedAttention``.
        is_causal: whether the host is causal where it receives no mask.
        is_decoder: whether the masks that it receives are causal ones.
        outputs: how many outputs the host returns; 0: one tensor.
    """

    call_names: tuple[str, ...] = ("attention_mask",)

    # Arguments without effect here: those that every module of a model receives ...
    _HARMLESS = frozenset(
        (
            *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
            *("return_dict", "num_items_in_batch", "interpolate_pos_encoding"),
        )
    )
    # ... and those of a host's signature that an encoder leaves at None.
    _KNOWN = _HARMLESS | frozenset(
        (
            *("hidden_states", "attention_mask", "is_causal", "kwargs", "head_mask", "layer_head_mask"),
            *CACHES,
            "key_value_states",
            *("encoder_hidden_states", "encoder_attention_mask"),
        )
    )

    def __init__(
        self,
        attention: AttentionLayer,
        dropout: float = 0.0,
        *,
        is_causal: bool = False,
        is_decoder: bool = False,
        outputs: int = 2,
    ) -> None:
        super().__init__(attention, dropout)
        self.is_causal, self.is_decoder, self.outputs = is_causal, is_decoder, outputs

    def forward(
        self, hidden_states: Tensor, *arguments: Any, **host_arguments: Any
    ) -> Tensor | tuple[Tensor | None, ...]:
        """The call of the host's self-attention.

        Args:
            hidden_states: (B, N, d).
            arguments: those of the host by position.
            host_arguments: ``attention_mask``, (B, N), 1 = real token, or (B, 1, N or 1, N), bool
                (True = attended) or additive: the host's implementations "flash_attention_2", "sdpa" and
                "eager" receive these. Where several sequences lie in a row, ``cu_seq_lens_q``, positions that
                begin again, or a mask of blocks says so. Others must be None, except those without effect
                here.

        Raises:
            InputError: for a mask other than padding, causal and that of packed sequences, a key-value cache,
                or position embeddings.
        """
        given = self._bound(arguments, host_arguments)
        if any(given.get(name) is not None for name in CACHES):
            raise InputError(
                "past_key_values: this attention keeps no key-value cache; call with use_cache=False"
            )
        attention_mask, is_causal = given.pop("attention_mask", None), given.pop("is_causal", None)
        is_causal = self.is_causal if is_causal is None else bool(is_causal)
        packing = {name: given.pop(name, None) for name in PACKING} | {
            "position_ids": given.get("position_ids")
        }
        _refuse_others(given, self._HARMLESS)
        padding, packed = None, None
        if attention_mask is not None:
            _mask("attention_mask", attention_mask, (2, 4))
            if attention_mask.dim() == 2:
                padding = padding_of_tokens(attention_mask)
            else:
                keep = kept(attention_mask, true_is_kept=True)
                if (blocks := packing_of_mask(keep, hidden_states)) is not None:
                    packed, is_causal = blocks
                else:
                    batch, length = hidden_states.shape[:2]
                    hint = causal_hint(keep, is_causal or self.is_decoder)
                    padding, is_causal = read_attention_mask(keep, batch, length, hint)
        name = self.attention.mechanism_name
        packed = read_packing(name, hidden_states, packing, padding, packed)
        if packed is None:
            y = self.attention(hidden_states, attention_mask=padding, is_causal=is_causal)
        else:
            row = hidden_states.flatten(0, 1)[None]
            y = self.attention(row, is_causal=is_causal, cu_seqlens=packed).view_as(hidden_states)
        return (y, *[None] * (self.outputs - 1)) if self.outputs else y

    @staticmethod
    def matches(module: nn.Module, parent: nn.Module) -> bool:
        """True where the module can be replaced by one of this class."""
        if separate_names(module) is None or output_owner(module, parent) is None:
            return False
        parameters = _parameters(module)
        return "hidden_states" in parameters and TransformersAttention._KNOWN.issuperset(parameters)

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Why an attention of transformers cannot be replaced; None for any other module."""
        parameters = _parameters(module)
        projections = [child for child in module.children() if _is_projection(child)]
        if "hidden_states" not in parameters or not projections:
            return None
        name = type(module).__name__
        if positions := [_POSITIONS[key] for key in parameters if key in _POSITIONS]:
            return f"{name} uses {positions[0]}, which no attention here has"
        if odd := next((child for child in projections if not isinstance(child, nn.Linear)), None):
            return f"{name} keeps its projections in {type(odd).__name__}, expected nn.Linear"
        return f"{name} has projections that are not recognised ({_names_of(module, projections)})"

    @classmethod
    def around(cls, attention: AttentionLayer, host: nn.Module, facts: HostFacts) -> TransformersAttention:
        """The layer with the settings of the module it replaces."""
        outputs = 2 if facts.outputs is None else facts.outputs and max(2, facts.outputs)
        is_causal = bool(getattr(host, "is_causal", False)) and not needs_masks(host)
        flags = {"is_causal": is_causal, "is_decoder": facts.is_decoder}
        new = cls(attention, facts.dropout, outputs=outputs, **flags)
        new.call_names = positional_names(host)
        return new


# Arguments by which transformers hands positions to its attentions.
_POSITIONS = {
    "position_embeddings": "rotary positions",
    "alibi": "linear position biases (alibi)",
    "position_bias": "relative positions in the logits",
    "relative_pos": "relative positions in the logits",
}


def _is_projection(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _names_of(module: nn.Module, children: list[nn.Module]) -> str:
    return ", ".join(key for key, child in module.named_children() if child in children)


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(module.forward).parameters


def positional_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments that a module takes by position, but for the first."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in _parameters(module).items() if parameter.kind in kinds)[1:]


def needs_masks(module: nn.Module) -> bool:
    """True where a host of transformers is causal by its masks alone: "eager" does not read ``is_causal``."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", "sdpa") in (None, "eager")


def takes_cache(module: nn.Module) -> bool:
    """True where a cache of keys and values is among the module's arguments."""
    return any(name in _parameters(module) for name in CACHES)


def needed_arguments(module: nn.Module) -> list[str]:
    """Arguments without a default, but for the first, that no replacement of a timm attention can use."""
    named = [p for p in _parameters(module).values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named[1:] if p.default is p.empty and p.name not in TimmAttention.call_names]


def _mask(name: str, mask: object, dimensions: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor):
        raise InputError(f"{name}={mask!r} must be a tensor")
    if mask.dim() not in dimensions:
        shapes = "(B, N) or (B, 1, N, N)" if dimensions == (2, 4) else "(.., N, N)"
        raise InputError(f"{name} has shape {tuple(mask.shape)}, expected {shapes}")
    return mask


def _refuse_others(arguments: dict[str, Any], harmless: frozenset[str] = frozenset()) -> None:
    given = [
        name
        for name, value in arguments.items()
        if name not in harmless and value is not None and value is not False
    ]
    if given:
        raise InputError(f"the host passes {', '.join(given)}, which this attention cannot use")
