"""Semantic segmentation with a vision transformer: Segmenter with the linear decoder (Strudel et al. 2021).

Legend: B images of C channels and H x W pixels, K classes, d model width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError
from kernel_attention.models.vision import VisionTransformer


class Segmenter(nn.Module):
    """Class logits of every pixel: a linear layer on every patch, then bilinear upsampling.

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
