"""Primal-Attention in one pass over the sequence, forward and backward: no score is ever stored.

Everything right of the feature maps is the same for every token, so it is multiplied out beforehand. With
z_i = [phi(q_i) ; phi(k_i)] a head's output is z_i G, G = [W_{e|X} C_e ; W_{r|X} C_r] being (2p, p), and the
energy of the objective is <Z^T Z, S>, S being (p, p) for each half of z. A token then costs two small
products. The backward pass keeps only the input, and computes z again.

What walks over the tokens is an engine: ``kernel_attention.mechanisms.primal.slices`` in PyTorch,
``kernel_attention.mechanisms.primal.triton_kernels`` on GPUs.

Legend: B batch, N tokens, h heads, p head width, d = h p, M sampled rows, k groups of heads mapped together,
o outputs of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.features.feature_maps import cosine
from kernel_attention.mechanisms.primal import slices as primal_slices
from kernel_attention.mechanisms.primal.slices import Tokens
from kernel_attention.tensors.recompute import differentiable_gradients
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import exactly, without_autocast


class FoldedWeights(NamedTuple):
    """A layer's weights multiplied out, without the tokens; B is 1 where they do not depend on the sequence.

    ``maps`` (B, k, 2d / k, o) and ``constant`` (k o,) make the output; ``energy`` (B, h, 2, p, p) is S for
    queries and keys, None where there is no objective.
    """

    maps: Tensor
    constant: Tensor
    energy: Tensor | None


Fold = Callable[..., FoldedWeights]


def primal_pass(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    fold: Fold,
    parameters: Sequence[Tensor],
    *,
    samples: Samples | None = None,
    normalize: bool = True,
    attention_mask: Tensor | None = None,
    engine: ModuleType = primal_slices,
) -> tuple[Tensor, Tensor | None]:
    """Project, normalise and map every token: y (B, N, k o) and the energy, (B,) in float32 or better.

    Sums over tokens accumulate in float32 for 16-bit inputs. A gradient that is to be differentiated again is
    that of the formulas, which store z.

    Args:
        x: layer input, (B, N, d).
        weight: projection to the queries and keys, (h * 2 * p, d): a head's query and key lie side by side.
        bias: (h * 2 * p,) or None.
        num_heads: h.
        fold: ``fold(rows, *parameters)`` gives ``FoldedWeights``; rows (B, M, d), or None without samples.
        parameters: tensors that ``fold`` is differentiated by.
        samples: where the rows are read.
        normalize: whether phi divides by the norm (cosine), or is the identity.
        attention_mask: (B, N), True = real token; padded tokens get ``constant``.
        engine: module with ``map_tokens`` and ``pull_back``.
    """
    tokens = Tokens(num_heads, normalize, attention_mask)
    return _PrimalPass.apply(x, weight, bias, tokens, fold, samples, engine, *parameters)


class _PrimalPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tokens, fold: Fold,
        samples: Samples | None, engine: ModuleType, *parameters: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        with without_autocast(x):
            # Folding the weights is cheap, so autograd differentiates it, in a graph of its own.
            with torch.set_grad_enabled(any(ctx.needs_input_grad)):
                leaves = [parameter.detach().requires_grad_() for parameter in parameters]
                rows = None if samples is None else samples.read(x.detach()).requires_grad_()
                folded = fold(rows, *leaves)
            y, gram = engine.map_tokens(
                tokens, x, weight, bias, folded.maps.detach().to(x.dtype), folded.constant.detach(),
                folded.energy is not None,
            )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, gram, *parameters)
        ctx.tokens, ctx.samples, ctx.engine, ctx.fold = tokens, samples, engine, fold
        ctx.folded, ctx.inputs = folded, leaves if rows is None else [rows, *leaves]
        energy = None
        if gram is not None and folded.energy is not None:
            energy = (gram * folded.energy.detach()).sum(dim=(1, 2, 3, 4))
        return y, energy

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, gram, *parameters = ctx.saved_tensors
        folded: FoldedWeights = ctx.folded
        if torch.is_grad_enabled():
            needed = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[7:]]
            with without_autocast(x):
                first = differentiable_gradients(
                    functools.partial(_formulas, ctx.tokens, ctx.fold, ctx.samples),
                    (x, weight, bias, *parameters), needed, (grad_y, grad_energy),
                )  # fmt: skip
            return *first[:3], None, None, None, None, *first[3:]
        with without_autocast(x):
            pull, grad_s = None, None
            if gram is not None and folded.energy is not None and grad_energy is not None:
                weights = grad_energy.view(-1, 1, 1, 1, 1)
                grad_s = (weights * gram).sum_to_size(folded.energy.shape)
                pull = (2 * weights * folded.energy.detach()).to(x.dtype)  # the energy is <Z^T Z, S>
            maps = folded.maps.detach().to(x.dtype)
            sums = ctx.engine.pull_back(ctx.tokens, x, weight, bias, maps, pull, grad_y)
            small = list(_gradients(folded, ctx.inputs, (sums.maps, sums.constant, grad_s)))
            if ctx.samples is not None:
                ctx.samples.add_to(sums.x, small.pop(0))
        grad_bias = None if bias is None else sums.bias.to(bias.dtype)
        return sums.x, sums.weight.to(weight.dtype), grad_bias, None, None, None, None, *small


def _formulas(
    tokens: Tokens, fold: Fold, samples: Samples | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    *parameters: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What ``primal_pass`` gives, in differentiable operations that keep z."""
    folded = fold(None if samples is None else samples.read(x), *parameters)
    if tokens.mask is not None:
        x = x.masked_fill(~tokens.mask[..., None], 0.0)
    z = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (2 * tokens.num_heads, -1))  # (B, N, 2h, p)
    if tokens.normalize:
        z = cosine(z)
    if tokens.mask is not None:
        z = z.masked_fill(~tokens.mask[..., None, None], 0.0)
    maps = folded.maps.to(x.dtype)
    by_group = z.flatten(2).unflatten(-1, (maps.size(1), -1)).transpose(1, 2)  # (B, k, N, 2d / k)
    y = (by_group @ maps).transpose(1, 2).flatten(2) + folded.constant.to(x.dtype)
    if folded.energy is None:
        return y, None
    halves = exactly(z).transpose(1, 2).unflatten(1, (-1, 2))  # (B, h, 2, N, p)
    return y, ((halves.mT @ halves) * folded.energy).sum(dim=(1, 2, 3, 4))


def _gradients(
    folded: FoldedWeights, inputs: list[Tensor], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """Gradients by the inputs, through the outputs that depend on them (the constant only with biases)."""
    chosen = [
        (output, grad.to(output.dtype))
        for output, grad in zip(folded, grads, strict=True)
        if output is not None and grad is not None and output.requires_grad
    ]
    outputs, given = zip(*chosen, strict=True)
    # The graph is kept for callers that run backward twice (retain_graph); it is freed with the context.
    return torch.autograd.grad(outputs, inputs, given, retain_graph=True, materialize_grads=True)
