"""The vision transformer, with any attention mechanism in each layer, for classes of images and of pixels.

ViT (Dosovitskiy et al. 2021) as DeiT (Touvron et al. 2021) trains it. SymViT is ``attention="symmetric"``.
RPC-SymViT is ``[{"rpc": {"iterations": 4, "lam": 4.0}}] + ["symmetric"] * 11`` (kernel-PCA paper, 4.1).

Legend: B images of C channels and H x W pixels, N patches, K classes, d model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.parameters import Device, draw_normal, reset_submodules
from kernel_attention.errors import InputError, require_positive, require_probability, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms import AttentionSpec
from kernel_attention.models.encoder_layer import EncoderLayer, create_attentions
from kernel_attention.tensors.dropout import Dropout

_DEVIATION = 0.02  # of linear weights, positions and class token at first (DeiT)
NORM_EPS = 1e-6  # of ViT and DeiT


class VisionTransformer(nn.Module):
    """Patch embedding, class token, learnt positions, pre-norm layers, final norm, linear head.

    A mechanism gets what the model knows: the token grid and the class token (``conv2d``), the number of
    tokens (``scaled``, ``primal``), the dropout.

    Args:
        image_size: height and width in pixels, or one number for both; multiples of ``patch_size``.
        patch_size: side of a square patch in pixels.
        num_outputs: classes.
        attention: one mechanism for all layers or a list with one per layer; see ``layer_specs``.
        in_channels: channels C.
        embed_dim: model width d.
        num_heads: heads of every layer.
        num_layers: number of layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: of positions and layers, and of the attention weights where a mechanism has them.
        drop_path: stochastic depth of the last layer; it grows linearly from 0 in the first (DeiT).
        channel_attention: whether channel attention weighs the feed-forward networks' output (FAN); see
            ``EncoderLayer``.
        short_convolution: side K of a depth-wise convolution of each attention's input over the grid of
            patches, K x K taps (the class token passes as it is); 0: none. See ``ShortConvolution``.
        pooling: "class": the head reads a class token in front of the patches; "mean": the patches' mean.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.

    Attributes:
        grid_size: rows and columns of patches.
        class_tokens: tokens in front of them, 1 or 0.
        max_len: the number of tokens.
        input_mean: the training images' mean, (C,); part of the weights, see ``set_scale``.
        input_std: their standard deviation, (C,).

    Raises:
        InputError: for sizes that do not go together, and what ``create_attention`` refuses.
    """

    supports_sharding = False  # every part of a sequence would get the positions of the first part

    class_token: nn.Parameter | None
    input_mean: Tensor
    input_std: Tensor

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch_size: int,
        num_outputs: int,
        attention: AttentionSpec | Sequence[AttentionSpec] = "softmax",
        *,
        in_channels: int = 3,
        embed_dim: int = 192,
        num_heads: int = 3,
        num_layers: int = 12,
        feedforward_dim: int = 768,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        channel_attention: bool = False,
        short_convolution: int = 0,
        pooling: Literal["class", "mean"] = "class",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(
            num_outputs=num_outputs, in_channels=in_channels, embed_dim=embed_dim, num_layers=num_layers,
            feedforward_dim=feedforward_dim,
        )  # fmt: skip
        require_probability(dropout=dropout, drop_path=drop_path)
        if pooling not in ("class", "mean"):
            raise unknown("pooling", pooling, ("class", "mean"))
        self.image_size, self.grid_size = _sizes(image_size, patch_size)
        self.patch_size = patch_size
        self.pooling = pooling
        self._other_sizes: dict[str, Any] = {
            "num_outputs": num_outputs, "attention": attention, "in_channels": in_channels,
            "embed_dim": embed_dim, "num_heads": num_heads, "num_layers": num_layers,
            "feedforward_dim": feedforward_dim, "dropout": dropout, "drop_path": drop_path,
            "channel_attention": channel_attention, "short_convolution": short_convolution,
            "pooling": pooling,
        }  # fmt: skip
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.class_tokens = int(pooling == "class")
        self.max_len = self.class_tokens + self.grid_size[0] * self.grid_size[1]
        require_parameters(
            f"image_size={self.image_size} with patch_size={patch_size} and embed_dim={embed_dim}",
            self.max_len * embed_dim,
            "raise patch_size or lower image_size",
        )
        # The training data's scale is part of the model, so it is loaded with the weights.
        self.register_buffer("input_mean", torch.zeros(in_channels, **where))
        self.register_buffer("input_std", torch.ones(in_channels, **where))
        self.patches = nn.Conv2d(in_channels, embed_dim, patch_size, stride=patch_size, **where)
        token = nn.Parameter(torch.empty(embed_dim, **where)) if self.class_tokens else None
        self.register_parameter("class_token", token)
        self.positions = nn.Parameter(torch.empty(self.max_len, embed_dim, **where))
        self.dropout = Dropout(dropout)
        grid: dict[str, Any] = {"grid_size": self.grid_size, "class_tokens": self.class_tokens}
        known = {"max_len": self.max_len, **grid, "dropout": dropout}
        self.layers = nn.ModuleList(
            EncoderLayer(
                layer, feedforward_dim, dropout, norm_first=True, norm_eps=NORM_EPS,
                drop_path=drop_path * index / max(num_layers - 1, 1), channel_attention=channel_attention,
                short_convolution=short_convolution, **grid, **where,
            )
            for index, layer in enumerate(
                create_attentions(attention, num_layers, embed_dim, num_heads, known, **where)
            )
        )  # fmt: skip
        self.norm = nn.LayerNorm(embed_dim, NORM_EPS, **where)
        self.head = nn.Linear(embed_dim, num_outputs, **where)
        self._draw()

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self.input_mean.zero_()
        self.input_std.fill_(1.0)
        reset_submodules(self)
        self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """DeiT's start, in the place of what the modules drew."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _draw_linear(module)
        for own in (self.class_token, self.positions):
            if own is not None:
                draw_normal(own, _DEVIATION)

    def replace_head(self, num_outputs: int) -> None:
        """Put a new head for ``num_outputs`` classes in the place of the old one, drawn as at first.

        Raises:
            InputError: for a number of classes that is not positive.
        """
        require_positive(num_outputs=num_outputs)
        weight = self.head.weight
        self.head = nn.Linear(self.head.in_features, num_outputs, device=weight.device, dtype=weight.dtype)
        self._other_sizes["num_outputs"] = num_outputs
        _draw_linear(self.head)

    def set_scale(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        """Standardise every image by these statistics of the training images, (C,) each."""
        self.input_mean.copy_(torch.as_tensor(mean))
        self.input_std.copy_(torch.as_tensor(std))

    def forward(self, images: Tensor, *, hidden_states: list[Tensor] | None = None) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, num_outputs).

        The input of every layer and what ``encode`` returns are added to the list ``hidden_states``, if there
        is one.
        """
        tokens = self._tokens(images, hidden_states)
        if hidden_states is not None:
            hidden_states.append(self.norm(tokens))
        # The norm of a token is its own, so the class token's needs no other.
        pooled = self.norm(tokens[:, 0]) if self.pooling == "class" else self.norm(tokens).mean(dim=1)
        return self.head(pooled)

    def encode(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> the tokens after the final norm, (B, N, d).

        The patches come row by row, after the class token if there is one: (B, 1 + N, d).
        """
        return self.norm(self._tokens(images))

    def _tokens(self, images: Tensor, hidden_states: list[Tensor] | None = None) -> Tensor:
        expected = (self.input_mean.numel(), *self.image_size)
        if images.dim() != 4 or images.shape[1:] != expected:
            raise InputError(
                f"images has shape {tuple(images.shape)}, expected (B, {', '.join(map(str, expected))})"
            )
        if not images.is_floating_point():
            raise InputError(f"images has dtype {images.dtype}, expected floating-point numbers in [0, 1]")
        images = (images - self.input_mean[:, None, None]) / self.input_std[:, None, None]
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.size(0), 1, -1), x], dim=1)
        # Token by token in memory, as a class token leaves them: every layer would copy them otherwise.
        x = self.dropout(x.contiguous() + self.positions)
        for layer in self.layers:
            if hidden_states is not None:
                hidden_states.append(x)
            x = layer(x)
        return x

    @torch.no_grad()
    def resized(self, image_size: int | tuple[int, int]) -> VisionTransformer:
        """A new model for images of another size, with these weights and interpolated positions (bicubic).

        Raises:
            InputError: for a size that is not a multiple of ``patch_size``, and for a model with parameters
                whose shapes follow the number of tokens.
        """
        weight = self.head.weight
        where: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        new = VisionTransformer(image_size, self.patch_size, **self._other_sizes, **where)
        state = self.state_dict()
        state["positions"] = interpolate_positions(self.positions, self.grid_size, new.grid_size)
        wrong = {
            name: tuple(value.shape)
            for name, value in new.state_dict().items()
            if name not in state or value.shape != state[name].shape
        }
        if wrong or len(state) != len(new.state_dict()):
            raise InputError(
                f"image_size={image_size!r}: the weights of {self.image_size} do not fit a model of "
                f"{new.image_size}; parameters that differ: {', '.join(wrong) or 'replaced layers'}"
            )
        new.load_state_dict(state)
        return new.train(self.training)


@torch.no_grad()
def _draw_linear(layer: nn.Linear) -> None:
    draw_normal(layer.weight, _DEVIATION)
    if layer.bias is not None:
        layer.bias.zero_()


def interpolate_positions(positions: Tensor, grid: tuple[int, int], new_grid: tuple[int, int]) -> Tensor:
    """Positions of one token grid for another, by bicubic interpolation: (T + H W, d) -> (T + H' W', d).

    The T rows in front of the grid, which lies row by row, stay as they are.
    """
    if grid == new_grid:
        return positions.clone()
    first = positions.size(0) - grid[0] * grid[1]
    image = positions[first:].unflatten(0, grid).permute(2, 0, 1)[None]
    precise = torch.promote_types(image.dtype, torch.float32)
    image = F.interpolate(image.to(precise), size=new_grid, mode="bicubic", antialias=True)
    return torch.cat([positions[:first], image[0].permute(1, 2, 0).flatten(0, 1).to(positions.dtype)])


def _sizes(image_size: int | Sequence[int], patch_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of the image, and rows and columns of its patches."""
    require_positive(patch_size=patch_size)
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2:
        raise InputError(f"image_size={image_size!r} must be a whole number or (height, width)")
    height, width = pair
    require_positive(image_height=height, image_width=width)
    if height % patch_size or width % patch_size:
        raise InputError(f"image_size={image_size!r} must be a multiple of patch_size={patch_size}")
    return (height, width), (height // patch_size, width // patch_size)


class Segmenter(nn.Module):
    """Segmenter with the linear decoder (Strudel et al. 2021): class logits of every patch, upsampled to
    every pixel.

    An image that is larger than the encoder's is cut into windows of the encoder's size. The last window of a
    row or a column ends where the image ends, and logits are averaged where windows overlap, as in the
    paper's evaluation. An image that is smaller is padded on the right and below with the encoder's
    ``input_mean``, and the logits of the padding are cut off. So a side of 180 pixels needs an encoder of 184
    where patches are 8 pixels wide.

    Args:
        encoder: the backbone; ``classifier.resized(size)`` is one for windows of ``size`` that has the
            weights of a classifier of images. It becomes part of this model, with a new head for patches.
        num_classes: classes K.

    Raises:
        InputError: for a number of classes that is not positive.
    """

    def __init__(self, encoder: VisionTransformer, num_classes: int) -> None:
        super().__init__()
        require_positive(num_classes=num_classes)
        self.encoder = encoder
        encoder.replace_head(num_classes)

    def reset_parameters(self) -> None:
        """Draw every parameter anew, and fill the buffers, as in a new model; after ``to_empty``, say."""
        self.encoder.reset_parameters()
        self.encoder.replace_head(self.encoder.head.out_features)  # the same draws as in a new model

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) in [0, 1] -> (B, K, H, W)."""
        channels = self.encoder.input_mean.numel()
        if images.dim() != 4 or images.size(1) != channels or not images.numel():
            raise InputError(
                f"images has shape {tuple(images.shape)}, expected (B, {channels}, H, W), none of them 0"
            )
        size, window = images.shape[-2:], self.encoder.image_size
        if size[0] <= window[0] and size[1] <= window[1]:
            return self._window(images)
        rows, columns = (_starts(length, step) for length, step in zip(size, window, strict=True))
        sums: Tensor | None = None
        counts = images.new_zeros(size)
        for top in rows:
            for left in columns:
                place = (..., slice(top, top + window[0]), slice(left, left + window[1]))
                logits = self._window(images[place])
                if sums is None:
                    sums = logits.new_zeros(*logits.shape[:2], *size)
                sums[place] += logits
                counts[place] += 1
        assert sums is not None
        return sums / counts

    def _window(self, images: Tensor) -> Tensor:
        """The logits of images that are no larger than the encoder's."""
        encoder = self.encoder
        height, width = images.shape[-2:]
        if (height, width) != encoder.image_size:
            mean = encoder.input_mean.to(images.dtype)[:, None, None]
            padded = mean.expand(*images.shape[:2], *encoder.image_size).clone()
            padded[..., :height, :width] = images
            images = padded
        patches = encoder.encode(images)[:, -(encoder.grid_size[0] * encoder.grid_size[1]) :]
        logits = encoder.head(patches).transpose(1, 2).unflatten(2, encoder.grid_size)
        logits = F.interpolate(logits, size=encoder.image_size, mode="bilinear", align_corners=False)
        return logits[..., :height, :width]


def _starts(length: int, window: int) -> list[int]:
    """The places of windows that cover a side: side by side, the last one shifted back to the end."""
    last = max(length - window, 0)
    return [*range(0, last, window), last]
