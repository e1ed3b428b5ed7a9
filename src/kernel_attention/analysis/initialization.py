"""A primal layer from a trained softmax layer: weights from the dual side, output map by least squares.

Source: Primal-Attention (Chen et al., NeurIPS 2023), theorem 3.2 and remark 3.3: e(x) = sum_j h_r,j
kappa(x, x_j) = W_e^T f(X) phi(x). Softmax attention is the left-hand side with its values for h_r,j.
"""

import copy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError, require_positive, require_weight, unknown
from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.projections import carry
from kernel_attention.hosts.reading import describe
from kernel_attention.mechanisms import create_attention
from kernel_attention.mechanisms.linear.layer import LinearAttention
from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention.mechanisms.primal_values.layer import PrimalValueAttention
from kernel_attention.mechanisms.softmax.layer import SoftmaxAttention
from kernel_attention.tensors.multilinear.unfoldings import deterministic_signs
from kernel_attention.tensors.sampling import evenly_spaced, sample_rows

_ROUNDS, _STEPS = 20, 20  # alternations; conjugate-gradient steps in each


def ridge_solution(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """argmin ||F W - Y||^2 + ridge mean(diag F^T F) ||W||^2 from F^T F and F^T Y; batched.

    ``ridge`` 0 gives the solution of least norm.
    """
    if ridge == 0.0:
        return torch.linalg.pinv(gram, hermitian=True) @ cross
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).clamp_min(1e-300)
    return torch.linalg.solve(gram + (ridge * size).expand(gram.shape[:-1]).diag_embed(), cross)


@torch.no_grad()
def fit_output_map(layer: PrimalAttention, scores: Tensor, target: Tensor, ridge: float) -> None:
    """Fit ``concat`` (p x 2s, one for all heads) and ``out_proj`` (d x h p) of a layer to ``target`` (T, d),
    in place.

    With the scores [e; r] of T tokens, (h, T, 2s), y_i = b + sum_h O_h W_c [e_ih; r_ih] is bilinear. With 2s
    <= p any W_c of full rank serves, and the fit is the unrestricted one. Otherwise W_c starts from the
    reduced-rank regression of the heads' common directions, and W_c and O are fitted in turns: O exactly, W_c
    by conjugate gradients. ``ridge`` is that of ``ridge_solution``.
    """
    heads, tokens, width = scores.shape
    has_bias = layer.out_proj.bias is not None
    center = scores.mean(dim=1, keepdim=True) if has_bias else torch.zeros_like(scores[:, :1])
    offset = target.mean(dim=0) if has_bias else torch.zeros_like(target[0])
    # One scale for a score in all heads, since they share the map.
    scale = (scores - center).square().mean(dim=(0, 1)).sqrt().clamp_min(1e-150)
    z = ((scores - center) / scale).transpose(0, 1).flatten(1)
    gram, cross = z.mT @ z / tokens, z.mT @ (target - offset) / tokens
    shared = layer.concat.weight.mT * scale[:, None]  # (2s, p)
    if width > shared.size(1):
        shared = _reduced_rank(gram, cross, heads, shared.size(1), ridge)
        for _ in range(_ROUNDS):
            out = _fit_out(shared, gram, cross, heads, ridge)
            shared = _improve_shared(shared, out, gram, cross, heads)
    out = _fit_out(shared, gram, cross, heads, ridge)  # (h p, d)
    shared = shared / scale[:, None]
    # A factor can be moved from one map to the other; equal norms per entry train best.
    balance = ((out.square().mean() / shared.square().mean().clamp_min(1e-300)) ** 0.25).clamp_min(1e-150)
    layer.concat.weight.copy_(shared.mT * balance)
    layer.out_proj.weight.copy_(out.mT / balance)
    if layer.out_proj.bias is not None:
        layer.concat.bias.zero_()
        through = torch.cat([one @ layer.concat.weight.mT for one in center[:, 0]])
        layer.out_proj.bias.copy_(offset - layer.out_proj.weight @ through)


def _reduced_rank(gram: Tensor, cross: Tensor, heads: int, rank: int, ridge: float) -> Tensor:
    """The (2s, rank) common directions of the heads' unrestricted maps, weighted by the scores' spread."""
    free = ridge_solution(gram, cross, ridge)  # (h 2s, d)
    width = free.size(0) // heads
    blocks = gram.unflatten(0, (heads, width)).unflatten(2, (heads, width))
    spread = torch.stack([blocks[h, :, h] for h in range(heads)]).mean(dim=0)
    values, vectors = torch.linalg.eigh(spread)
    root = values.clamp_min(values[-1] * 1e-12).sqrt()
    side_by_side = free.unflatten(0, (heads, width)).transpose(0, 1).flatten(1)  # (2s, h d)
    weighted = root[:, None] * (vectors.mT @ side_by_side)
    left = torch.linalg.svd(weighted, full_matrices=False)[0][:, :rank]
    return vectors @ (left / root[:, None])


def _fit_out(shared: Tensor, gram: Tensor, cross: Tensor, heads: int, ridge: float) -> Tensor:
    """out_proj by one ridge regression on given outputs of the heads, (h p, d)."""
    spread = torch.block_diag(*[shared] * heads)
    return ridge_solution(spread.mT @ gram @ spread, spread.mT @ cross, ridge)


def _improve_shared(shared: Tensor, out: Tensor, gram: Tensor, cross: Tensor, heads: int) -> Tensor:
    """Conjugate gradients on W_c^T, (2s, p), with O given: sum_hg S_hg W_c^T O_g O_h^T = sum_h C_h O_h^T."""
    width = shared.size(0)
    blocks = gram.unflatten(0, (heads, width)).unflatten(2, (heads, width))  # (h, 2s, h, 2s)
    maps = out.unflatten(0, (heads, -1))  # (h, p, d)
    overlap = torch.einsum("gpd,hqd->gphq", maps, maps)

    def normal(x: Tensor) -> Tensor:
        return torch.einsum("hagb,bghq->aq", blocks, torch.einsum("bp,gphq->bghq", x, overlap))

    wanted = torch.einsum("had,hpd->ap", cross.unflatten(0, (heads, width)), maps)
    residual = wanted - normal(shared)
    direction, size = residual, residual.square().sum()
    floor = 1e-28 * wanted.square().sum()
    for _ in range(_STEPS):
        image = normal(direction)
        curvature = (direction * image).sum()
        if size <= floor or curvature <= 0:
            break
        step = size / curvature
        shared, residual = shared + step * direction, residual - step * image
        before, size = size, residual.square().sum()
        direction = residual + (size / before) * direction
    return shared


InitializationMethod = Literal["svd", "values", "random"]
_METHODS = ("svd", "values", "random")


class PrimalInitialization(NamedTuple):
    """A layer made by ``primal_from_softmax`` or ``primal_values_from_softmax``, and its errors.

    ``error`` is ||Y' - Y|| / ||Y|| (Frobenius, over the samples' real tokens) of its output Y' against the
    softmax layer's Y; ``constant_error`` is what the best constant output would leave, the mark to beat;
    ``held_out_error`` is ``error`` on the held-out samples, None without any.
    """

    layer: PrimalAttention | PrimalValueAttention
    error: float
    constant_error: float
    held_out_error: float | None


@torch.no_grad()
def primal_from_softmax(
    layer: nn.Module,
    samples: Tensor,
    *,
    method: InitializationMethod = "svd",
    rank: int | None = None,
    attention_mask: Tensor | None = None,
    held_out: Tensor | None = None,
    held_out_mask: Tensor | None = None,
    ridge: float = 1e-3,
    max_tokens: int = 1024,
    seed: int = 0,
    **options: Any,
) -> PrimalInitialization:
    """Make a ``PrimalAttention`` layer that starts from a trained softmax layer.

    The query and key projections are taken over. The projection weights are the least-squares expression, in
    the layer's features f(X) phi(x), of scores known on the dual side:

    * "svd": E = H_e Sigma and R = H_r Sigma of the SVD of the softmax layer's own kernel, the attention of
      all sample queries to all sample keys, pooled over the sequences (theorem 3.2);
    * "values": the values are the dual variables, H_r = V, so E = A V is the heads' output, and
      R = A^T E, the other of the two singular value equations. A is the attention of every sequence. A rank
      below the head width p keeps the values' leading directions;
    * "random": the weights of a new layer, which show what the other two methods contribute.

    Every direction's pair of weights is scaled to the size it has in a new layer, a head's Frobenius norm of
    about 1. ``concat``, which the heads share, and ``out_proj`` are then fitted to the softmax layer's output
    by alternating ridge regression, in float64. With ``eta`` > 0, Lambda makes every direction's part of J
    vanish where it can. The forms are the bidirectional ones; there is no causal fit.

    Args:
        layer: a SoftmaxAttention, a LinearAttention (the cosine kernel among them), a module that holds one
            in a foreign model, or an ``nn.MultiheadAttention``. Bring others to that with
            ``replace_attention(model, {which: "softmax"})``.
        samples: inputs of the layer, (B, N, d).
        method: "svd", "values" or "random".
        rank: directions s per head; by default the head width p.
        attention_mask: (B, N), True = real token.
        held_out: other inputs, (B', N', d), on which the error is measured too.
        held_out_mask: their padding mask.
        ridge: penalty of the least squares, relative to the mean squared feature; 0 takes the pseudo-inverse.
        max_tokens: tokens, evenly spaced over the samples', whose kernel matrix "svd" decomposes: O(n^3).
        seed: for the draws of a new layer; the global generator is left as it was.
        options: options of PrimalAttention (``data_dependent``, ``max_len``, ``eta``...).

    Returns:
        The layer, in the dtype, device and mode of ``layer``, and its errors; see
        ``PrimalInitialization``.

    Raises:
        InputError: for a layer without softmax attention, samples that do not fit it, a rank or method that
            does not exist, or options that PrimalAttention does not have.
    """
    if method not in _METHODS:
        raise unknown("method", method, _METHODS)
    require_weight(ridge=ridge)
    require_positive(max_tokens=max_tokens)
    with torch.random.fork_rng([]):  # new layers draw weights
        torch.default_generator.manual_seed(seed)
        teacher = softmax_twin(layer)
        student = student_of("primal", teacher, teacher.head_dim if rank is None else rank, options)
        assert isinstance(student, PrimalAttention)
    x, mask = samples.double(), attention_mask
    target = teacher(x, attention_mask=mask)  # checks the samples too
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    if not real.any() or not x[real].isfinite().all():
        raise InputError("samples must hold real tokens, all of them finite")

    if method != "random":
        features = _features(student, x, mask)
        if method == "svd":
            kept = evenly_spaced(max_tokens, int(real.sum()), x.device)
            scores = _svd_scores(teacher, x, real, kept, student.rank)
            features = (features[0][:, kept], features[1][:, kept])
        else:
            scores = _value_scores(teacher, x, mask, student.rank)
        w_e, w_r = (
            ridge_solution(psi.mT @ psi, psi.mT @ wanted, ridge)
            for psi, wanted in zip(features, scores, strict=True)
        )
        # One factor for both weights of a direction, which the singular value equations leave open.
        size = (w_e.square() + w_r.square()).sum(dim=1, keepdim=True) * (student.rank / 2)
        student.w_e.copy_(w_e * size.clamp_min(1e-300).rsqrt())
        student.w_r.copy_(w_r * size.clamp_min(1e-300).rsqrt())

    found = _pooled(torch.cat(student.scores(x, attention_mask=mask), dim=-1), real)
    fit_output_map(student, found, target[real], ridge)
    _set_lambda(student, found, len(x))
    errors = output_errors(student, teacher, (x, mask), held_out, held_out_mask)
    like = next(layer.parameters())
    return PrimalInitialization(student.to(like.dtype).train(layer.training), *errors)


def softmax_twin(layer: nn.Module) -> SoftmaxAttention:
    """A float64 copy of the layer, in evaluation mode."""
    inner = layer.attention if isinstance(layer, HostedAttention) else layer
    if isinstance(inner, nn.MultiheadAttention):
        host = describe(inner, inner)
        if inner.bias_k is not None:
            raise InputError("MultiheadAttention with add_bias_kv=True cannot be read as softmax attention")
        inner = SoftmaxAttention(host.embed_dim, host.num_heads, bias=host.bias).to(host.like.device)
        carry(inner, host.sources)
    if not isinstance(inner, SoftmaxAttention | LinearAttention):
        raise InputError(
            f"layer is a {type(layer).__name__}, expected a SoftmaxAttention or nn.MultiheadAttention "
            "(replace_attention(model, {which: 'softmax'}) makes one of a layer of another library)"
        )
    # A new module, not a deep copy: a layer may have hooks and parametrisations that are not ours.
    teacher = SoftmaxAttention(
        inner.embed_dim,
        inner.num_heads,
        symmetric=inner.k_proj is None,
        bias=inner.q_proj.bias is not None,
    )
    teacher.kernel = copy.deepcopy(inner.kernel)
    teacher.load_state_dict(inner.state_dict())
    return teacher.to(inner.q_proj.weight.device, torch.float64).eval()


def student_of(
    mechanism: str, teacher: SoftmaxAttention, rank: int, options: dict[str, Any]
) -> AttentionLayer:
    """A layer in float64 with the softmax layer's sizes, and with its projections of the same names."""
    if "bias" in options:
        raise InputError(f"bias={options['bias']!r}: the softmax layer decides whether there are biases")
    student = create_attention(
        mechanism, teacher.embed_dim, teacher.num_heads, rank=rank, **options,
        bias=teacher.q_proj.bias is not None,
    )  # fmt: skip
    student.to(teacher.q_proj.weight.device, torch.float64).eval()
    projections = {
        "q_proj": teacher.q_proj, "k_proj": teacher.k_proj or teacher.q_proj, "v_proj": teacher.v_proj
    }  # fmt: skip
    for name, projection in projections.items():
        if isinstance(own := getattr(student, name, None), nn.Module):
            own.load_state_dict(projection.state_dict())
    return student


def _pooled(per_head: Tensor, real: Tensor) -> Tensor:
    """(B, h, N, m) -> (h, T, m), the T real tokens of all sequences."""
    return per_head.transpose(0, 1)[:, real]


def _features(student: PrimalAttention, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """f(X) phi(q_i) and f(X) phi(k_i) of the real tokens, (h, T, M) or (h, T, p) each."""
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    rows = student.split_heads(sample_rows(x, student.num_rows, mask)) if student.data_dependent else None
    found = []
    for projection in (student.q_proj, student.k_proj):
        phi = student.feature_map(student.split_heads(projection(x)), mask, False)
        if rows is not None:
            phi = nn.functional.pad(phi @ rows.mT, (0, student.num_rows - rows.size(2)))
        found.append(_pooled(phi, real))
    return found[0], found[1]


def _svd_scores(
    teacher: SoftmaxAttention, x: Tensor, real: Tensor, kept: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """H_e Sigma and H_r Sigma of the pooled tokens' kernel, (h, n, s) each."""
    if rank > len(kept):
        raise InputError(f"rank={rank} exceeds the {len(kept)} sample tokens whose kernel is decomposed")
    tokens = x[real][kept][None]
    left, values, right = torch.linalg.svd(teacher.kernel_matrix(tokens)[0])
    left, right = left[..., :rank], right.mT[..., :rank]
    signs = (deterministic_signs(left) * left).sum(dim=-2, keepdim=True).sign()
    scale = signs * values[:, None, :rank]
    return left * scale, right * scale


def _value_scores(
    teacher: SoftmaxAttention, x: Tensor, mask: Tensor | None, rank: int
) -> tuple[Tensor, Tensor]:
    """E = A V and R = A^T E, (h, T, s) each; the columns of R get the size of those of E."""
    if rank > teacher.head_dim:
        raise InputError(
            f"rank={rank} exceeds the head width {teacher.head_dim}: there are no more values to read"
        )
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
    kernel = teacher.kernel_matrix(x, attention_mask=mask)
    values = teacher.split_heads(teacher.v_proj(x))
    if rank < teacher.head_dim:
        directions = torch.linalg.svd(_pooled(values, real), full_matrices=False)[2].mT[..., :rank]
        values = values @ deterministic_signs(directions)
    e = kernel @ values
    r = _pooled(kernel.mT @ e, real)
    e = _pooled(e, real)
    sizes = [torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in (e, r)]
    return e, r * (sizes[0] / sizes[1].clamp_min(1e-300))


def _set_lambda(student: PrimalAttention, joined: Tensor, num_sequences: int) -> None:
    """Lambda_l with 1/2 Lambda_l (e_l^2 + r_l^2) = w_e,l . w_r,l, squares summed in the layer's form of J.

    At the kernel SVD it is Sigma^{-1} in the sum form. A direction with a negative trace has no such Lambda
    and gets 0.
    """
    if student.sqrt_lambda is None:
        return
    count = joined.size(1) if student.objective_form == "mean" else num_sequences
    energy = joined.square().sum(dim=1).unflatten(-1, (2, -1)).sum(dim=1) / (2 * count)
    trace = (student.w_e * student.w_r).sum(dim=1)
    student.sqrt_lambda.copy_((trace / energy.clamp_min(1e-300)).clamp_min(0.0).sqrt())


def output_errors(
    student: nn.Module,
    teacher: SoftmaxAttention,
    fitted: tuple[Tensor, Tensor | None],
    held_out: Tensor | None,
    held_out_mask: Tensor | None,
) -> tuple[float, float, float | None]:
    """``error``, ``constant_error`` and ``held_out_error`` of ``PrimalInitialization``."""
    target = _real_outputs(teacher, *fitted)
    constant_error = float((target - target.mean(dim=0)).norm() / target.norm())
    held_out_error = None if held_out is None else _error(student, teacher, held_out.double(), held_out_mask)
    return _error(student, teacher, *fitted), constant_error, held_out_error


def _error(student: nn.Module, teacher: SoftmaxAttention, x: Tensor, mask: Tensor | None) -> float:
    """||Y' - Y|| / ||Y|| over the real tokens."""
    wanted = _real_outputs(teacher, x, mask)
    return float((_real_outputs(student, x, mask) - wanted).norm() / wanted.norm())


def _real_outputs(layer: nn.Module, x: Tensor, mask: Tensor | None) -> Tensor:
    out: Tensor = layer(x, attention_mask=mask)
    return out.flatten(0, 1) if mask is None else out[mask]
