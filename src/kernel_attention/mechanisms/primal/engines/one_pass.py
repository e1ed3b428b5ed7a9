"""A whole Primal-Attention layer in one pass over the sequence, forward and backward, without stored scores.

Everything to the right of the feature maps is the same for every token, so it is multiplied out first. With
z_i = [phi(q_i) ; phi(k_i)] a head's output is z_i G, where G = [W_{e|X} C_e^T ; W_{r|X} C_r^T] is (2p, p).
The energy of the objective is <Z^T Z, S>, where S = W Lambda W^T is (p, p) for each half of z. A token then
costs two small products. The backward pass keeps only the input and computes z again.

``folding`` multiplies out, and ``operators`` holds the pass over the tokens, an operator of PyTorch. Nothing
else grows with the sequence.

Source as in ``kernel_attention.mechanisms.primal.functional``; C = [C_e C_r] is the concat map.

Legend: B batch, N tokens, h heads, p head width, d = h p, s rank, M sampled rows, k groups of heads mapped
together, o outputs of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.errors import InputError
from kernel_attention.mechanisms.nested_objective.functional import KernelGrams
from kernel_attention.mechanisms.primal.engines.cpu import Tokens
from kernel_attention.mechanisms.primal.engines.folding import Readout, fold_readout
from kernel_attention.mechanisms.primal.engines.map_operator import Engine, features_and_maps, with_rows
from kernel_attention.mechanisms.primal.engines.native_folding import native_fold
from kernel_attention.native import why_not_native
from kernel_attention.tensors.affine import Affine, apply_affine, autocast, product_dtype
from kernel_attention.tensors.recompute import needs_operator
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import exactly, num_real, running_mean, without_autocast


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
    engine: Engine = "slices",
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The layer's output, and its energy.

    The energy is the mean over heads of sum_i ||L e_i||^2 + ||L r_i||^2.

    The cost of a token does not depend on the rank: O(N d^2) time, and no memory but that of the output. The
    weights are multiplied out first, O(d p s) per sequence, so very short sequences gain nothing. The results
    are those of ``primal_attention`` between its projections, up to rounding. Sums over tokens accumulate in
    float32 for 16-bit inputs. Where the gradient itself is differentiated, it comes from the formulas, which
    store z.

    Args:
        x: (B, N, d).
        weights: the layer's parameters.
        samples: the positions of f(X) in x; None: data-independent weights.
        normalize: cosine feature map; False: identity.
        with_energy: whether the energy is wanted; needs ``sqrt_lambda``.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only; needs data-independent weights.
        running_means: with ``is_causal``, average queries and keys over the prefix (listing 1).
        engine: "slices", PyTorch on any device; "native", kernels in C++ for CPUs, in float32 and float64;
            "triton", kernels for GPUs.
        group: processes that hold the parts of every sequence. x, samples and mask are those of this part;
            the energy is that of all parts.

    Returns:
        y (B, N, d), and the energy (B,) in float32 or better or None.
    """
    return primal_pass(
        x, weights, samples=samples, normalize=normalize, with_energy=with_energy, engine=engine, group=group,
        attention_mask=attention_mask, is_causal=is_causal, running_means=running_means,
    )[:2]  # fmt: skip


def primal_pass(
    x: Tensor,
    weights: PrimalWeights,
    *,
    samples: Samples | None,
    normalize: bool,
    with_energy: bool,
    attention_mask: Tensor | None,
    is_causal: bool,
    running_means: bool,
    engine: Engine,
    group: SequenceGroup | None,
    with_grams: bool = False,
) -> tuple[Tensor, Tensor | None, KernelGrams | None]:
    """The results of ``primal_layer``, and with ``with_grams`` what the nested objective reads of the kernel.

    The Gram matrices are those of ``kernel_attention.functional.kernel_grams``; they need a whole sequence.
    """
    if engine == "native" and (why := why_not_native(x, product_dtype(x))) is not None:
        raise InputError(f"engine='native': {why}; use 'slices'")
    if is_causal and samples is not None:
        raise ValueError(
            "primal_layer: samples are those of the whole sequence, which is_causal=True forbids"
        )
    if is_causal and running_means:  # an affine map of the mean is the mean of the map
        before = None if group is None else _before(x, attention_mask, group)
        x = running_mean(x[:, None], attention_mask, before).squeeze(1)
    x = autocast(x)
    num_heads = weights.w_e.size(0)
    weight, bias = side_by_side(weights.q_proj, weights.k_proj, num_heads)
    # One map for all heads saves a pass, but costs h (2p, d) products instead of h (2p, p) ones and O.
    fold_output = num_heads <= 2 and engine != "triton"
    readout = Readout(
        weights.w_e,
        weights.w_r,
        weights.sqrt_lambda if with_energy else None,
        *weights.concat,
        *(weights.out_proj if fold_output else (None, None)),
    )
    with without_autocast(x):
        rows = None
        if samples is not None:
            x, rows = with_rows(x, samples)
        if engine == "native" and group is None and not needs_operator(x):
            folded = native_fold(readout, rows)
        else:
            folded = fold_readout(readout, rows, group)
        maps, constant, energy_weights = folded
        y, gram = features_and_maps(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), maps, constant,
            Tokens(num_heads, normalize, attention_mask),
            with_gram=with_grams or energy_weights is not None, engine=engine,
        )  # fmt: skip
        energy = grams = None
        if gram is not None and energy_weights is not None:
            energy = (gram * energy_weights).sum(dim=(1, 2, 3, 4))
            energy = energy if group is None else group.total(energy)
        if gram is not None and with_grams:
            by_head = None if rows is None else exactly(rows.detach()).unflatten(-1, (num_heads, -1))
            grams = KernelGrams(
                gram[:, :, 0].detach(),
                gram[:, :, 1].detach(),
                None if by_head is None else by_head.transpose(1, 2),
            )
    return (y if fold_output else apply_affine(y, weights.out_proj)), energy, grams


def side_by_side(q: Affine, k: Affine, num_heads: int) -> Affine:
    """Projections to queries and to keys, (d, d) -> to every head's query and key, (h * 2 * p, d)."""

    def join(first: Tensor, second: Tensor) -> Tensor:
        both = [part.unflatten(0, (num_heads, -1)) for part in (first, second)]
        return torch.stack(both, dim=1).flatten(0, 2)

    return join(q[0], k[0]), None if q[1] is None or k[1] is None else join(q[1], k[1])


def _before(x: Tensor, mask: Tensor | None, group: SequenceGroup) -> tuple[Tensor, Tensor]:
    """Sum (B, 1, 1, d) and number (B,) of the real tokens on the ranks before this one."""
    total = exactly(x if mask is None else x.masked_fill(~mask[..., None], 0.0)).sum(dim=1)
    return group.before(total)[:, None, None], group.places(num_real(x, mask))[0]


def primal_operations(
    embed_dim: int, num_heads: int, *, objective: bool, training: bool, kernels: bool = False
) -> int:
    """Operations of the fused non-causal primal layer per token, counted by hand: counters do not see them.

    Legend: d model width, h heads, p = d / h head width.

    z = [W_q; W_k] x costs 4 d^2. Up to two heads the output map is folded into the heads' (2d -> d, 4 d^2).
    With more heads, and in the Triton kernels (``kernels``), a head maps 2p -> p and the output map follows:
    4 d p + 2 d^2. The Gram matrices of the objective cost 4 d p. The backward pass computes z again (4 d^2).
    It takes the gradients of maps and z (twice the map's cost), of x and of W (twice 4 d^2), and of the
    objective (4 d p).
    """
    head_dim = embed_dim // num_heads
    project = 4 * embed_dim**2
    mapped, out = (
        (4 * embed_dim**2, 0)
        if num_heads <= 2 and not kernels
        else (4 * embed_dim * head_dim, 2 * embed_dim**2)
    )
    gram = 4 * embed_dim * head_dim if objective else 0
    inference = project + mapped + out
    if not training:
        return inference
    return inference + gram + (3 * project + 2 * mapped + 2 * out + gram)


def primal_numbers(embed_dim: int, *, training: bool) -> int:
    """Numbers a token must move at least: x in, y out; backward x and dy in, dx out. z stays in the cache."""
    return embed_dim * (5 if training else 2)
