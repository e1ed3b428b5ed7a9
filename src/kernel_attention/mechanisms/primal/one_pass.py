"""A whole Primal-Attention layer in one pass over the sequence, forward and backward, without stored scores.

Everything to the right of the feature maps is the same for every token, so it is multiplied out first. With
z_i = [phi(q_i) ; phi(k_i)] a head's output is z_i G, where G = [W_{e|X} C_e^T ; W_{r|X} C_r^T] is (2p, p).
The energy of the objective is <Z^T Z, S>, where S = W Lambda W^T is (p, p) for each half of z. A token then
costs two small products, whatever the rank: O(N d^2) time, and no memory but that of the output. The backward
pass keeps only the input and computes z again.

``folding`` multiplies out, and ``map_operator`` holds the pass over the tokens, an operator of PyTorch.
Nothing else grows with the sequence.

Source as in ``kernel_attention.mechanisms.primal.functional``; C = [C_e C_r] is the concat map.

Legend: B batch, N tokens, h heads, p head width, d = h p, s rank, M sampled rows, k groups of heads mapped
together, o outputs of a group.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.engine import Unsupported
from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.mechanisms.nested_objective.functional import KernelGrams
from kernel_attention.mechanisms.primal.map_operator import MapOperator, Readout, Tokens
from kernel_attention.tensors.affine import Affine, apply_affine, autocast
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, identity
from kernel_attention.tensors.recompute import needs_operator
from kernel_attention.tensors.sampling import Samples, part_positions, sample_positions
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


class PrimalCall(NamedTuple):
    """A call of Primal-Attention, as its engines see it.

    Attributes:
        x: (B, N, d).
        weights: the layer's parameters; why they are not all that its projections compute with.
        embed_dim: d.
        num_heads: h.
        feature_map: phi.
        num_rows: rows M of f(X); 0: data-independent weights.
        max_len: length of the causal form's sampling grid.
        with_energy: whether the energy of J is wanted; needs ``sqrt_lambda``.
        with_grams: whether the nested objective's Gram matrices are wanted; they need a whole sequence.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only.
        running_means: with ``is_causal``, average queries and keys over the prefix (listing 1).
        group: processes that hold the parts of every sequence. x and mask are those of this part.
        total_energy: whether one sum over the batch will do for the energy; an engine may give it.
    """

    x: Tensor
    weights: PrimalWeights | Unsupported
    embed_dim: int
    num_heads: int
    feature_map: FeatureMap
    num_rows: int
    max_len: int | None
    with_energy: bool
    with_grams: bool
    attention_mask: Tensor | None
    is_causal: bool
    running_means: bool
    group: SequenceGroup | None
    total_energy: bool = False

    def why_not(self) -> Unsupported | None:
        """The reason why one pass does not serve the call; None: it does."""
        if self.feature_map not in (cosine, identity):
            return Unsupported("one pass needs the feature map cosine or identity")
        return self.weights if isinstance(self.weights, Unsupported) else None

    def samples(self) -> Samples | None:
        """Where f(X) lies in x; None with data-independent weights."""
        if not self.num_rows:
            return None
        if self.group is None:
            return Samples(*sample_positions(self.x, self.num_rows, self.attention_mask))
        before, total = self.group.places(num_real(self.x, self.attention_mask))
        return Samples(*part_positions(self.x, self.num_rows, self.attention_mask, before, total))


class PrimalResult(NamedTuple):
    """y (B, N, d), the energy (B,) in float32 or better or None, and the Gram matrices or None.

    The energy is the mean over heads of sum_i ||L e_i||^2 + ||L r_i||^2, of all parts of a sequence. It may
    be the sum of that over the batch, a number, where ``total_energy`` of the call allows it.
    """

    y: Tensor
    energy: Tensor | None
    grams: KernelGrams | None


def primal_pass(call: PrimalCall, samples: Samples | None, operator: MapOperator) -> PrimalResult:
    """The results of a layer whose sampled rows, if any, are those of the whole sequence.

    ``operator`` goes over the tokens.
    """
    x, weights, mask, group = call.x, call.weights, call.attention_mask, call.group
    assert isinstance(weights, PrimalWeights)
    if call.is_causal and call.running_means:  # an affine map of the mean is the mean of the map
        before = None if group is None else _before(x, mask, group)
        x = running_mean(x[:, None], mask, before).squeeze(1)
    x = autocast(x)
    num_heads = weights.w_e.size(0)
    weight, bias = side_by_side(weights.q_proj, weights.k_proj, num_heads)
    # One map for all heads saves a pass, but costs h (2p, d) products instead of h (2p, p) ones and O.
    fold_output = num_heads <= 2
    readout = Readout(
        weights.w_e,
        weights.w_r,
        weights.sqrt_lambda if call.with_energy else None,
        *weights.concat,
        *(weights.out_proj if fold_output else (None, None)),
    )
    with without_autocast(x):
        rows = None
        if samples is not None:
            x, rows = with_rows(x, samples)
        maps, constant, energy_weights = operator.token_pass.fold(x, readout, rows, group)
        y, gram = operator(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), maps, constant,
            Tokens(num_heads, call.feature_map is cosine, mask),
            with_gram=call.with_grams or energy_weights is not None,
        )  # fmt: skip
        energy = grams = None
        if gram is not None and energy_weights is not None:
            energy = (gram * energy_weights).sum(dim=(1, 2, 3, 4))
            energy = energy if group is None else group.total(energy)
        if gram is not None and call.with_grams:
            by_head = None if rows is None else exactly(rows.detach()).unflatten(-1, (num_heads, -1))
            grams = KernelGrams(
                gram[:, :, 0].detach(),
                gram[:, :, 1].detach(),
                None if by_head is None else by_head.transpose(1, 2),
            )
    return PrimalResult(y if fold_output else apply_affine(y, weights.out_proj), energy, grams)


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


def with_rows(x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """x, and the rows that are sampled from it, (B, M, d)."""
    return (x, samples.read(x)) if needs_operator(x) else _Rows.apply(x, samples)


class _Rows(torch.autograd.Function):
    """x and rows of it. The gradient of the rows is added to that of x in place, which saves two passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        ctx.samples = samples
        ctx.set_materialize_grads(False)
        ctx.sizes = x.shape
        return x, samples.read(x)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad_rows: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_rows is None:
            return grad_x, None
        if grad_x is None:
            grad_x = grad_rows.new_zeros(ctx.sizes)
        if torch.is_grad_enabled():
            grad_x = grad_x.clone()
        # x goes from here to the operator alone, whose gradient of it is a tensor of its own.
        ctx.samples.add_to(grad_x, grad_rows)
        return grad_x, None


def primal_operations(embed_dim: int, num_heads: int, *, objective: bool, training: bool) -> int:
    """Operations of the one-pass non-causal layer per token, counted by hand: counters do not see them.

    z = [W_q; W_k] x costs 4 d^2. Up to two heads the output map is folded into the heads' (2d -> d, 4 d^2).
    With more, a head maps 2p -> p (p = d / h) and the output map follows: 4 d p + 2 d^2. The Gram matrices of
    the objective cost 4 d p. The backward pass computes z again (4 d^2), and takes the gradients of maps and
    z (twice the map's cost), of x and of W (twice 4 d^2), and of the objective (4 d p).
    """
    head_dim = embed_dim // num_heads
    project = 4 * embed_dim**2
    mapped, out = (4 * embed_dim**2, 0) if num_heads <= 2 else (4 * embed_dim * head_dim, 2 * embed_dim**2)
    gram = 4 * embed_dim * head_dim if objective else 0
    inference = project + mapped + out
    if not training:
        return inference
    return inference + gram + (3 * project + 2 * mapped + 2 * out + gram)


def primal_numbers(embed_dim: int, *, training: bool) -> int:
    """Numbers a token must move at least: x in, y out; backward x and dy in, dx out. z stays in the cache."""
    return embed_dim * (5 if training else 2)
