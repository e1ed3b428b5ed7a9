"""Wrappers that make contenders: of one or several layers, called as x -> y, and whole vision transformers.

Each has a ``penalty()``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.experiments.benchmarking.plans import Setting
from kernel_attention.models import EncoderLayer, VisionTransformer

NUM_LAYERS = 12  # of DeiT, as the classes and the hidden width below
_NUM_OUTPUTS = 1000
_FINE_GRID = 14  # rows of patches from which the patches are those of ImageNet models


class ImageModel(nn.Module):
    """A model of images, with the sizes of its input and output.

    Args:
        model: images (B, C, H, W) -> (B, outputs).
        input_size: (C, H, W).
        num_outputs: outputs.
    """

    def __init__(self, model: nn.Module, input_size: tuple[int, int, int], num_outputs: int) -> None:
        super().__init__()
        self.model = model
        self.input_size = input_size
        self.num_outputs = num_outputs

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs)."""
        return self.model(images)

    def penalty(self) -> Tensor | None:
        """What the attention of the layers adds to the loss."""
        return sum_of_penalties(self.model.modules())


def vision_transformer(attentions: Sequence[nn.Module], setting: Setting) -> ImageModel:
    """Our vision transformer, of the setting's sizes, whose layers have these attentions, first to last."""
    image_size, patch_size = _pixels(setting)
    model = VisionTransformer(
        image_size, patch_size, _NUM_OUTPUTS, embed_dim=setting.embed_dim, num_heads=setting.num_heads,
        num_layers=len(attentions), feedforward_dim=4 * setting.embed_dim,
        pooling="class" if setting.class_tokens else "mean",
    )  # fmt: skip
    layers = [layer for layer in model.layers if isinstance(layer, EncoderLayer)]
    for layer, attention in zip(layers, attentions, strict=True):
        layer.attention = as_attention(attention, setting.embed_dim)
    return ImageModel(model, (3, image_size, image_size), _NUM_OUTPUTS)


def timm_vision_transformer(setting: Setting) -> nn.Module:
    """timm's vision transformer of the same sizes; DeiT-tiny at 197 tokens of width 192 in 3 heads."""
    if setting.body != "vit":
        raise InputError("timm's contender is a whole vision transformer, not a layer")
    image_size, patch_size = _pixels(setting)
    class_token = bool(setting.class_tokens)
    model = importlib.import_module("timm.models.vision_transformer").VisionTransformer(
        image_size, patch_size, num_classes=_NUM_OUTPUTS, embed_dim=setting.embed_dim, depth=NUM_LAYERS,
        num_heads=setting.num_heads, class_token=class_token, global_pool="token" if class_token else "avg",
        fc_norm=False,
    )  # fmt: skip
    return ImageModel(model, (3, image_size, image_size), _NUM_OUTPUTS)


def _pixels(setting: Setting) -> tuple[int, int]:
    """Sides of the image and of a patch: patches of 16 pixels as on ImageNet, of 4 in images as CIFAR's."""
    patch_size = 16 if setting.grid_size >= _FINE_GRID else 4
    return setting.grid_size * patch_size, patch_size


class CausalCall(nn.Module):
    """One of our layers, called with ``is_causal=True``."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        return self.layer(x, is_causal=True)

    def penalty(self) -> Tensor | None:
        """What the layer adds to the loss."""
        return penalty(self.layer)


class Encoder(nn.Module):
    """Attention layers in the pre-norm encoder of the Long Range Arena recipes: hidden 2 d, dropout 0.1.

    Embedding and classifier are left out, because they are the same for all contenders.

    Args:
        attentions: layers x -> y of width d.
        embed_dim: d.
    """

    def __init__(self, attentions: Sequence[nn.Module], embed_dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(as_attention(layer, embed_dim), 2 * embed_dim, dropout=0.1, norm_first=True)
            for layer in attentions
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d) -> (B, N, d)."""
        for layer in self.layers:
            x = layer(x)
        return x

    def penalty(self) -> Tensor | None:
        """The sum of what the layers add to the loss."""
        return sum_of_penalties(self.layers)


def as_attention(layer: nn.Module, embed_dim: int) -> AttentionLayer:
    """A layer x -> y of any library as one of ours."""
    return layer if isinstance(layer, AttentionLayer) else _Foreign(layer, embed_dim)


class _Foreign(AttentionLayer):
    """A layer x -> y of another library."""

    def __init__(self, layer: nn.Module, embed_dim: int) -> None:
        super().__init__(embed_dim, num_heads=1)
        self.layer = layer

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """The foreign layer on x; the other arguments are not read."""
        return self.layer(x)

    def penalty(self) -> Tensor | None:
        """What the layer adds to the loss."""
        return penalty(self.layer)


def penalty(layer: nn.Module) -> Tensor | None:
    """The layer's own share of the loss, None where it has none."""
    own = getattr(layer, "penalty", None)
    return own() if callable(own) else None


def sum_of_penalties(layers: Iterable[nn.Module]) -> Tensor | None:
    """What the attentions of encoder layers add to the loss, None where none does."""
    attentions = [layer.attention for layer in layers if isinstance(layer, EncoderLayer)]
    added = [own for attention in attentions if (own := penalty(attention)) is not None]
    return torch.stack(added).sum() if added else None
