"""Kernel tensors of order D: of queries, keys and fibers, and of features.

Source: Verbeek, "3D Primal Attention", TU Delft 2025, equations 3-3 to 3-6 and 2-19.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.tensors.multilinear.factors import letters
from kernel_attention.tensors.multilinear.unfoldings import mode_product


def attention_tensor(sequences: Sequence[Tensor]) -> Tensor:
    """A_ijk.. = sum over m of q_im k_jm f_km .. / p^((D - 1)/2) (eq. 3-3 with 3-6's scale): (B, h, N_1..N_D).

    The scale is 1/p at order 3, as in the thesis, and canonical attention's 1/sqrt(p) at order 2.
    """
    product, order = sequences[0], len(sequences)
    for n, sequence in enumerate(sequences[1:-1], start=1):
        product = product.unsqueeze(-2) * sequence[(slice(None), slice(None), *[None] * n)]
    last = sequences[-1] * sequences[0].size(-1) ** (-(order - 1) / 2)
    return (product.flatten(2, -2) @ last.mT).unflatten(2, product.shape[2:-1])


def cubemax_kernel(
    sequences: Sequence[Tensor],
    masks: Sequence[Tensor | None] | None = None,
    log_normalizer: Tensor | None = None,
) -> Tensor:
    """K, the attention tensor with a softmax over every i-slice (cubemax, eq. 3-5): (B, h, N_1..N_D).

    Args:
        sequences: queries, keys, fibers, (B, h, N_n, p).
        masks: (B, N_n) or None per mode, True = real token; padded entries of K are zero.
        log_normalizer: (B, h, N_1); replaces the slices' own. Entries are then capped at 1, the largest
            value in a softmax.
    """
    logits = masked_logits(sequences, masks)
    if log_normalizer is None:
        kernel = logits.flatten(3).softmax(dim=-1).view_as(logits)
    else:
        kernel = (logits - along(log_normalizer, 0, len(sequences))).clamp_max(0.0).exp()
    if masks is not None and masks[0] is not None:
        kernel = kernel.masked_fill(~along(masks[0][:, None], 0, len(sequences)), 0.0)
    return kernel


def masked_logits(sequences: Sequence[Tensor], masks: Sequence[Tensor | None] | None) -> Tensor:
    """The attention tensor, with the smallest finite number where a mode other than the first is padded."""
    logits = attention_tensor(sequences)
    for n, mask in enumerate(masks or ()):
        if n > 0 and mask is not None:
            logits = logits.masked_fill(
                ~along(mask[:, None], n, len(sequences)), torch.finfo(logits.dtype).min
            )
    return logits


def along(x: Tensor, mode: int, order: int) -> Tensor:
    """x (B, h, N) reshaped to broadcast against (B, h, N_1..N_D), with N along ``mode``."""
    return x[(slice(None), slice(None), *[None] * mode, slice(None), *[None] * (order - 1 - mode))]


def multilinear_kernel(features: Sequence[Tensor], compatibility: Tensor | None = None) -> Tensor:
    """The kernel tensor K = C x_1 Phi_1 .. x_D Phi_D (eq. 2-21), (B, h, N_1..N_D).

    The features Phi_n are (B, h, N_n, M_n). For analysis: the size of K is the product of the lengths.
    """
    if compatibility is not None and compatibility.dim() > 2:
        kernel = compatibility
        for n, phi in enumerate(features):
            kernel = mode_product(kernel, phi, n, len(features))
        return kernel
    tokens, _ = letters(len(features))
    first = features[0] if compatibility is None else features[0] * compatibility[:, None]
    operands = ",".join(f"...{token}A" for token in tokens)
    return torch.einsum(f"{operands}->...{tokens}", first, *features[1:])
