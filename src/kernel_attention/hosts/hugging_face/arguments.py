"""The arguments of transformers' calls that our models read, and those that they refuse by name.

Legend: B texts, N tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.hosts.masks import PACKING, along_rows, padding_of_tokens, read_packing, verify
from kernel_attention.tensors.packing import PackedSequences

_PACKED = "this model reads no packed texts: give every text a row of its own, and attention_mask"

# Switches of transformers' signatures for outputs and work that a model here does not have: off, they ask
# for nothing.
_SWITCHES = frozenset(
    (
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_loss"),
        *("use_cache", "use_mems", "interpolate_pos_encoding"),
    )
)
_REASONS = {
    "output_attentions": "most mechanisms have no attention weights; see kernel_matrix of the layers",
    "token_type_ids": "this model has no embeddings of segments; accepted: zeros",
    "is_causal": "the model decides which tokens a token reads",
    **dict.fromkeys(PACKING, _PACKED),
}


def refuse_others(model: Any, options: Mapping[str, Any], is_causal: bool | None = None) -> None:
    """InputError for an argument that the model does not read and that could change its result.

    None asks for nothing, nor does a switch that is off; a misspelt name is no switch.

    Args:
        model: of transformers. What the options lack as None, its configuration says.
        options: by name.
        is_causal: whether a token reads only those up to it; None: the model has no tokens in an order.
    """
    options = {"output_attentions": getattr(model.config, "output_attentions", None)} | {
        name: value for name, value in options.items() if value is not None
    }
    for name, value in options.items():
        if value is None or name == "num_items_in_batch" or (name in _SWITCHES and value is False):
            continue
        if name == "is_causal" and value is is_causal:
            continue
        if name == "token_type_ids" and isinstance(value, Tensor) and not bool(value.any()):
            continue
        shown = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        reason = _REASONS.get(name, "this model has no such argument; accepted: None")
        raise InputError(f"{type(model).__name__}: {name} is {shown}, but {reason}")


def said(value: bool | None, default: bool | None) -> bool:
    """A switch of a call, or what the configuration says."""
    return bool(default if value is None else value)


def read_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The numbers of the tokens (B, N), or the embedded tokens (B, N, d).

    Raises:
        InputError: for both, none, or the one in the place of the other.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "none" if input_ids is None else "both"
        raise InputError(f"expected input_ids or inputs_embeds, got {given} of them")
    if input_ids is not None:
        if input_ids.is_floating_point():
            raise InputError(f"input_ids has dtype {input_ids.dtype}, expected whole numbers")
        return input_ids
    assert inputs_embeds is not None
    if inputs_embeds.dim() != 3 or not inputs_embeds.is_floating_point():
        raise InputError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)} and dtype {inputs_embeds.dtype}, expected "
            "floating-point numbers of shape (B, N, d)"
        )
    return inputs_embeds


def read_padding(attention_mask: Tensor | None, tokens: Tensor, continues: bool = False) -> Tensor | None:
    """The real tokens among (B, N), as booleans.

    ``attention_mask`` is (B, N), 1 = real token; where tokens come before (``continues``), those may be in
    front.

    Raises:
        InputError: for another shape, such as a mask over pairs, and for other numbers, such as those of
            packed texts.
    """
    if attention_mask is None:
        return None
    batch, length = tokens.shape[:2]
    shape = tuple(attention_mask.shape)
    fits = len(shape) == 2 and (shape[1] >= length if continues else shape[1] == length)
    if not fits or shape[0] != batch:
        raise InputError(
            f"attention_mask has shape {shape}, expected {(batch, length)}: 1 for a real token, 0 for padding"
        )
    return padding_of_tokens(attention_mask)[:, -length:]


def without_padding(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens, 0 at padding: the number of a padding token may be any."""
    if mask is None:
        return tokens
    return tokens.masked_fill(~mask if tokens.dim() == 2 else ~mask[..., None], 0)


def check_positions(
    name: str, positions: Tensor | None, tokens: Tensor, mask: Tensor | None, start: int | Tensor = 0
) -> None:
    """InputError for positions, (B, N), (1, N) or (N,), that do not count the real tokens of every text from
    0 on.

    ``start`` are the real tokens before these, one number or (B,).
    """
    if positions is None:
        return
    batch, length = tokens.shape[:2]
    if not along_rows(positions, tokens):
        raise InputError(
            f"{name} has shape {tuple(positions.shape)}, expected {(batch, length)} or (1, {length})"
        )
    real = torch.ones(batch, length, dtype=torch.bool, device=tokens.device) if mask is None else mask
    first = start[:, None] if isinstance(start, Tensor) else start
    counted = real.cumsum(dim=1) - 1 + first
    verify(
        ((positions == counted) | ~real).all(),
        f"{name} does not count the tokens of every text, 0, 1, 2, ..., as this model does",
    )


def read_packed(
    name: str, positions: Tensor | None, tokens: Tensor, mask: Tensor | None, packing: Mapping[str, Any]
) -> PackedSequences | None:
    """The texts that lie end to end in the rows of tokens (B, N, ...); None: every row is one text.

    ``positions`` are ``position_ids``, (B, N), (1, N) or (N,), which begin at 0 in every text, and
    ``packing`` the other arguments that say where texts begin. Texts in a row have no padding.

    Raises:
        InputError: for arguments that contradict one another.
    """
    if positions is not None and not along_rows(positions, tokens):
        return None  # ``check_positions`` refuses them
    packed = read_packing(name, tokens, {**packing, "position_ids": positions}, mask)
    if packed is not None and positions is not None:
        counted = packed.place.view(tokens.shape[:2])
        verify((positions == counted).all(), "position_ids does not count the tokens of every text from 0 on")
    return packed


def read_kept(logits_to_keep: int | Tensor | None) -> slice | Tensor:
    """The places whose logits are asked for.

    Raises:
        InputError: for a negative number, and for a tensor that is not a list of places.
    """
    if isinstance(logits_to_keep, Tensor):
        if logits_to_keep.dim() != 1 or logits_to_keep.is_floating_point():
            raise InputError(
                f"logits_to_keep has shape {tuple(logits_to_keep.shape)} and dtype {logits_to_keep.dtype}, "
                "expected places (K,), whole numbers, or how many logits of the end"
            )
        return logits_to_keep
    count = logits_to_keep or 0
    if count < 0:
        raise InputError(f"logits_to_keep={count} must be at least 0 (0: all)")
    return slice(-count, None) if count else slice(None)
