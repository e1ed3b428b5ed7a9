"""The output map of a primal layer fitted to given outputs: one map shared by the heads, then one for all."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.layer import PrimalAttention

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
