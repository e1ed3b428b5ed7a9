"""Our mechanisms behind the attention interface of Hugging Face transformers.

Most of its attentions make queries, keys and values, turn them by rotary positions, keep them in their cache,
and then call a function by name. A host of this kind keeps its projections, its norms, its positions and its
cache. What is replaced is the function.
"""

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts.known import HostedAttention, needs_masks
from kernel_attention.hosts.masks import (
    causal_hint,
    kept,
    packing_of_mask,
    padding_of_tokens,
    read_attention_mask,
    read_packing,
)
from kernel_attention.tensors.packing import PackedSequences

IMPLEMENTATION = "kernel_attention"
"""The name of our function among the attention implementations of transformers."""

_CALL = "ALL_ATTENTION_FUNCTIONS"  # what the forward of an attention with an interface reads
_LOGIT_BIASES = ("position_bias", "softcap", "s_aux")


class AttentionHeads(HostedAttention):
    """A mechanism between the projections of a host, which are the host's own.

    Args:
        attention: the layer, without its projections.
        dropout: see ``HostedAttention``.
        needs_masks: whether the host is causal by its masks alone.
    """

    def __init__(self, attention: AttentionLayer, dropout: float = 0.0, *, needs_masks: bool = False) -> None:
        super().__init__(attention, dropout)
        self.needs_masks = needs_masks

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        is_causal: bool,
        packing: Mapping[str, Any],
    ) -> Tensor:
        """q (B, h, N, p), k and v (B, g, S, p) of g groups of heads -> (B, N, h, p).

        Queries of a causal host after a cache are one token: N = 1. ``packing`` are the arguments of the host
        by name, among them those that say where several sequences lie in a row.

        Raises:
            InputError: for a mask other than padding, causal and that of packed sequences, and for a cache
                that the mechanism cannot use.
        """
        length, keys = q.size(2), k.size(2)
        if length != keys:
            self._require_other_keys(length, keys, is_causal)
            is_causal = False  # the last token sees all
        padding, packed = None, None
        if attention_mask is not None and attention_mask.dim() == 2:
            padding = padding_of_tokens(attention_mask)
        elif attention_mask is not None:
            keep = kept(attention_mask, true_is_kept=True)[..., :keys]
            if (blocks := packing_of_mask(keep, q.transpose(1, 2))) is not None:
                packed, is_causal = blocks
            else:
                hint = causal_hint(keep, is_causal)
                padding, is_causal = read_attention_mask(keep, len(q), length, hint)
        if q.size(1) != self.num_heads or self.num_heads % k.size(1):
            raise InputError(
                f"{q.size(1)} heads of queries and {k.size(1)} of keys, expected the {self.num_heads} that "
                "the host states, or a part of them for keys"
            )
        groups = self.num_heads // k.size(1)
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if length == keys:
            name = self.attention.mechanism_name
            packed = read_packing(name, q.transpose(1, 2), packing, padding, packed)
        if packed is not None:
            return self._attend_packed(q, k, v, packed, is_causal)
        out = self.attention.attend_heads(q, k, v, attention_mask=padding, is_causal=is_causal)
        return out.transpose(1, 2).contiguous()

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, is_causal: bool
    ) -> Tensor:
        """``forward`` of several sequences in the rows q, k, v (B, h, N, p)."""
        if (reason := self.attention.why_not(packing=True, causal=is_causal)) is not None:
            name = self.attention.mechanism_name
            raise InputError(f"{name}: the host passes packed sequences, but {reason}")
        heads = (packed.unpack_heads(x.transpose(0, 1).flatten(1, 2)[None]) for x in (q, k, v))
        out = self.attention.attend_heads(*heads, attention_mask=packed.attention_mask, is_causal=is_causal)
        return packed.pack(out.transpose(1, 2))[0].unflatten(0, (q.size(0), q.size(2)))

    def _require_other_keys(self, length: int, keys: int, is_causal: bool) -> None:
        """Refuse keys that are not of the queries' tokens where the mechanism needs those.

        A causal host has them from its cache. Another one makes fewer keys than queries, as SegFormer does.
        """
        name = self.attention.mechanism_name
        if not self.attention.reads_queries_alone():
            raise InputError(
                f"past_key_values: {name!r} needs what a cache of keys and values does not hold; call with "
                "use_cache=False"
                if is_causal
                else f"{length} queries and {keys} keys: {name!r} needs as many keys as queries"
            )
        if is_causal and length > 1:
            raise InputError(
                f"{length} queries after a cache of keys and values, expected 1: prefill the prompt at once"
            )


class InterfaceAttention:
    """Hosts of this kind, for ``replace_attention``. The host stays in place."""

    @staticmethod
    def matches(module: nn.Module, parent: nn.Module) -> bool:
        """True where the module calls an attention function by the name in its configuration."""
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        return (
            code is not None
            and _CALL in code.co_names
            and hasattr(module, "config")
            and not any(name in code.co_varnames for name in _LOGIT_BIASES)
        )

    @staticmethod
    def old_of(module: nn.Module) -> nn.Module:
        """The mechanism that is there, or the host where none is."""
        heads = getattr(module, "kernel_attention", None)
        return heads.attention if isinstance(heads, AttentionHeads) else module

    @staticmethod
    def install(module: Any, attention: AttentionLayer, dropout: float) -> None:
        """Let the module call our function; the other modules of its model go on calling theirs."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend_by_mechanism)
        before = getattr(module, "kernel_attention", None)
        alone = before.needs_masks if isinstance(before, AttentionHeads) else needs_masks(module)
        heads = AttentionHeads(attention, dropout, needs_masks=alone)
        module.kernel_attention = heads.train(module.training)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = IMPLEMENTATION


def attend_by_mechanism(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function of the interface. Returns (B, N, h, p), and no weights.

    Args:
        module: the host.
        query: (B, h, N, p).
        key: (B, g, S, p).
        value: (B, g, S, p).
        attention_mask: (B, S), 1 = real token; or (B, 1, N or 1, S), bool (True = attended) or additive.
        scaling: of the logits; None: 1 / sqrt(p), which the mechanisms have.
        is_causal: None: what the module says.
        options: a bias of the logits is refused. Dropout is the mechanism's own, and a sliding window is in
            the mask. ``cu_seq_lens_q``, or ``position_ids`` that begin again, say that several sequences lie
            in a row.
    """
    heads = getattr(module, "kernel_attention", None)
    if not isinstance(heads, AttentionHeads):
        raise InputError(f"{type(module).__name__} has no mechanism; call replace_attention on its model")
    if given := [name for name in _LOGIT_BIASES if options.get(name) is not None]:
        raise InputError(f"the host passes {', '.join(given)}, which no mechanism can apply")
    factor = 1.0 if scaling is None else scaling * math.sqrt(query.size(-1))
    if not math.isclose(factor, 1.0):
        query = query * factor
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if attention_mask is None and heads.needs_masks:
        causal = False
    return heads(query, key, value, attention_mask, causal, options), None
