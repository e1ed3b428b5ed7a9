"""Tensor attention without KMLSVD, for short sequences: learnt replacements of the tensor's factors and core.

Source: Verbeek, "3D Primal Attention", TU Delft 2025, section 4-2-4. The printed E_2 and E_3 of option 1 and
E_2 of option 2 repeat indices of W_3, W_2 and W_1. They are read here as the cyclic pattern of eq. 2-23,
where every mode is contracted with the other modes' weights. The legend is that of
``kernel_attention.mechanisms.multilinear.dual_functional``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_attention.core.parameters import Device
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import InputError, require_positive
from kernel_attention.limits import require_parameters
from kernel_attention.mechanisms.multilinear.base_layer import ReadsModes
from kernel_attention.mechanisms.multilinear.dual_layer import check_kernel_size
from kernel_attention.tensors.multilinear.kernel_tensors import cubemax_kernel
from kernel_attention.tensors.multilinear.unfoldings import project_modes, unfold
from kernel_attention.tensors.padding import compaction, first_rows
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, without_autocast

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


@register_attention(
    "tensor",
    summary="the same tensor with weights learnt per position; short sequences",
    paper="Verbeek 2025, 3D Primal Attention",
    equation="E_1 = K_(1) (W_3 (x) W_2) T_(1)^T, K as in dual_multilinear",
    time="D N^D R",
    memory="N^D",
)
class TensorAttention(ReadsModes):
    """Attention by a kernel tensor of order D and learnt factors (Verbeek, TU Delft 2025, section 4-2-4).

    The kernel tensor is the cubemax tensor of the dual form. Parameters replace its singular vectors and its
    core. They belong to positions, hence ``max_len``; a shorter sequence uses the first of them, its real
    tokens counted from 0 whatever the padding. There is no causal form, because a slice's softmax and every
    score read the whole sequence. Time and memory are O(N^D): it is for short sequences.

    Args:
        embed_dim: model width d.
        num_heads: number of heads h; divides d. The thesis uses one.
        max_len: longest sequence; needed.
        option: 1, 2 or 3 of eq. 4-10, see ``kernel_attention.functional.tensor_scores``. Parameters per
            head: D N R + R^D, D N^(D - 1) R^(D - 1) + R^D, D N^(D - 1) R.
        order: number of modes D, from 2 to 16.
        rank: R, of every mode; None: the head width p.
        memory_limit: GiB that the kernel tensor may take; training needs about six times as much.
        bias: whether the projections have biases.
        device: where the parameters are made; None: the default device.
        dtype: the parameters' precision; None: the default one.

    Attributes:
        w: W_1..W_D, normal at first: (D, h, max_len, R), (D, h, max_len, .., max_len, R^(D - 1)) or (D, h,
            max_len, .., R).
        core: T, (h, R, .., R), normal at first; None with option 3.
        concat: the map from the D R scores to the head's p outputs, shared by the heads.
    """

    core: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        max_len: int | None = None,
        option: Option = 1,
        order: int = 3,
        rank: int | None = None,
        memory_limit: float = 1.0,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, order, bias, device, dtype)
        if max_len is None:
            raise InputError(
                "max_len=None: tensor attention learns weights per position and needs the longest length"
            )
        rank = self.head_dim if rank is None else rank
        require_positive(max_len=max_len, rank=rank)
        if option not in (1, 2, 3):
            raise InputError(f"option={option!r} must be 1, 2 or 3")
        if not memory_limit > 0:
            raise InputError(f"memory_limit={memory_limit!r} must be a positive number of GiB")
        self.max_len, self.option, self.rank, self.memory_limit = max_len, option, rank, memory_limit
        columns = rank ** (order - 1) if option == 2 else rank
        own = 0 if option == 3 else rank**order
        require_parameters(
            f"TensorAttention: max_len={max_len} with order={order}, rank={rank} and option={option}",
            num_heads * (order * max_len ** (1 if option == 1 else order - 1) * columns + own),
            "lower max_len, order or rank, or choose option 1",
        )
        positions = [max_len] if option == 1 else [max_len] * (order - 1)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w = nn.Parameter(torch.empty(order, num_heads, *positions, columns, **where))
        core = None if option == 3 else nn.Parameter(torch.empty(num_heads, *[rank] * order, **where))
        self.register_parameter("core", core)
        self.draw_weights()
        self.add_outputs(rank, bias, device, dtype)

    def draw_weights(self) -> None:
        """Draw W and T, normal."""
        nn.init.normal_(self.w)
        if self.core is not None:
            nn.init.normal_(self.core)

    def why_not_causal(self) -> str | None:
        """There is no causal form: a slice's softmax reads the whole sequence."""
        return "every score reads the whole sequence"

    def scores(self, x: Tensor, *, attention_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """E_1..E_D of every token, each (B, h, N, R); arguments as in the layer's call.

        Raises:
            InputError: for more than ``max_len`` tokens, or where the kernel tensor would take more than
                ``memory_limit``.
        """
        batch, length, _ = x.shape
        if length > self.max_len:
            raise InputError(f"sequence length {length} exceeds max_len={self.max_len}")
        check_kernel_size(
            type(self).__name__,
            batch * self.num_heads,
            length,
            length,
            self.order,
            accumulation_dtype(x.dtype).itemsize,
            self.memory_limit,
            "shorten the sequences, take a smaller batch, or raise memory_limit",
        )
        # Real tokens move to the front, where the weights of their positions are, and their scores back.
        moved = None if attention_mask is None else compaction(attention_mask)
        if moved is not None:
            x, attention_mask = moved.apply(x), moved.attention_mask
        scores = tensor_scores(
            self.sequences(x),
            self._weights(length),
            self.core,
            option=self.option,
            attention_mask=attention_mask,
        )
        if moved is None:
            return scores
        return tuple(self.split_heads(moved.undo(self.merge_heads(score))) for score in scores)

    def _weights(self, length: int) -> list[Tensor]:
        """W_n of the first ``length`` positions, position indices flattened."""
        w: Tensor = self.w
        for dim in range(2, w.dim() - 1):
            w = first_rows(w, length, dim)
        return list(w.flatten(2, -2).unbind())

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return (
            f"{self.embed_dim}, {self.num_heads}, option={self.option}, order={self.order}, "
            f"rank={self.rank}, max_len={self.max_len}"
        )
