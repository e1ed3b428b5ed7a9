"""Whole models as contenders: our models, whose layers attend by a contender, and their peers.

What a model has around its layers (embedding, positions, classifier, loss) is the same for every contender.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.models import (
    CausalLanguageModel,
    EncoderLayer,
    SequenceClassifier,
    TokenClassifier,
    VisionTransformer,
)
from kernel_attention_lab.benchmarking.layers import as_attention, sum_of_penalties
from kernel_attention_lab.benchmarking.plans import BODIES, Setting

_IMAGE_CLASSES = 1000  # of ImageNet
_FINE_GRID = 14  # rows of patches from which the patches are those of ImageNet models
_CHANNELS, _SERIES_CLASSES = 12, 9  # of JapaneseVowels
_BYTES, _TEXT_CLASSES = 256, 2  # of Long Range Arena's Text
_WORDS = 10_000  # of Penn Treebank


class WholeModel(nn.Module):
    """A model, and the sizes of its input and output for one case.

    Args:
        model: (B, *input_size) -> (B, *output_size) in training.
        input_size: of one case.
        output_size: of one case, in training.
        vocabulary_size: number of different tokens, where the input is whole numbers; 0: it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        input_size: tuple[int, ...],
        output_size: tuple[int, ...],
        vocabulary_size: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.input_size = input_size
        self.output_size = output_size
        self.vocabulary_size = vocabulary_size

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_size) -> (B, *output_size) in training."""
        return self.model(x)

    def draw_input(self, batch_size: int, **where: Any) -> Tensor:
        """Random cases, (B, *input_size)."""
        size = (batch_size, *self.input_size)
        if self.vocabulary_size:
            return torch.randint(self.vocabulary_size, size, device=where.get("device"))
        return torch.randn(size, **where)

    def penalty(self) -> Tensor | None:
        """The term of the loss of the layers' attention."""
        return sum_of_penalties(self.model.modules())


class LanguageModel(nn.Module):
    """A causal language model as it is used: its loss in training, else logits of the next token."""

    def __init__(self, model: CausalLanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) whole numbers -> (B,) in training, the same loss for every text; else (B, 1, V)."""
        if self.training:
            return self.model.loss(tokens, tokens.roll(-1, dims=1)).expand(len(tokens))
        return self.model(tokens, last=1)


class TorchEncoderLayer(nn.Module):
    """``torch.nn.TransformerEncoderLayer`` in the place of a layer of ours."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        body = BODIES[setting.body]
        self.layer = nn.TransformerEncoderLayer(
            setting.embed_dim, setting.num_heads, body.feedforward_factor * setting.embed_dim, body.dropout,
            activation="gelu", batch_first=True, norm_first=body.norm_first,
        )  # fmt: skip

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, d) -> (B, N, d); there is no padding here."""
        future = None
        if is_causal:
            future = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device, dtype=x.dtype)
        return self.layer(x, src_mask=future, is_causal=is_causal)


def whole_model(attentions: Sequence[nn.Module], setting: Setting) -> WholeModel:
    """The model of the setting whose layers have these attentions, first to last, or are these layers."""
    made = _MODELS[setting.body](setting, len(attentions))
    (layers,) = (each for each in made.modules() if isinstance(each, nn.ModuleList) and _is_stack(each))
    for index, attention in enumerate(attentions):
        layer = layers[index]
        assert isinstance(layer, EncoderLayer)
        if isinstance(attention, TorchEncoderLayer):
            attention.layer.norm1.eps = attention.layer.norm2.eps = layer.norm1.eps
            layers[index] = attention
        else:
            layer.attention = as_attention(attention, setting.embed_dim)
    return made


def _is_stack(layers: nn.ModuleList) -> bool:
    return all(isinstance(layer, EncoderLayer) for layer in layers)


def _sizes(setting: Setting, num_layers: int) -> dict[str, Any]:
    body = BODIES[setting.body]
    return {
        "embed_dim": setting.embed_dim,
        "num_heads": setting.num_heads,
        "num_layers": num_layers,
        "feedforward_dim": body.feedforward_factor * setting.embed_dim,
        "dropout": body.dropout,
    } | ({"norm_first": body.norm_first} if setting.body != "vit" else {})


def _vision_transformer(setting: Setting, num_layers: int) -> WholeModel:
    image_size, patch_size = _pixels(setting)
    model = VisionTransformer(
        image_size, patch_size, _IMAGE_CLASSES, pooling="class" if setting.class_tokens else "mean",
        **_sizes(setting, num_layers),
    )  # fmt: skip
    return WholeModel(model, (3, image_size, image_size), (_IMAGE_CLASSES,))


def _series_classifier(setting: Setting, num_layers: int) -> WholeModel:
    model = SequenceClassifier(
        _CHANNELS, _SERIES_CLASSES, setting.length, "softmax", **_sizes(setting, num_layers)
    )
    return WholeModel(model, (setting.length, _CHANNELS), (_SERIES_CLASSES,))


def _token_classifier(setting: Setting, num_layers: int) -> WholeModel:
    model = TokenClassifier(_BYTES, _TEXT_CLASSES, setting.length, "softmax", **_sizes(setting, num_layers))
    return WholeModel(model, (setting.length,), (_TEXT_CLASSES,), _BYTES)


def _language_model(setting: Setting, num_layers: int) -> WholeModel:
    model = CausalLanguageModel(_WORDS, setting.length, "softmax", **_sizes(setting, num_layers))
    return WholeModel(LanguageModel(model), (setting.length,), (), _WORDS)


_MODELS: dict[str, Callable[[Setting, int], WholeModel]] = {
    "vit": _vision_transformer,
    "series": _series_classifier,
    "tokens": _token_classifier,
    "language": _language_model,
}


def timm_vision_transformer(setting: Setting) -> WholeModel:
    """timm's vision transformer of the same sizes; DeiT-tiny at 197 tokens of width 192 in 3 heads."""
    image_size, patch_size = _pixels(setting)
    class_token = bool(setting.class_tokens)
    model = importlib.import_module("timm.models.vision_transformer").VisionTransformer(
        image_size, patch_size, num_classes=_IMAGE_CLASSES, embed_dim=setting.embed_dim,
        depth=BODIES["vit"].num_layers, num_heads=setting.num_heads, class_token=class_token,
        global_pool="token" if class_token else "avg", fc_norm=False,
    )  # fmt: skip
    return WholeModel(model, (3, image_size, image_size), (_IMAGE_CLASSES,))


def _pixels(setting: Setting) -> tuple[int, int]:
    """Sides of the image and of a patch: patches of 16 pixels as on ImageNet, of 4 in images as CIFAR's."""
    patch_size = 16 if setting.grid_size >= _FINE_GRID else 4
    return setting.grid_size * patch_size, patch_size
