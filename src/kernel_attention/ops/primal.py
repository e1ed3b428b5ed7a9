"""Primal-Attention in one pass over the sequence, forward and backward: no score is ever stored.

Everything right of the feature maps is the same for every token, so it is multiplied out beforehand. With
z_i = [phi(q_i) ; phi(k_i)] a head's output is z_i G, G = [W_{e|X} C_e ; W_{r|X} C_r] being (2p, p), and the
energy of the objective is <Z^T Z, S>, S being (p, p) for each half of z. A token then costs two small
products, made in slices that stay in the processor's cache. The backward pass keeps the input alone and
computes z again.

Legend: B batch, N tokens, h heads, p head width, d = h p, M sampled rows, k groups of heads mapped together,
o outputs of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_attention.kernels.feature_maps import SMALLEST_NORM
from kernel_attention.kernels.statistics import accumulation_dtype

_SLICE = 1024  # tokens; z and its gradient stay in a core's second-level cache at common widths


class Folded(NamedTuple):
    """What a layer's weights come to when the tokens are left out; B is 1 where no token enters.

    ``maps`` (B, k, 2d / k, o) and ``constant`` (k o,) make the output; ``energy`` (B, h, 2, p, p) is S for
    queries and keys, None where there is no objective.
    """

    maps: Tensor
    constant: Tensor
    energy: Tensor | None


class Samples(NamedTuple):
    """Where the sampled rows lie: ``positions`` (B, M) int64; ``present`` (B, M) bool or None for all."""

    positions: Tensor
    present: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        """The rows, (B, M, d); zeros where there is none."""
        rows = x.gather(1, self.positions[..., None].expand(-1, -1, x.size(-1)))
        return rows if self.present is None else rows.masked_fill(~self.present[..., None], 0.0)

    def add_to(self, x: Tensor, rows: Tensor) -> None:
        """Add rows (B, M, d) to the tokens of x that they were read from."""
        if self.present is not None:
            rows = rows.masked_fill(~self.present[..., None], 0.0)
        x.scatter_add_(1, self.positions[..., None].expand(-1, -1, x.size(-1)), rows.to(x.dtype))


Fold = Callable[..., Folded]


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
    key_padding_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Project, normalise and map every token: y (B, N, k o) and the energy, (B,) in float32 or better.

    First derivatives only. Sums over tokens accumulate in float32 for 16-bit inputs.

    Args:
        x: layer input, (B, N, d).
        weight: projection to the queries and keys, (h * 2 * p, d): a head's query and key lie side by side.
        bias: (h * 2 * p,) or None.
        num_heads: h.
        fold: ``fold(rows, *parameters)`` gives :class:`Folded`; rows are (B, M, d), or None without samples.
        parameters: tensors that ``fold`` is differentiated by.
        samples: where the rows are read.
        normalize: whether phi divides by the norm (cosine), or is the identity.
        key_padding_mask: (B, N), True = real token; padded tokens get ``constant``.
    """
    tokens = _Tokens(num_heads, normalize, key_padding_mask)
    return _PrimalPass.apply(x, weight, bias, tokens, fold, samples, *parameters)


class _Tokens(NamedTuple):
    """How z is made of the tokens."""

    num_heads: int
    normalize: bool
    mask: Tensor | None

    def features(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, where: tuple[slice, slice]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tokens themselves (b, n, d), their z (b, n, 2h, p), and 1 / norm (b, n, 2h, 1)."""
        part = x[where]
        mask = None if self.mask is None else self.mask[where]
        if mask is not None:
            part = part.masked_fill(~mask[..., None], 0.0)  # padding may hold anything, NaN included
        z = torch.nn.functional.linear(part, weight, bias).unflatten(-1, (2 * self.num_heads, -1))
        scale = None
        if self.normalize:
            norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype))
            scale = norm.masked_fill_(norm < SMALLEST_NORM, torch.inf).reciprocal_()
            if mask is not None:
                scale.masked_fill_(~mask[..., None, None], 0.0)
            z.mul_(scale)
        elif mask is not None:
            z.masked_fill_(~mask[..., None, None], 0.0)
        return part, z, scale

    def back(self, grad_z: Tensor, z: Tensor, scale: Tensor | None, where: tuple[slice, slice]) -> Tensor:
        """The gradient before the normalisation, in the place of ``grad_z`` (b, n, 2h, p)."""
        if scale is not None:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
            along = (z * grad_z).sum(dim=-1, keepdim=True)
            return grad_z.addcmul_(z, along, value=-1).mul_(scale)
        return grad_z if self.mask is None else grad_z.masked_fill_(~self.mask[where][..., None, None], 0.0)


class _PrimalPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens, fold: Fold,
        samples: Samples | None, *parameters: Tensor,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        with torch.autocast(x.device.type, enabled=False):
            folded = fold(None if samples is None else samples.read(x), *parameters)
            maps, constant = folded.maps.to(x.dtype), folded.constant.to(x.dtype)
            groups, width = maps.size(1), maps.size(3)
            y = x.new_empty(x.size(0), x.size(1), groups * width)
            gram = None
            if folded.energy is not None:
                gram = folded.energy.new_zeros(x.size(0), *folded.energy.shape[1:])
            for where in _slices(x):
                _, z, _ = tokens.features(x, weight, bias, where)
                mapped = _by_group(z, groups) @ _of(maps, where)
                torch.add(mapped.transpose(1, 2).flatten(2), constant, out=y[where])
                if gram is not None:
                    half = z.transpose(1, 2)
                    gram[where[0]] += (half.mT @ half).view_as(gram[where[0]])
        ctx.save_for_backward(x, weight, bias, gram, *parameters)
        ctx.tokens, ctx.fold, ctx.samples = tokens, fold, samples
        energy = None
        if gram is not None and folded.energy is not None:
            energy = (gram * folded.energy).sum(dim=(1, 2, 3, 4))
        return y, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_energy: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, gram, *parameters = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            with torch.enable_grad():
                rows = None if ctx.samples is None else ctx.samples.read(x).requires_grad_()
                leaves = [parameter.detach().requires_grad_() for parameter in parameters]
                folded = ctx.fold(rows, *leaves)
            pull, grad_s = None, None
            if gram is not None and folded.energy is not None and grad_energy is not None:
                weights = grad_energy.view(-1, 1, 1, 1, 1)
                grad_s = weights * gram
                pull = (2 * weights * folded.energy.detach()).flatten(1, 2).to(x.dtype)
            sums = _walk_back(ctx, x, weight, bias, folded, pull, grad_y)
            outputs, grads = [folded.maps, folded.constant], [sums.maps, sums.constant]
            if grad_s is not None:
                outputs.append(folded.energy)
                grads.append(grad_s.sum_to_size(folded.energy.shape))
            inputs = leaves if rows is None else [rows, *leaves]
            small = list(_gradients(outputs, inputs, grads))
            if rows is not None:
                ctx.samples.add_to(sums.x, small.pop(0))
        return sums.x, sums.weight.to(weight.dtype), sums.bias, None, None, None, *small


class _Sums(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    maps: Tensor
    constant: Tensor


def _walk_back(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, folded: Folded, pull: Tensor | None,
    grad_y: Tensor,
) -> _Sums:  # fmt: skip
    """The gradients that are sums over the tokens, and that of the tokens."""
    exact = accumulation_dtype(x.dtype)
    maps = folded.maps.detach().to(x.dtype)
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=exact)
    grad_bias = torch.zeros(weight.size(0), dtype=exact, device=x.device)
    grad_maps, grad_constant = (
        torch.zeros_like(maps, dtype=exact),
        torch.zeros_like(folded.constant, dtype=exact),
    )
    for where in _slices(x):
        part, z, scale = ctx.tokens.features(x, weight, bias, where)
        grad = grad_y[where].unflatten(-1, (maps.size(1), -1)).transpose(1, 2)  # (b, k, n, o)
        grad_constant += grad.transpose(1, 2).flatten(2).sum(dim=(0, 1), dtype=exact)
        own = _by_group(z, maps.size(1)).mT @ grad
        grad_maps[where[0] if maps.size(0) > 1 else slice(None)] += (
            own if maps.size(0) > 1 else own.sum(0, True)
        )
        grad_z = (grad @ _of(maps, where).mT).transpose(1, 2).reshape(z.shape)
        if pull is not None:
            grad_z += (z.transpose(1, 2) @ _of(pull, where)).transpose(1, 2)
        grad_z = ctx.tokens.back(grad_z, z, scale, where).flatten(2)
        torch.matmul(grad_z, weight, out=grad_x[where])
        flat = grad_z.flatten(0, 1)
        grad_weight += flat.mT @ part.flatten(0, 1)
        grad_bias += flat.sum(dim=0, dtype=exact)
    return _Sums(
        grad_x, grad_weight, None if bias is None else grad_bias.to(bias.dtype), grad_maps, grad_constant
    )


def _slices(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Samples and tokens of every slice: part of one sequence, or several whole short ones."""
    batch, length = x.size(0), x.size(1)
    together = max(_SLICE // length, 1)
    for first in range(0, batch, together):
        for start in range(0, length, _SLICE):
            yield slice(first, first + together), slice(start, start + _SLICE)


def _by_group(z: Tensor, groups: int) -> Tensor:
    """(b, n, 2h, p) -> (b, k, n, 2d / k)."""
    return z.flatten(2).unflatten(-1, (groups, -1)).transpose(1, 2)


def _of(batched: Tensor, where: tuple[slice, slice]) -> Tensor:
    """The slice's samples of what may be shared by all."""
    return batched[where[0]] if batched.size(0) > 1 else batched


def _gradients(outputs: list[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
    """Of those outputs that depend on the inputs; a layer without biases has a constant that does not."""
    chosen = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    return torch.autograd.grad(
        [output for output, _ in chosen],
        inputs,
        [grad.to(output.dtype) for output, grad in chosen],
        materialize_grads=True,
    )
