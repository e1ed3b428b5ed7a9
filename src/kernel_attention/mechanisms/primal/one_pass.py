"""A whole Primal-Attention layer in one pass over its input; see ``kernel_attention.mechanisms.primal.fused``.

Source and legend as in ``kernel_attention.mechanisms.primal.functional``; C = [C_e C_r] the concat map, O the output
projection.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.primal import slices
from kernel_attention.mechanisms.primal.fused import FoldedWeights, primal_pass
from kernel_attention.tensors.affine import Affine, apply_affine, autocast
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import exactly, num_real, running_mean


class PrimalWeights(NamedTuple):
    """The parameters of a layer; ``sqrt_lambda`` is None where it has no objective."""

    w_e: Tensor
    w_r: Tensor
    sqrt_lambda: Tensor | None
    q_proj: Affine
    k_proj: Affine
    concat: Affine
    out_proj: Affine


def primal_layer(
    x: Tensor,
    weights: PrimalWeights,
    *,
    samples: Samples | None = None,
    normalize: bool = True,
    with_energy: bool = False,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    running_means: bool = True,
    engine: Literal["slices", "triton"] = "slices",
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The layer's output, and its objective's energy: sum_i ||L e_i||^2 + ||L r_i||^2 averaged over heads.

    What a token costs does not depend on the rank: O(N d^2) time, and no memory but that of the output. The
    weights are multiplied out first, O(d p s) per sequence, so very short sequences gain nothing. The
    same numbers as ``primal_attention`` between its projections up to rounding.

    Args:
        x: (B, N, d).
        weights: the layer's parameters.
        samples: where f(X) is read in x; None: data-independent weights.
        normalize: cosine feature map; False: identity.
        with_energy: whether the energy is wanted; needs ``sqrt_lambda``.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i; data-independent weights only.
        running_means: with ``is_causal``, average queries and keys over the prefix (listing 1).
        engine: "slices", PyTorch on any device; "triton", kernels for GPUs.
        group: processes that hold the parts of every sequence; x, samples and masks are this part's, the
            energy is that of all.

    Returns:
        y (B, N, d), and the energy (B,) or None.
    """
    if is_causal and samples is not None:
        raise ValueError(
            "primal_layer: samples are those of the whole sequence, which is_causal=True forbids"
        )
    if is_causal and running_means:  # the mean of affine maps is the map of the mean
        before = None if group is None else _before(x, attention_mask, group)
        x = running_mean(x[:, None], attention_mask, before)[:, 0]
    x = autocast(x)
    num_heads = weights.w_e.size(0)
    weight, bias = _side_by_side(weights.q_proj, weights.k_proj, num_heads)
    # One map for all heads saves a pass, but costs h (2p, d) products instead of h (2p, p) ones and O.
    fold_output = num_heads <= 2 and engine == "slices"
    given = {"w_e": weights.w_e, "w_r": weights.w_r, "concat": weights.concat[0]}
    optional = {"concat_bias": weights.concat[1]}
    if with_energy:
        optional["sqrt_lambda"] = weights.sqrt_lambda
    if fold_output:
        optional["out"], optional["out_bias"] = weights.out_proj
    given |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    y, energy = primal_pass(
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        num_heads,
        functools.partial(_fold, tuple(given), group),
        tuple(given.values()),
        samples=samples,
        normalize=normalize,
        attention_mask=attention_mask,
        engine=_engine(engine),
    )
    if energy is not None and group is not None:
        energy = group.total(energy)
    return (y if fold_output else apply_affine(y, weights.out_proj)), energy


def _side_by_side(q: Affine, k: Affine, num_heads: int) -> Affine:
    """Projections to queries and to keys, (d, d) -> to every head's query and key, (h * 2 * p, d)."""

    def join(first: Tensor, second: Tensor) -> Tensor:
        both = [part.unflatten(0, (num_heads, -1)) for part in (first, second)]
        return torch.stack(both, dim=1).flatten(0, 2)

    return join(q[0], k[0]), None if q[1] is None or k[1] is None else join(q[1], k[1])


def _before(x: Tensor, mask: Tensor | None, group: SequenceGroup) -> tuple[Tensor, Tensor]:
    """Sum (B, 1, 1, d) and number (B,) of the real tokens on the ranks before this one."""
    total = exactly(x if mask is None else x.masked_fill(~mask[..., None], 0.0)).sum(dim=1)
    return group.before(total)[:, None, None], group.places(num_real(x, mask))[0]


def _fold(
    names: tuple[str, ...], group: SequenceGroup | None, rows: Tensor | None, *tensors: Tensor
) -> FoldedWeights:
    """G = [W_{e|X} C_e^T ; W_{r|X} C_r^T] (times O^T where it is folded) and S = W Lambda W^T / h.

    Heads come first, so that all sequences of a head share one product.
    """
    given = {name: exactly(tensor) for name, tensor in zip(names, tensors, strict=True)}
    num_heads, rank = given["w_e"].size(0), given["w_e"].size(-1)
    w = torch.cat([given["w_e"], given["w_r"]], dim=-1)  # (h, M or p, 2s)
    if rows is not None:
        by_head = exactly(rows).unflatten(-1, (num_heads, -1)).permute(2, 0, 3, 1)  # (h, B, p, M')
        w = (by_head.flatten(1, 2) @ w[:, : rows.size(1)]).unflatten(1, by_head.shape[1:3])
        w = w if group is None else group.total(w)  # every rank read its own rows
    else:
        w = w[:, None]
    w = w.unflatten(-1, (2, rank)).movedim(-2, 0)  # (2, h, B, p, s)
    concat = given["concat"].unflatten(1, (2, rank)).permute(1, 2, 0)  # (2, s, p)
    maps = (w.flatten(1, 3) @ concat).view(w.shape[:-1] + concat.shape[-1:])
    maps = maps.permute(1, 2, 0, 3, 4)  # (h, B, 2, p, p)
    constant = given.get("concat_bias", concat.new_zeros(concat.size(-1))).expand(num_heads, -1).flatten()
    if "out" in given:
        out = given["out"]
        folded = maps.flatten(1, 3) @ out.mT.unflatten(0, (num_heads, -1))  # (h, B 2p, d)
        maps = folded.unflatten(1, (maps.size(1), -1)).transpose(0, 1).flatten(1, 2)[:, None]  # (B, 1, 2d, d)
        constant = out @ constant + given.get("out_bias", 0.0)
    else:
        maps = maps.transpose(0, 1).flatten(2, 3)  # (B, h, 2p, p)
    energy = None
    if "sqrt_lambda" in given:
        scaled = (w * given["sqrt_lambda"][:, None, None, :]).permute(2, 1, 0, 3, 4)  # (B, h, 2, p, s)
        energy = scaled @ scaled.mT / num_heads
    return FoldedWeights(maps, constant, energy)


def _engine(name: str) -> ModuleType:
    if name == "triton":  # Triton is wanted only by whoever asks for its kernels
        from kernel_attention.mechanisms.primal import triton_kernels

        return triton_kernels
    return slices
