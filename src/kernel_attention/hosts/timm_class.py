"""Our layers as a class from which timm builds its blocks."""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.hosts.known import TimmAttention
from kernel_attention.mechanisms import create_attention, get_mechanism


class _MadeForTimm(type):
    """The type of the classes that ``timm_attention`` returns.

    A timm model keeps the class it was made from, so the class must be picklable. Unpickling makes it again
    from the mechanism's name and options.
    """

    recipe: tuple[str, dict[str, Any]]


def timm_attention(name: str, **options: Any) -> type[nn.Module]:
    """A class for ``timm.create_model(..., attn_layer=timm_attention("primal", rank=96))``.

    timm gives every block of a ViT or DeiT this attention. It needs a class; a function or ``partial`` does
    not work. The parameters have the same names as after ``replace_attention``. timm's ``attn_drop`` becomes
    the layer's ``dropout`` where the layer has one.

    Args:
        name: a mechanism of ``list_attention``.
        options: its options.

    Raises:
        InputError: for an unknown name. Also, when the model is made, for an option that the mechanism does
            not have, and for timm's ``qk_norm`` and ``scale_norm``, which act inside the softmax attention.
    """
    accepted = get_mechanism(name).options

    class Attention(TimmAttention, metaclass=_MadeForTimm):
        recipe = (name, options)

        def __init__(
            self,
            dim: int,
            num_heads: int = 8,
            *,
            qkv_bias: bool = False,
            qk_norm: bool = False,
            scale_norm: bool = False,
            proj_bias: bool = True,
            attn_drop: float = 0.0,
            proj_drop: float = 0.0,
            norm_layer: type[nn.Module] | None = None,
            device: torch.device | str | None = None,
            dtype: torch.dtype | None = None,
        ) -> None:
            if qk_norm or scale_norm:
                raise InputError(f"attention {name!r} has no qk_norm and no scale_norm")
            shared = {"dropout": attn_drop, "bias": qkv_bias or proj_bias}
            known = {key: value for key, value in shared.items() if key in accepted}
            layer = create_attention(name, dim, num_heads, **{**known, **options})
            super().__init__(layer, attn_drop, proj_drop=proj_drop)
            self.to(device=device, dtype=dtype)

    return Attention


def _remake(name: str, options: dict[str, Any]) -> Any:
    return timm_attention(name, **options)


copyreg.pickle(_MadeForTimm, lambda made: (_remake, made.recipe))
