"""Our layers in timm's blocks, and weights of ViT and DeiT from timm's models to ours and back.

timm is not imported. A weight is recognised by its name and shape.
"""

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.hosts.known import TimmAttention
from kernel_attention.mechanisms import AttentionSpec, create_attention, get_mechanism, mechanism_name
from kernel_attention.models import EncoderLayer, VisionTransformer
from kernel_attention.models.vision import NORM_EPS


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
            layer = create_attention(name, dim, num_heads, **{**known, **options}, device=device, dtype=dtype)
            super().__init__(layer, attn_drop, proj_drop=proj_drop)

    return Attention


def _remake(name: str, options: dict[str, Any]) -> Any:
    return timm_attention(name, **options)


copyreg.pickle(_MadeForTimm, lambda made: (_remake, made.recipe))


_MODULES = {"patch_embed.proj": "patches", "norm": "norm", "head": "head"}
_BLOCK = {
    "norm1": ("norm1",),
    "attn.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attn.proj": ("attention.out_proj",),
    "norm2": ("norm2",),
    "mlp.fc1": ("linear1",),
    "mlp.fc2": ("linear2",),
}
_SHOWN = 4  # the keys that an error lists


@dataclass(frozen=True)
class TimmLoading:
    """The outcome of loading weights.

    Attributes:
        new: parameters of ours that keep their own values, because timm has none for them.
        dropped: timm's weights that a layer has no place for, such as the keys of a symmetric layer.
    """

    new: tuple[str, ...]
    dropped: tuple[str, ...]


def load_timm_weights(
    model: VisionTransformer,
    state: Mapping[str, Tensor],
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    head: bool = True,
) -> TimmLoading:
    """Fill a model of ours from the ``state_dict`` of timm's ``VisionTransformer`` (ViT, DeiT), in place.

    A softmax layer then computes what timm's does. A layer of another mechanism takes those of the query,
    key, value and output projections that it has, and keeps the rest of its own.

    Args:
        model: of the same sizes.
        state: timm's names and tensors.
        mean: of the images that the weights were trained on, (C,); see ``VisionTransformer.set_scale``.
            None: the model's scale stays.
        std: their standard deviation, given together with ``mean``.
        head: whether to load the classifier too; False where the classes are others.

    Raises:
        InputError: for a distilled model, and for keys that are missing, unknown or of another shape. The
            model is as before then.
    """
    if (mean is None) != (std is None):
        raise InputError(f"mean={mean!r} and std={std!r} must be given together")
    names = _names(model)
    wanted = {key: value for key, value in state.items() if head or not key.startswith("head.")}
    _check_keys(names, wanted, head)
    shapes = _timm_shapes(model, names)
    _check_shapes(wanted, shapes)
    own = dict(model.named_parameters())
    filled, dropped = [], []
    with torch.no_grad():
        for key, value in wanted.items():
            for ours, part in zip(names[key], value.chunk(len(names[key])), strict=True):
                if ours in own and own[ours].numel() == part.numel():
                    own[ours].copy_(part.reshape(own[ours].shape))
                    filled.append(ours)
                else:
                    dropped.append(ours)
    if mean is not None and std is not None:
        model.set_scale(mean, std)
    return TimmLoading(tuple(name for name in own if name not in filled), tuple(dropped))


def vision_transformer_from_timm(
    host: nn.Module, attention: AttentionSpec | Sequence[AttentionSpec] = "softmax"
) -> VisionTransformer:
    """A model of ours with the sizes, weights and image scale of one of timm's ViT or DeiT models.

    With softmax its logits for images in [0, 1] are those of the host for images that timm has normalised.

    Args:
        host: a timm ``VisionTransformer``. Its dropout rates are not taken over.
        attention: one mechanism for all layers or a list with one per layer; see ``load_timm_weights`` for
            what a mechanism takes from the host.

    Raises:
        InputError: for a model of another kind, and as ``load_timm_weights``.
    """
    state = host.state_dict()
    needed = ("patch_embed.proj.weight", "pos_embed", "blocks.0.mlp.fc1.weight", "head.weight")
    if missing := [key for key in needed if key not in state]:
        raise InputError(
            f"{type(host).__name__} is no ViT or DeiT classifier of timm: it lacks {', '.join(missing)}"
        )
    _require_same_function(host)
    patches: Any = host.patch_embed
    weight = state["head.weight"]
    model = VisionTransformer(
        tuple(patches.img_size),
        patches.patch_size[0],
        weight.size(0),
        attention,
        in_channels=state["patch_embed.proj.weight"].size(1),
        embed_dim=weight.size(1),
        num_heads=host.blocks[0].attn.num_heads,  # type: ignore[union-attr, index]
        num_layers=len(host.blocks),  # type: ignore[arg-type]
        feedforward_dim=state["blocks.0.mlp.fc1.weight"].size(0),
        pooling=_pooling(host),
        device=weight.device,
        dtype=weight.dtype,
    )
    config = getattr(host, "pretrained_cfg", None) or {}
    load_timm_weights(model, state, mean=config.get("mean"), std=config.get("std"))
    return model.train(host.training)


def timm_state_dict(model: VisionTransformer) -> dict[str, Tensor]:
    """The model's weights under timm's names, for ``load_state_dict`` of timm's ``VisionTransformer``.

    timm's models have no image scale: they expect images normalised by ``input_mean`` and ``input_std``.

    Raises:
        InputError: for layers that are not softmax attention with biases.
    """
    own = {name: value.detach() for name, value in model.named_parameters()}
    names = _names(model)
    covered = {ours for parts in names.values() for ours in parts}
    layers = [layer for layer in model.layers if isinstance(layer, EncoderLayer)]
    foreign = [
        f"layers.{index} ({mechanism_name(layer.attention)})"
        for index, layer in enumerate(layers)
        if layer.attention.softmax_reading != "exact"
    ]
    if foreign or set(own) != covered:
        other = foreign or sorted(set(own) ^ covered)
        raise InputError(f"timm has softmax attention with biases only; other parts here: {_few(other)}")
    shapes = _timm_shapes(model, names)
    return {
        key: torch.cat([own[ours].flatten() for ours in parts]).reshape(shapes[key])
        for key, parts in names.items()
    }


def _names(model: VisionTransformer) -> dict[str, tuple[str, ...]]:
    """Our parameters' names by timm's; queries, keys and values are one tensor there."""
    names: dict[str, tuple[str, ...]] = {"pos_embed": ("positions",)}
    if model.class_token is not None:
        names["cls_token"] = ("class_token",)
    modules: dict[str, tuple[str, ...]] = {theirs: (ours,) for theirs, ours in _MODULES.items()}
    for index in range(len(model.layers)):
        for theirs, parts in _BLOCK.items():
            modules[f"blocks.{index}.{theirs}"] = tuple(f"layers.{index}.{ours}" for ours in parts)
    for theirs, parts in modules.items():
        for kind in ("weight", "bias"):
            names[f"{theirs}.{kind}"] = tuple(f"{ours}.{kind}" for ours in parts)
    return names


def _timm_shapes(model: VisionTransformer, names: Mapping[str, tuple[str, ...]]) -> dict[str, torch.Size]:
    """The shapes of timm's tensors in a model of these sizes, whatever its mechanisms."""
    own = dict(model.named_parameters())
    width = model.positions.size(1)
    shapes = {}
    for key, parts in names.items():
        if ".attn." in key:
            rows = width * len(parts)
            shapes[key] = torch.Size((rows, width) if key.endswith("weight") else (rows,))
        elif key in ("cls_token", "pos_embed"):
            shapes[key] = torch.Size((1, own[parts[0]].numel() // width, width))
        else:
            shapes[key] = own[parts[0]].shape
    return shapes


def _check_keys(names: Mapping[str, object], state: Mapping[str, Tensor], head: bool) -> None:
    if any(key in state for key in ("dist_token", "head_dist.weight")):
        raise InputError(
            "state has a distillation token and a second head (dist_token, head_dist): a distilled DeiT has "
            "no counterpart here; accepted are the weights of a ViT or DeiT without distillation"
        )
    missing = [key for key in names if key not in state and (head or not key.startswith("head."))]
    unknown = [key for key in state if key not in names]
    if missing or unknown:
        parts = [f"lacks {_few(missing)}"] * bool(missing) + [f"has unknown {_few(unknown)}"] * bool(unknown)
        raise InputError(f"state is not that of a timm ViT of these sizes: it {' and '.join(parts)}")


def _check_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    wrong = [
        f"{key} is {tuple(value.shape)}, expected {tuple(shapes[key])}"
        for key, value in state.items()
        if value.shape != shapes[key]
    ]
    if wrong:
        raise InputError(f"state does not fit the model: {_few(wrong, '; ')}")


def _require_same_function(host: nn.Module) -> None:
    """InputError where names and shapes agree and the function would not."""
    attention: Any = host.blocks[0].attn  # type: ignore[union-attr, index]
    activation: Any = host.blocks[0].mlp.act  # type: ignore[union-attr, index]
    if not (isinstance(activation, nn.GELU) and activation.approximate == "none"):
        raise InputError(f"{type(host).__name__} has the activation {activation}, expected GELU")
    eps: Any = host.norm.eps if isinstance(host.norm, nn.LayerNorm) else None
    if eps != NORM_EPS:
        raise InputError(
            f"{type(host).__name__} has the final norm {host.norm}, expected LayerNorm with eps={NORM_EPS}"
        )
    if not isinstance(getattr(attention, "num_heads", None), int):
        raise InputError(f"{type(attention).__name__} does not say how many heads it has")


def _pooling(host: nn.Module) -> Literal["class", "mean"]:
    kind, has_token = getattr(host, "global_pool", None), getattr(host, "cls_token", None) is not None
    if kind == "token" and has_token:
        return "class"
    if kind == "avg" and not has_token:
        return "mean"
    raise InputError(
        f"{type(host).__name__} has global_pool={kind!r} {'with' if has_token else 'without'} a class token; "
        "expected 'token' with one, or 'avg' without one"
    )


def _few(items: Sequence[str], separator: str = ", ") -> str:
    rest = len(items) - _SHOWN
    return separator.join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
