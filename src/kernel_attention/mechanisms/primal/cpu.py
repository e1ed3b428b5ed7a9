"""Primal-Attention in PyTorch's operations, in slices of the tokens that fit a processor's cache.

It runs on any device. Legend as in ``one_pass``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.engine import Engine, Unsupported
from kernel_attention.mechanisms.primal.causal_cpu import causal_primal_layer
from kernel_attention.mechanisms.primal.causal_gpu import causal_primal_launches
from kernel_attention.mechanisms.primal.gpu import primal_launches
from kernel_attention.mechanisms.primal.map_operator import (
    MapOperator,
    Sums,
    TokenPass,
    Tokens,
    add_product,
    add_rows,
)
from kernel_attention.mechanisms.primal.one_pass import (
    PrimalCall,
    PrimalResult,
    PrimalWeights,
    primal_pass,
)
from kernel_attention.tensors.features.feature_maps import cosine, identity
from kernel_attention.tensors.sampling import Samples, causal_grid, causal_samples
from kernel_attention.tensors.statistics import accumulation_dtype, exactly
from kernel_attention.tensors.unit_rows import inverse_norms

_SLICE = 2048  # tokens; their z and its gradient stay in the second-level caches at common widths


class _View(NamedTuple):
    """A buffer for z of n tokens, with views in the four shapes that the passes need.

    Every slice reuses it, because the system would have to map new memory first.
    """

    flat: Tensor  # (n, 2d)
    halves: Tensor  # (n, 2h, p)
    by_half: Tensor  # (2h, n, p)
    by_group: Tensor  # (k, n, 2d / k)


class TokenSlices(TokenPass):
    """The pass in PyTorch, a slice after the other."""

    def map_tokens(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
        with_gram: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As ``TokenPass.map_tokens``."""
        groups = maps.size(1)
        constant = constant.to(x.dtype)
        y = x.new_empty(x.size(0), x.size(1), groups * maps.size(3))
        workspace = Workspace(x, weight, tokens, groups)
        exact, halves = accumulation_dtype(x.dtype), 2 * tokens.num_heads
        size = weight.size(0) // halves
        gram = x.new_zeros(x.size(0), halves, size, size, dtype=exact) if with_gram else None
        for i, own_map in enumerate(maps.expand(x.size(0), -1, -1, -1)):
            for part, mask, out in _slices(i, x, tokens.mask, y):
                z = workspace.get(0, part.size(0))
                fill_features(part, mask, weight, bias, tokens, z, workspace.get(2, part.size(0)))
                _by_group(out, groups).baddbmm_(z.by_group, own_map, beta=0)
                out += constant  # with two threads faster than a product that starts from it
                if gram is not None:
                    half = exactly(z.by_half)  # rounded products would not sum to a positive matrix
                    gram[i].baddbmm_(half.mT, half)
        return y, None if gram is None else gram.unflatten(1, (-1, 2))

    def pull_back(
        self, tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor,
        pull: Tensor | None, grad_y: Tensor,
    ) -> Sums:  # fmt: skip
        """As ``TokenPass.pull_back``."""
        exact, groups = accumulation_dtype(x.dtype), maps.size(1)
        sums = Sums(
            x.new_empty(x.shape),
            x.new_zeros(weight.shape, dtype=exact),
            x.new_zeros(weight.size(0), dtype=exact),
            x.new_zeros(maps.shape, dtype=exact),
            x.new_zeros(groups * maps.size(3), dtype=exact),
        )
        workspace = Workspace(x, weight, tokens, groups)
        shape = (x.size(0), -1, -1, -1)
        pull = None if pull is None else pull.flatten(1, 2)
        for i, (own_map, own_sum) in enumerate(
            zip(maps.mT.expand(shape), sums.maps.expand(shape), strict=True)
        ):
            for part, mask, grad, grad_x in _slices(i, x, tokens.mask, grad_y, sums.x):
                z, grad_z = workspace.get(0, part.size(0)), workspace.get(1, part.size(0))
                part, scale = fill_features(
                    part, mask, weight, bias, tokens, z, workspace.get(2, part.size(0))
                )
                add_rows(sums.constant, grad)
                by_group = _by_group(grad, groups)
                add_product(own_sum, z.by_group.mT, by_group)
                grad_z.by_group.baddbmm_(by_group, own_map, beta=0)
                if pull is not None:
                    grad_z.by_half.baddbmm_(z.by_half, pull[i])
                spare = workspace.get(2, part.size(0))
                features_back(grad_z, z, scale, mask, spare)
                torch.mm(grad_z.flat, weight, out=grad_x)
                add_product(sums.weight, grad_z.flat.mT, part)
                add_rows(sums.bias, grad_z.flat)
        return sums


def _slices(i: int, x: Tensor, mask: Tensor | None, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The slices of sequence i: tokens (n, d), their mask or None, and the same rows of the others."""
    parts = [tensor[i].split(_SLICE) for tensor in (x, *others)]
    masks = [None] * len(parts[0]) if mask is None else mask[i].split(_SLICE)
    return zip(parts[0], masks, *parts[1:], strict=True)


class Workspace:
    """Three buffers of one slice each, and their views by the number of tokens."""

    def __init__(self, x: Tensor, weight: Tensor, tokens: Tokens, groups: int) -> None:
        most = min(_SLICE, x.size(1))
        self.memory = [x.new_empty(most, weight.size(0)) for _ in range(3)]
        self.halves, self.groups = 2 * tokens.num_heads, groups
        self.views: dict[tuple[int, int], _View] = {}

    def get(self, which: int, count: int) -> _View:
        """The first ``count`` rows of buffer ``which``."""
        if (which, count) not in self.views:
            flat = self.memory[which][:count]
            halves = flat.view(count, self.halves, -1)
            self.views[which, count] = _View(
                flat, halves, halves.transpose(0, 1), _by_group(flat, self.groups)
            )
        return self.views[which, count]


def fill_features(
    part: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tokens,
    z: _View,
    spare: _View,
) -> tuple[Tensor, Tensor | None]:
    """Fill z. Return the tokens, zero where they are padding, and 1 / norm (n, 2h, 1) or None."""
    if mask is not None:
        part = part.masked_fill(~mask[:, None], 0.0)  # padding may hold any value, also NaN
    torch.mm(part, weight.mT, out=z.flat)
    if bias is not None:
        z.flat.add_(bias)
    if not tokens.normalize:
        if mask is not None:
            z.flat.masked_fill_(~mask[:, None], 0.0)
        return part, None
    ignored = None if mask is None else ~mask[:, None, None]
    scale = inverse_norms(z.halves, ignored=ignored, spare=spare.halves)
    if mask is not None:
        scale.masked_fill_(~mask[:, None, None], 0.0)
    z.halves.mul_(scale)
    return part, scale


def features_back(grad_z: _View, z: _View, scale: Tensor | None, mask: Tensor | None, spare: _View) -> None:
    """Turn the gradient of z into that of the projections, in place; ``scale`` as from ``fill_features``."""
    if scale is not None:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
        product = torch.mul(z.flat, grad_z.flat, out=spare.flat)
        along = product.view_as(z.halves).sum(dim=-1, keepdim=True)
        grad_z.halves.addcmul_(z.halves, along, value=-1).mul_(scale)
    elif mask is not None:
        grad_z.flat.masked_fill_(~mask[:, None], 0.0)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(n, ..) with the heads in order -> (k, n, ..), one slice for each group of heads."""
    return x.view(x.size(0), groups, -1).transpose(0, 1)


SLICES = MapOperator("primal_map", TokenSlices())


class OnePass(Engine[PrimalCall, PrimalResult]):
    """One pass over the tokens; the causal data-dependent layer has a pass of its own, without J."""

    name = "fused"
    shares_sequences = True

    def why_not(self, call: PrimalCall, compiled: bool) -> Unsupported | None:
        """A reason for maps that are not cosine or identity, and for some causal data-dependent calls."""
        if (why := call.why_not()) is not None:
            return why
        if not (call.is_causal and call.num_rows):
            return None
        if call.with_energy:
            return Unsupported("one pass has no objective of data-dependent weights with is_causal=True")
        if compiled or type(call.x) is not Tensor:
            return Unsupported(
                "a compiler cannot ask how many rows a block of tokens has with is_causal=True"
            )
        return None

    def pays_from(self, call: PrimalCall, compiled: bool) -> int | None:
        """Measured on CPUs, where multiplying the weights out costs more than it saves below.

        The compiler fuses the formulas as well as the pass does, and in wide layers better. On accelerators
        the launches were counted, and no time was measured.
        """
        if call.x.device.type != "cpu":
            return 1 if _has_few_launches(call) and not compiled else None
        if call.is_causal and call.num_rows:
            return None if compiled else 512
        width = call.embed_dim
        if not compiled:
            return max(256, 8 * width)
        is_narrow = width <= (128 if width // call.num_heads <= 32 else 64)
        return 2048 if is_narrow else None

    def attend(self, call: PrimalCall) -> PrimalResult:
        """The pass of the call's kind."""
        if call.x.device.type != "cpu" and _has_few_launches(call) and not torch.compiler.is_compiling():
            if call.is_causal and call.num_rows:
                return causal_primal_launches(call)
            return primal_launches(call, call.samples())
        if not (call.is_causal and call.num_rows):
            return primal_pass(call, call.samples(), SLICES)
        assert isinstance(call.weights, PrimalWeights)
        grid = causal_grid(call.x, call.num_rows, call.max_len)
        y = causal_primal_layer(
            call.x, call.weights, causal_samples(call.x, grid, call.attention_mask), grid,
            normalize=call.feature_map is cosine, attention_mask=call.attention_mask,
            running_means=call.running_means,
        )  # fmt: skip
        return PrimalResult(y, None, None)


def _has_few_launches(call: PrimalCall) -> bool:
    """True where ``gpu.py`` or ``causal_gpu.py`` has the form of the call."""
    if isinstance(call.weights, Unsupported):
        return False
    (q, q_bias), (k, k_bias) = call.weights.q_proj, call.weights.k_proj
    is_served = call.group is None and not call.with_grams
    is_served = is_served and q.dtype == k.dtype and (q_bias is None) == (k_bias is None)
    return is_served and not (call.is_causal and call.num_rows and call.with_energy)


FUSED = OnePass()


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
) -> tuple[Tensor, Tensor | None]:
    """A layer's output (B, N, d), and its energy (B,) in float32 or better or None.

    The energy is the mean over heads of sum_i ||L e_i||^2 + ||L r_i||^2. The results are those of
    ``primal_attention`` between its projections, up to rounding, in O(N d^2) time whatever the rank. The
    weights are multiplied out first, O(d p s) per sequence, so very short sequences gain nothing. Sums over
    tokens accumulate in float32 for 16-bit inputs. Where the gradient itself is differentiated, it comes from
    the formulas, which store z.

    Args:
        x: (B, N, d).
        weights: the layer's parameters.
        samples: the positions of f(X) in x; None: data-independent weights.
        normalize: cosine feature map; False: identity.
        with_energy: whether the energy is wanted; needs ``sqrt_lambda``.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only; needs data-independent weights.
        running_means: with ``is_causal``, average queries and keys over the prefix (listing 1).
    """
    if is_causal and samples is not None:
        raise ValueError(
            "primal_layer: samples are those of the whole sequence, which is_causal=True forbids"
        )
    call = PrimalCall(
        x, weights, x.size(2), weights.w_e.size(0), cosine if normalize else identity, num_rows=0,
        max_len=None, with_energy=with_energy, with_grams=False, attention_mask=attention_mask,
        is_causal=is_causal, running_means=running_means, group=None,
    )  # fmt: skip
    return primal_pass(call, samples, SLICES)[:2]
