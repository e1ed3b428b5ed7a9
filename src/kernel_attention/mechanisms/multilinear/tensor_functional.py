"""Tensor attention without KMLSVD: the kernel tensor with learnt replacements of its factors and core.

Source: Verbeek, "3D Primal Attention", TU Delft 2025, section 4-2-4. The printed E_2 and E_3 of option 1 and
E_2 of option 2 repeat indices of W_3, W_2 and W_1. They are read here as the cyclic pattern of eq. 2-23,
where every mode is contracted with the other modes' weights. The legend is that of
``kernel_attention.mechanisms.multilinear.dual_functional``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.tensors.multilinear.kernel_tensors import cubemax_kernel
from kernel_attention.tensors.multilinear.unfoldings import project_modes, unfold
from kernel_attention.tensors.statistics import exactly, without_autocast

Option = Literal[1, 2, 3]


def tensor_scores(
    sequences: Sequence[Tensor],
    weights: Sequence[Tensor],
    core: Tensor | None = None,
    *,
    option: Option = 1,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """E_1..E_D of eq. 4-10, (B, h, N, R) each, from the cubemax kernel tensor K of the sequences.

    * option 1: E_n = K_(n) (kron of the other modes' W_m) T_(n)^T; ``weights`` (h, N, R), ``core`` T
      (h, R, .., R);
    * option 2: E_n = K_(n) W_n T_(n)^T; ``weights`` (h, N^(D - 1), R^(D - 1)), ``core`` as in option 1;
    * option 3: E_n = K_(n) W_n; ``weights`` (h, N^(D - 1), R), no ``core``.

    A flattened index runs over the other modes in order. Weights belong to positions, so
    ``sequences`` (B, h, N, p) must be padded on the right; ``attention_mask`` is (B, N), True = real token.

    Raises:
        InputError: for another option, a missing core, or a core that the option does not take.
    """
    if option not in (1, 2, 3):
        raise InputError(f"option={option!r} must be 1, 2 or 3")
    if (core is None) != (option == 3):
        raise InputError(f"core: option {option} {'has none' if option == 3 else 'needs one'}")
    order, dtype = len(sequences), sequences[0].dtype
    with without_autocast(sequences[0]):
        kernel = cubemax_kernel([exactly(sequence) for sequence in sequences], [attention_mask] * order)
        weights = [exactly(weight)[None] for weight in weights]
        scores = []
        for n in range(order):
            part = project_modes(kernel, weights, n) if option == 1 else unfold(kernel, n, order) @ weights[n]
            if core is not None:
                part = part @ unfold(exactly(core), n, order).mT
            scores.append(part.to(dtype))
    return tuple(scores)
