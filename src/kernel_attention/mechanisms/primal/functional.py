"""Primal-Attention: asymmetric kernel SVD of self-attention, solved in the primal.

Source: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
Representation", NeurIPS 2023 (paper eq. 6-11; supplement theorem 3.2, lemma 4.2, listing 1).

Legend: B batch, h heads, N tokens, p head width, s projection directions (rank), M sampled rows.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import unknown
from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine
from kernel_attention.tensors.padding import first_rows
from kernel_attention.tensors.recompute import can_ask, is_transformed
from kernel_attention.tensors.statistics import (
    exactly,
    running_mean,
    token_ranks,
    without_autocast,
)

ObjectiveForm = Literal["mean", "sum"]


class PrimalScores(NamedTuple):
    """Projection scores on the left (e, queries) and right (r, keys) singular directions, (B, h, N, s)."""

    e: Tensor
    r: Tensor


def primal_scores(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    *,
    rows: Tensor | None = None,
    grid: Tensor | None = None,
    running_means: bool = True,
    feature_map: FeatureMap = cosine,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    evenly_spaced: bool = False,
) -> PrimalScores:
    """e_i = W_{e|X}^T phi(q_i) and r_i = W_{r|X}^T phi(k_i) (eq. 6).

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, N, p).
        w_e: (h, p, s) data-independent, or (h, M, s) together with ``rows``.
        w_r: as ``w_e``.
        rows: sampled rows f(X) of the layer input, (B, h, M', p) with M' <= M: W_{e|X} = f(X)^T W_e.
        grid: positions of ``rows`` in the sequence, (M',) int64; needed with ``rows`` when ``is_causal``.
        running_means: with ``is_causal``, replace q and k by their means over the prefix first (listing 1).
        feature_map: phi, from ``kernel_attention.features``.
        attention_mask: (B, N), True = real token.
        is_causal: token i sees tokens 0..i only.
        evenly_spaced: whether ``grid`` is, over N tokens or more. Where it is not known to be, an accelerator
            lets every token meet every row.
    """
    if is_causal and running_means:
        q, k = running_mean(q, attention_mask), running_mean(k, attention_mask)
    if is_causal and rows is not None:
        q, k = q.contiguous(), k.contiguous()  # once, and not in every product of blocks
    phi_q = feature_map(q, attention_mask, is_causal)
    phi_k = feature_map(k, attention_mask, is_causal)
    if rows is None:
        return PrimalScores(phi_q @ w_e, phi_k @ w_r)
    w_e, w_r = (first_rows(w, rows.size(2)) for w in (w_e, w_r))
    if not is_causal:
        return PrimalScores(phi_q @ (rows.mT @ w_e), phi_k @ (rows.mT @ w_r))
    if grid is None:
        raise ValueError("primal_scores: rows with is_causal=True need grid, the positions of the rows")
    rank = token_ranks(q.size(2), attention_mask, q.device)
    return _seen_rows(phi_q, phi_k, rank, rows, grid, w_e, w_r, evenly_spaced)


def _seen_rows(
    phi_q: Tensor, phi_k: Tensor, rank: Tensor, rows: Tensor, grid: Tensor, w_e: Tensor, w_r: Tensor,
    evenly_spaced: bool,
) -> PrimalScores:  # fmt: skip
    """The sums of <phi_i, x_m> W[m] over the rows m at or before token i, (B, h, N, s) each.

    ``rank`` is (B or 1, 1, N). A compiler traces sizes and no values, so there every token meets every row.
    """
    pairs = ((phi_q, w_e), (phi_k, w_r))
    block = seen_rows.block_tokens(phi_q.size(2), grid.numel())
    is_known = can_ask(grid) or (evenly_spaced and not torch.compiler.is_compiling())
    if phi_q.size(2) <= block or not is_known or is_transformed():
        is_later = grid > rank[..., None]
        return PrimalScores(*((phi @ rows.mT).masked_fill(is_later, 0.0) @ w for phi, w in pairs))
    own = seen_rows.own_rows(rank, rows, grid, block, evenly_spaced=evenly_spaced)
    parts = seen_rows.own_weights(own, torch.cat([w_e, w_r], dim=-1))
    halves = zip(*(part.chunk(2, dim=-1) for part in parts), strict=True)
    return PrimalScores(
        *(
            seen_rows.block_scores(phi, own.rows, own.seen, *half)
            for phi, half in zip((phi_q, phi_k), halves, strict=True)
        )
    )


def concat_scores(scores: PrimalScores, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """o_i = W_c [e_i ; r_i] + b_c (eq. 8): weight (p, 2s), shared by the heads; -> (B, h, N, p)."""
    return torch.nn.functional.linear(torch.cat(scores, dim=-1), weight, bias)


def primal_attention(
    q: Tensor,
    k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    w_out: Tensor,
    b_out: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    grid: Tensor | None = None,
    running_means: bool = True,
    feature_map: FeatureMap = cosine,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Primal-Attention of one layer, heads apart: (B, h, N, p) -> (B, h, N, p).

    ``w_out`` (p, 2s) and ``b_out`` (p,) join the two scores (eq. 8); the other arguments are those of
    ``primal_scores``. It takes O(N p s) time and O(N s) memory.
    """
    scores = primal_scores(
        q, k, w_e, w_r, rows=rows, grid=grid, running_means=running_means, feature_map=feature_map,
        attention_mask=attention_mask, is_causal=is_causal,
    )  # fmt: skip
    return concat_scores(scores, w_out, b_out)


def ksvd_objective(
    scores: PrimalScores,
    w_e: Tensor,
    w_r: Tensor,
    sqrt_lambda: Tensor,
    *,
    form: ObjectiveForm = "mean",
    per_sequence: bool = False,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """The KSVD objective J of a layer, a 0-dimensional tensor in float32 or better; (B,) if ``per_sequence``.

    ``form="sum"`` is the paper's (eq. 6): sums over the tokens of a sequence and head, then a mean over batch
    and heads, J = 1/2 sum_i ||L e_i||^2 + 1/2 sum_i ||L r_i||^2 - Tr(W_e^T W_r) with
    L = diag(sqrt_lambda).
    ``form="mean"`` averages over the tokens too, as the released code does. J = 0 at the KSVD (lemma 4.2) for
    Lambda = Sigma^{-1} in the sum form and N Sigma^{-1} in the mean form; the converse does not hold.

    Args:
        scores: e and r, each (B, h, N, s).
        w_e: the parameters themselves, not their data-dependent versions; (h, M or p, s).
        w_r: as ``w_e``.
        sqrt_lambda: square root of the diagonal of Lambda, (h, s).
        form: "mean" or "sum".
        per_sequence: whether every sequence has its own J, instead of one over all tokens of the batch.
        attention_mask: (B, N), True = real token.
    """
    if form not in ("mean", "sum"):
        raise unknown("objective form", form, ("mean", "sum"))
    return objective_from_energy(
        scores_energy(scores, sqrt_lambda, attention_mask), w_e, w_r, scores.e.size(2), form=form,
        per_sequence=per_sequence, attention_mask=attention_mask,
    )  # fmt: skip


def scores_energy(scores: PrimalScores, sqrt_lambda: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The sum of ||L e_i||^2 + ||L r_i||^2 over the real tokens, a mean over the heads: (B,)."""
    with without_autocast(scores.e):  # accumulation stays in float32 under autocast
        scale = exactly(sqrt_lambda)[:, None, :]
        energy = (scores.e * scale).square().sum(-1) + (scores.r * scale).square().sum(-1)  # (B, h, N)
        if attention_mask is not None:
            energy = energy.masked_fill(~attention_mask[:, None], 0.0)
        return energy.sum(-1).mean(-1)


def objective_from_energy(
    energy: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    length: int,
    *,
    form: ObjectiveForm = "mean",
    per_sequence: bool = False,
    attention_mask: Tensor | None = None,
    num_tokens: Tensor | None = None,
    batch: int | None = None,
) -> Tensor:
    """J of ``ksvd_objective`` from ``scores_energy``, (B,), and the length N.

    With ``batch``, the number of sequences, ``energy`` is its sum over them, a number.

    ``num_tokens`` (B,) replaces length and mask where other ranks hold tokens of the sequence.
    """
    if form not in ("mean", "sum"):
        raise unknown("objective form", form, ("mean", "sum"))
    batch = energy.size(0) if batch is None else batch
    if batch == 0:  # no sequences: J is 0
        return energy if per_sequence else energy.sum()
    if not per_sequence and energy.dim():
        energy = energy.sum()
    with without_autocast(energy):
        trace = torch.dot(exactly(w_e).flatten(), exactly(w_r).flatten())
        if form == "mean" and num_tokens is None and attention_mask is not None:
            num_tokens = attention_mask.sum(dim=1)
        if form == "sum" or num_tokens is None:  # a number costs less than tensors of it
            count = 1 if form == "sum" else max(length, 1)
            half = energy * (0.5 / (count if per_sequence else batch * count))
        else:
            num_tokens = num_tokens.to(energy) if per_sequence else num_tokens.sum().to(energy)
            half = 0.5 * energy / num_tokens.clamp_min(1)
        return torch.add(half, trace, alpha=-1 / w_e.size(0))


def primal_kernel(
    q: Tensor, k: Tensor, *, rows: Tensor | None = None, feature_map: FeatureMap = cosine,
    attention_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The asymmetric kernel matrix K_ij = <f(X) phi(q_i), f(X) phi(k_j)> of theorem 3.2, (B, h, N, N).

    Without ``rows``, f(X) is the identity. Rows and columns of padded tokens are zero. For analysis: O(N^2).
    """
    phi_q, phi_k = feature_map(q, attention_mask, False), feature_map(k, attention_mask, False)
    if rows is not None:
        phi_q, phi_k = phi_q @ rows.mT, phi_k @ rows.mT
    kernel = phi_q @ phi_k.mT
    if attention_mask is not None:
        kernel = kernel * (attention_mask[:, None, :, None] & attention_mask[:, None, None, :])
    return kernel
