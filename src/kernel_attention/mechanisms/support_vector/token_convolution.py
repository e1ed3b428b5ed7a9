"""One module for the convolutions of Attention-Conv1D and Conv2D and the convolutional projections of CvT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.parameters import Device
from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.limits import require_parameters
from kernel_attention.tensors.convolution import convolve_grid, convolve_sequence
from kernel_attention.tensors.padding import zero_padding

ConvWeights = Literal["shared", "separate", "separable"]
_KERNEL_SIZES = {"1d": 5, "2d": 2}  # of the paper's experiments
_WEIGHTS: tuple[ConvWeights, ...] = ("shared", "separate", "separable")


class TokenConvolution(nn.Module):
    """Depth-wise convolution of queries and keys, or of the tokens that queries, keys and values are made of.

    All kernels start as the identity, so the layer starts as attention without convolutions. (The causal form
    applies the same kernel to the tokens i - s + 1..i, where the identity becomes a delay of (s - 1) // 2.)

    Args:
        channels: d.
        kernel_size: s; the kernel is s, or s x s over a grid.
        weights: "shared": one kernel for all channels, queries and keys (definitions 3 and 4); "separate":
            one for queries and one for keys; "separable": a kernel per channel for queries, keys and values
            each, before the projections, which are then the point-wise half (remark 7).
        grid_size: (H, W), the tokens being H rows of W; None: a sequence.
        class_tokens: tokens in front of the grid, which are not convolved.
        device: where the kernels are made; None: the default device.
        dtype: the kernels' precision; None: the default one.
    """

    q_kernel: nn.Parameter
    k_kernel: nn.Parameter | None
    v_kernel: nn.Parameter | None

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        weights: ConvWeights = "shared",
        grid_size: tuple[int, int] | None = None,
        class_tokens: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_positive(kernel_size=kernel_size)
        if weights not in _WEIGHTS:
            raise unknown("conv_weights", weights, _WEIGHTS)
        self.kernel_size = kernel_size
        self.weights = weights
        self.grid_size = grid_size
        self.class_tokens = class_tokens
        require_parameters(
            f"TokenConvolution: kernel_size={kernel_size} with conv_weights={weights!r}",
            kernel_size ** (1 if grid_size is None else 2) * (3 * channels if weights == "separable" else 2),
            "lower kernel_size",
        )
        shape = [kernel_size] * (1 if grid_size is None else 2)
        if weights == "separable":
            shape = [channels, *shape]
        kernels = {
            "q_kernel": True,
            "k_kernel": weights != "shared",
            "v_kernel": weights == "separable",
        }
        for name, is_there in kernels.items():
            kernel = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if is_there else None
            self.register_parameter(name, kernel)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every kernel to the identity, as in a new module."""
        middle = self.kernel_size // 2
        for kernel in self.parameters():
            kernel.zero_()
            (kernel[..., middle] if self.grid_size is None else kernel[..., middle, middle]).fill_(1.0)

    def before(self, x: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the q, k and v projections: x (B, N, d) itself, or its convolutions if separable."""
        if self.k_kernel is None or self.v_kernel is None:
            return x, x, x
        x = zero_padding(x, mask)
        return (
            self._convolve(x, self.q_kernel, is_causal),
            self._convolve(x, self.k_kernel, is_causal),
            self._convolve(x, self.v_kernel, is_causal),
        )

    def after(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
        """Projected queries and keys, (B, N, d) each, convolved unless separable."""
        if self.weights == "separable":
            return q, k
        k_kernel = self.q_kernel if self.k_kernel is None else self.k_kernel
        return (
            self._convolve(zero_padding(q, mask), self.q_kernel, is_causal),
            self._convolve(zero_padding(k, mask), k_kernel, is_causal),
        )

    def check(self, length: int) -> None:
        """InputError for a sequence whose length is not that of the grid."""
        if self.grid_size is None:
            return
        height, width = self.grid_size
        if length != self.class_tokens + height * width:
            raise InputError(
                f"sequence length {length} must be class_tokens={self.class_tokens} plus the tokens of "
                f"grid_size={self.grid_size}, {height * width}"
            )

    def _convolve(self, x: Tensor, kernel: Tensor, is_causal: bool) -> Tensor:
        if self.grid_size is None:
            return convolve_sequence(x, kernel, is_causal=is_causal)
        first, grid = x[:, : self.class_tokens], x[:, self.class_tokens :].unflatten(1, self.grid_size)
        grid = convolve_grid(grid, kernel).flatten(1, 2)
        return grid if self.class_tokens == 0 else torch.cat([first, grid], dim=1)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        grid = (
            ""
            if self.grid_size is None
            else f", grid_size={self.grid_size}, class_tokens={self.class_tokens}"
        )
        return f"kernel_size={self.kernel_size}, weights={self.weights!r}{grid}"


def token_convolution(
    convolution: str | None,
    channels: int,
    kernel_size: int | None,
    weights: ConvWeights,
    grid_size: Sequence[int] | None,
    class_tokens: int,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> TokenConvolution | None:
    """The module for these options of a layer; InputError for options that do not go together."""
    if convolution is None:
        if grid_size is not None or class_tokens or kernel_size is not None:
            raise InputError(
                f"kernel_size={kernel_size!r}, grid_size={grid_size!r} and class_tokens={class_tokens!r} are "
                "for a convolution, got convolution=None"
            )
        return None
    if convolution not in _KERNEL_SIZES:
        raise unknown("convolution", convolution, _KERNEL_SIZES)
    size = _KERNEL_SIZES[convolution] if kernel_size is None else kernel_size
    if convolution == "1d":
        if grid_size is not None or class_tokens:
            raise InputError(
                f"grid_size={grid_size!r} and class_tokens={class_tokens!r} are for convolution='2d'"
            )
        return TokenConvolution(channels, size, weights, device=device, dtype=dtype)
    if grid_size is None or len(grid_size) != 2:
        raise InputError(
            f"grid_size={grid_size!r} must be (height, width), the token grid, for convolution='2d'"
        )
    height, width = grid_size
    require_positive(grid_height=height, grid_width=width)
    if not isinstance(class_tokens, int) or class_tokens < 0:
        raise InputError(f"class_tokens={class_tokens!r} must be a whole number of at least 0")
    return TokenConvolution(channels, size, weights, (height, width), class_tokens, device, dtype)
