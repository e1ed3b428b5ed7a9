"""Whole vision transformers as contenders: ours with any attention in its layers, and timm's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.experiments.benchmarking.layers import as_attention, sum_of_penalties
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
