"""Primal attention with values from a trained softmax layer, by the nested objective on recorded inputs.

The student keeps the softmax layer's queries, keys and values. Its features f = phi(q) W_e Lambda^{1/2} and
g = phi(k) W_r Lambda^{1/2} are fitted so that f g^T is the best model of the softmax attention A of every
sequence, by the nested objective with A in the place of phi's own kernel. For one sequence the solution is
known: the truncated SVD of A between the spans of phi(q) and phi(k). The descent starts from it.

``kernel_model_errors`` says how well such a layer models the kernel attention of its own feature map.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.capture import Batch, LayerChoice, capture_chosen, choose_layers
from kernel_attention.analysis.initialization import (
    PrimalInitialization,
    output_errors,
    ridge_solution,
    softmax_twin,
    student_of,
)
from kernel_attention.errors import InputError, require_weight
from kernel_attention.mechanisms.nested_objective.functional import (
    KernelFactors,
    KernelGrams,
    kernel_factors,
    kernel_grams,
    nested_objective,
)
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal_values import PrimalValueAttention, primal_value_attention
from kernel_attention.mechanisms.softmax.layer import SoftmaxAttention
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.statistics import exactly, smallest

_LEARNING_RATE = 0.01


@torch.no_grad()
def primal_values_from_softmax(
    layer: nn.Module,
    samples: Tensor,
    *,
    rank: int | None = None,
    attention_mask: Tensor | None = None,
    held_out: Tensor | None = None,
    held_out_mask: Tensor | None = None,
    steps: int = 200,
    ridge: float = 1e-3,
    seed: int = 0,
    **options: Any,
) -> PrimalInitialization:
    """Make a ``PrimalValueAttention`` layer that starts from a trained softmax layer.

    The query, key and value projections are taken over. W_e, W_r and Lambda minimise the nested objective
    against the softmax attention of each sample sequence. ``out_proj`` is then the ridge regression of the
    softmax layer's output on the heads' outputs, in float64. The forms are the bidirectional ones.

    ``distill_primal_values`` calls it for the layers of a whole model.

    Args:
        layer: a softmax layer as ``primal_from_softmax`` takes it.
        samples: inputs of the layer, (B, N, d). The attention of all of them is formed, and their m features:
            O(B h (N^2 + (N + s) m)) memory, with m = 1 + p + p (p + 1) / 2 for ``feature_map="taylor"``.
        rank: directions s per head; by default the head width p.
        attention_mask: (B, N), True = real token.
        held_out: other inputs, (B', N', d), on which the error is measured too.
        held_out_mask: their padding mask.
        steps: of the descent (Adam, all samples at once); 0 leaves the start, which is the solution where
            all sequences have the same Gram matrices.
        ridge: penalty of the least squares, relative to the mean squared feature.
        seed: for the draws of a new layer; the global generator is left as it was.
        options: options of PrimalValueAttention (``feature_map``, ``normalize``, ``eta``).

    Returns:
        The layer, in the dtype, device and mode of ``layer``, and its errors; see ``PrimalInitialization``.

    Raises:
        InputError: for a layer without softmax attention, samples that do not fit it, or options that
            PrimalValueAttention does not have.
    """
    require_weight(ridge=ridge)
    if not isinstance(steps, int) or steps < 0:
        raise InputError(f"steps={steps!r} must be a whole number of at least 0")
    with torch.random.fork_rng([]):  # new layers draw weights
        torch.default_generator.manual_seed(seed)
        teacher = softmax_twin(layer)
        rank = teacher.head_dim if rank is None else rank
        student = student_of("primal_values", teacher, rank, options)
        assert isinstance(student, PrimalValueAttention)
    x = samples.double()
    target = teacher(x, attention_mask=attention_mask)  # checks the samples too
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if attention_mask is None else attention_mask
    if not real.any() or not x[real].isfinite().all():
        raise InputError("samples must hold real tokens, all of them finite")

    factors = _factors(student, teacher, x, attention_mask, real)
    _solve_pooled(student, factors, ridge)
    is_long = factors.keys.size(2) > factors.keys.size(3)
    _descend(student, factors.grams() if is_long else factors, steps)
    del factors
    _fit_out(student, x, attention_mask, target[real], real, ridge)
    errors = output_errors(student, teacher, (x, attention_mask), held_out, held_out_mask)
    like = next(layer.parameters())
    return PrimalInitialization(student.to(like.dtype).train(layer.training), *errors)


def distill_primal_values(
    model: nn.Module, batch: Batch, layers: LayerChoice = "all", **options: Any
) -> dict[str, PrimalInitialization]:
    """Replace a model's softmax layers by primal layers with values, in place, one after the other.

    Each layer is fitted by ``primal_values_from_softmax`` on the inputs that it has in the model whose
    earlier layers are already replaced.

    Args:
        model: a model with ``SoftmaxAttention`` layers: one of ours, or one of another library after
            ``replace_attention(model, {"all": "softmax"})``.
        batch: what the model is called with, see ``kernel_attention.analysis.capture``.
        layers: which layers, see there; self-attention that is not causal.
        options: those of ``primal_values_from_softmax``.

    Returns:
        The new layers and their errors by the layers' names, from the first to the last.

    Raises:
        InputError: for a layer that is causal, reads a context, or is no softmax layer of this library.
    """
    found = {}
    for name in choose_layers(model, batch, layers):
        seen = capture_chosen(model, batch, [name])[name]
        if seen.layer is None or seen.x is None:
            raise InputError(
                f"layer {name} is of another library; accepted: SoftmaxAttention, which "
                "replace_attention(model, {'all': 'softmax'}) makes of it"
            )
        if seen.is_causal or seen.context is not None:
            kind = "causal" if seen.is_causal else "cross-attention"
            raise InputError(f"layer {name} is {kind}; accepted: self-attention that is not causal")
        found[name] = primal_values_from_softmax(seen.layer, seen.x, attention_mask=seen.real_keys, **options)
        for module in list(model.modules()):
            for place, child in module.named_children():
                if child is seen.layer:
                    setattr(module, place, found[name].layer)
    return found


def _factors(
    student: PrimalValueAttention, teacher: SoftmaxAttention, x: Tensor, mask: Tensor | None, real: Tensor
) -> KernelFactors:
    """The student's features and the softmax attention that they are to be a model of."""
    attention = teacher.kernel_matrix(x, attention_mask=mask)
    if not student.kernel.by_row_sums:  # the student divides by the number of keys
        attention = attention * real.sum(dim=1)[:, None, None, None]
    q, k = student.queries_and_keys(x, x)
    return kernel_factors(
        q, k, attention, feature_map=student.kernel.feature_map, query_mask=mask, attention_mask=mask,
        normalize=student.kernel.by_row_sums,
    )  # fmt: skip


def _solve_pooled(student: PrimalValueAttention, factors: KernelFactors, ridge: float) -> None:
    """Weights whose f g^T is the truncated SVD of K between the spans, for the mean Gram matrices."""
    queries, keys, crossed = factors.pooled_grams()
    half_q, half_k = (_inverse_root(gram, ridge) for gram in (queries, keys))
    left, values, right = torch.linalg.svd(half_q @ crossed @ half_k)
    kernel = student.kernel
    found = min(student.rank, values.size(-1))
    for weight in (kernel.w_e, kernel.w_r, kernel.sqrt_lambda):
        weight.zero_()  # directions beyond the number of features have nothing to add
    kernel.w_e[..., :found] = half_q @ left[..., :found]
    kernel.w_r[..., :found] = half_k @ right.mT[..., :found]
    kernel.sqrt_lambda[:, :found] = values[:, :found].sqrt()


def _inverse_root(gram: Tensor, ridge: float) -> Tensor:
    """(C + ridge mean(diag C) I)^(-1/2) of (h, m, m); of the directions that C has where ``ridge`` is 0."""
    values, vectors = torch.linalg.eigh(gram)
    size = gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1, keepdim=True)
    floor = values[:, -1:].clamp_min(1e-300) * gram.size(-1) * torch.finfo(gram.dtype).eps
    values = (values.clamp_min(0.0) + ridge * size).masked_fill(values + ridge * size <= floor, torch.inf)
    return (vectors * values.rsqrt()[:, None]) @ vectors.mT


def _descend(student: PrimalValueAttention, grams: KernelGrams | KernelFactors, steps: int) -> None:
    """Adam on the nested objective; the weights of the best step stay."""
    kernel = student.kernel
    weights = [kernel.w_e, kernel.w_r, kernel.sqrt_lambda]
    # Steps of Adam have one size for all entries, so every weight is learnt as a multiple of its own scale.
    scales = [weight.square().mean().sqrt().clamp_min(1e-300) for weight in weights]
    leaves = [(weight / scale).clone() for weight, scale in zip(weights, scales, strict=True)]
    best, least = [leaf.clone() for leaf in leaves], math.inf
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        optimizer = torch.optim.Adam(leaves, lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
        for step in range(steps + 1):
            value = nested_objective(grams, *(a * b for a, b in zip(leaves, scales, strict=True))).mean()
            if value.item() < least:
                best, least = [leaf.detach().clone() for leaf in leaves], value.item()
            if step < steps:
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                schedule.step()
    for weight, leaf, scale in zip(weights, best, scales, strict=True):
        weight.copy_(leaf * scale)


def _fit_out(
    student: PrimalValueAttention, x: Tensor, mask: Tensor | None, target: Tensor, real: Tensor, ridge: float
) -> None:
    """``out_proj`` by ridge regression of the target (T, d) on the heads' outputs of the real tokens."""
    (heads,) = student.head_outputs(x, x, mask, False, True)
    found = student.merge_heads(student.scale_heads(heads))[real]
    out, means = student.out_proj, (torch.zeros_like(found[0]), torch.zeros_like(target[0]))
    if out.bias is not None:
        means = found.mean(dim=0), target.mean(dim=0)
    found, target = found - means[0], target - means[1]
    weight = ridge_solution(found.mT @ found, found.mT @ target, ridge)
    out.weight.copy_(weight.mT)
    if out.bias is not None:
        out.bias.copy_(means[1] - means[0] @ weight)


class KernelModelErrors(NamedTuple):
    """Relative errors of every sequence, (B,) each, of E Lambda R^T as a model of rank s of K = phi(Q)
    phi(K)^T.

    ``kernel`` is ||K - a E Lambda R^T|| / ||K|| (Frobenius; root mean square over the heads), with the best
    factor a where the layer scales its outputs, which no factor changes, and a = 1 elsewhere. ``least`` is
    that of the truncated SVD of K, below which no model of rank s falls. ``output`` is ||Y - Y'|| / ||Y'||
    over the real tokens, with Y' the heads' outputs where K itself weighs the values.
    """

    kernel: Tensor
    least: Tensor
    output: Tensor


@torch.no_grad()
def kernel_model_errors(
    layer: PrimalValueAttention,
    x: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> KernelModelErrors:
    """The errors of a layer's model of its kernel on inputs x, (B, N, d); O(N m^2) time for m features.

    ``kernel`` and ``least`` are those of the whole sequence, in the causal form too, as the objective is.

    Args:
        layer: in either mode; nothing in it changes.
        x: inputs, (B, N, d).
        attention_mask: (B, N), True = real token; right padding where ``is_causal``.
        is_causal: whether ``output`` is that of the causal form.
    """
    kernel = layer.kernel
    q, k = layer.queries_and_keys(x, x)
    grams = kernel_grams(
        q, k, feature_map=kernel.feature_map, query_mask=attention_mask, attention_mask=attention_mask,
        normalize=kernel.by_row_sums,
    )  # fmt: skip
    values = torch.linalg.svdvals(_root(grams.queries) @ _root(grams.keys))  # of K, but for zeros
    shares = values.square()[..., layer.rank :].sum(dim=-1) / _nonzero(values.square().sum(dim=-1))

    v = layer.split_heads(layer.v_proj(x))
    options: dict[str, Any] = {"attention_mask": attention_mask, "is_causal": is_causal}
    phi_q, phi_k = (kernel.feature_map(part, None, True) for part in (q, k))
    exact = primal_value_attention(
        PrimalScores(phi_q, phi_k), v,
        features=(phi_q, phi_k) if kernel.by_row_sums else None, **options,
    )  # fmt: skip
    both = [
        zero_padding(layer.scale_heads(heads), attention_mask)
        for heads in (kernel(q, k, v, **options), exact)
    ]
    found, wanted = (exactly(heads).flatten(1) for heads in both)
    output = (found - wanted).norm(dim=1) / _nonzero(wanted.norm(dim=1))
    squares = _model_errors(layer, grams)
    return KernelModelErrors(squares.mean(dim=1).sqrt(), shares.mean(dim=1).sqrt(), output)


def _model_errors(layer: PrimalValueAttention, grams: KernelGrams) -> Tensor:
    """||K - a f g^T||^2 / ||K||^2, (B, h)."""
    kernel = layer.kernel
    root = exactly(kernel.sqrt_lambda)[:, None]
    left, right = exactly(kernel.w_e) * root, exactly(kernel.w_r) * root
    crossed = ((grams.queries @ left) * (grams.keys @ right)).sum(dim=(-2, -1))  # <f g^T, K>
    own = ((left.mT @ grams.queries @ left) * (right.mT @ grams.keys @ right)).sum(dim=(-2, -1))
    whole = _nonzero((grams.queries * grams.keys).sum(dim=(-2, -1)))
    factor = crossed / _nonzero(own) if layer.normalize == "output" else torch.ones_like(own)
    return (1 - (2 * factor * crossed - factor.square() * own) / whole).clamp_min(0.0)


def _root(gram: Tensor) -> Tensor:
    """C^(1/2) of positive semidefinite matrices."""
    values, vectors = torch.linalg.eigh(gram)
    return (vectors * values.clamp_min(0.0).sqrt()[..., None, :]) @ vectors.mT


def _nonzero(x: Tensor) -> Tensor:
    return x.clamp_min(smallest(x.dtype))
