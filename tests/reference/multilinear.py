"""Multilinear (KMLSVD) attention as the thesis writes it: float64 loops over indices; nothing of the library.

Sources: Verbeek, "3D Primal Attention", eq. 2-19, 2-21, 2-23, 3-5 to 3-8, 3-11, 3-14, 3-15, 4-10, written out
    for any order. The
gradients of the loops are autograd's, so one oracle serves outputs and gradients.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """y (B, N, d) with zeros at padded tokens; scores {(b, h): [E_1..E_D], each (n_b, R)}; J averaged over
    sequences and heads; J_S averaged over heads."""

    y: Tensor
    scores: dict[tuple[int, int], list[Tensor]]
    objective: Tensor
    core_penalty: Tensor


def multilinear_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    variant: str = "standard",
    core: str = "none",
    feature_map: str = "frobenius",
    objective_form: str = "sum",
    num_rows: int | None = None,
    max_len: int | None = None,
    is_causal: bool = False,
) -> Result:
    """``weights`` are named as the layer's parameters. ``objective_form`` "mean": J of the features over
    sqrt(n_b).
    """
    batch, _, width = x.shape
    p = width // num_heads
    scores, objectives, penalties = {}, [], []
    for h in range(num_heads):
        s = mlsvd_core(weights["core"][h]) if core == "mlsvd" else weights["core"][h]
        w = [weights["w"][n, h] for n in range(weights["w"].shape[0])]
        c = compatibility(weights, variant, h, w[0].shape[0], len(w))
        factors = kmlsvd_factors(w, s, c)
        penalties.append(core_penalty(s))
        for b in range(batch):
            tokens, scale = real_tokens(x, mask, b), 1.0
            phi = [feature_rows(mode, feature_map, is_causal) for mode in modes_of(tokens, weights, h, p)]
            if variant == "data_dependent":
                sampled, seen = sample(tokens, h * p, p, num_rows, max_len, is_causal)
                phi = [
                    [against(row, i, sampled, seen, len(w[0])) for i, row in enumerate(rows)] for rows in phi
                ]
                scale = 1 / torch.sqrt(sum((row * row).sum() for row in sampled))  # in J, f(X) has norm 1
            scores[b, h] = kmlsvd_scores(phi, factors)
            if objective_form == "mean":
                scale = scale / math.sqrt(len(tokens))
            objectives.append(objective([[row * scale for row in rows] for rows in phi], w, s, c, factors))
    y = joined(x, weights, mask, scores, num_heads)
    return Result(y, scores, torch.stack(objectives).mean(), torch.stack(penalties).mean())


def kmlsvd_factors(w: Sequence[Tensor], s: Tensor, c: Mapping) -> list[Tensor]:
    """What multiplies Phi_n in eq. 2-23, index by index: sum C[a, b, ..] W_2[b, j] .. S[r, j, ..], (M, R) per
    mode.
    """
    factors, s_at, w_at = [], by_index(s), [by_index(table) for table in w]
    for n in range(len(w)):
        table = [[torch.zeros((), dtype=s.dtype) for _ in range(s.shape[n])] for _ in range(w[n].shape[0])]
        others = [m for m in range(len(w)) if m != n]
        for ranks, entry in s_at.items():
            for at, value in c.items():
                term = value * entry * math.prod(w_at[m][at[m], ranks[m]] for m in others)
                table[at[n]][ranks[n]] = table[at[n]][ranks[n]] + term
        factors.append(torch.stack([torch.stack(row) for row in table]))
    return factors


def kmlsvd_scores(phi: Sequence[Sequence[Tensor]], factors: Sequence[Tensor]) -> list[Tensor]:
    """E_n, row by row."""
    empty = [factor.new_zeros(0, factor.shape[1]) for factor in factors]
    return [
        torch.stack([row @ factors[n] for row in rows]) if rows else empty[n] for n, rows in enumerate(phi)
    ]


def objective(
    phi: Sequence[Sequence[Tensor]], w: Sequence[Tensor], s: Tensor, c: Mapping, factors: Sequence[Tensor]
) -> Tensor:
    """J of eq. 2-19 for order D: the kernel's norm entry by entry, the inverse of S_(n) S_(n)^T taken as an
    inverse.
    """
    order, value = len(w), torch.zeros((), dtype=s.dtype)
    s_at, w_at = by_index(s), [by_index(table) for table in w]
    for n, e in enumerate(kmlsvd_scores(phi, factors)):
        unfolded = s.movedim(n, 0).flatten(1)
        value = value + 0.5 * torch.trace(e @ torch.linalg.inv(unfolded @ unfolded.T) @ e.T)
    for at, entry in c.items():
        for ranks, core in s_at.items():
            value = value - (order - 1) * entry * core * math.prod(
                w_at[m][at[m], ranks[m]] for m in range(order)
            )
    if order > 2:
        for entry in kernel_entries(phi, c).values():
            value = value + 0.5 * (order - 2) * entry**2
    return value


def kernel_entries(phi: Sequence[Sequence[Tensor]], c: Mapping) -> dict[tuple[int, ...], Tensor]:
    """Eq. 2-21, entry by entry: K[i, j, ..] = sum C[a, b, ..] Phi_1[i, a] Phi_2[j, b] .."""
    entries, places = {}, list(zip(*c, strict=True))  # the first index of every entry of C, the second, ..
    values = torch.stack(list(c.values()))
    read = [[row[list(places[m])] for row in rows] for m, rows in enumerate(phi)]
    for tokens in itertools.product(*(range(len(rows)) for rows in phi)):
        entries[tokens] = (values * math.prod(read[m][i] for m, i in enumerate(tokens))).sum()
    return entries


def compatibility(
    weights: Mapping[str, Tensor], variant: str, h: int, width: int, order: int
) -> dict[tuple[int, ...], Tensor]:
    """The entries of C that are not zero by construction: {(a, b, ..): value}."""
    if variant == "learnable":
        return by_index(weights["compatibility"][h])
    one = torch.ones((), dtype=weights["w"].dtype)
    diagonal = weights["compatibility"][h] if variant == "learnable_diagonal" else [one] * width
    return {(a,) * order: diagonal[a] for a in range(width)}


def core_penalty(s: Tensor) -> Tensor:
    """Eq. 3-14 of one head."""
    penalty = torch.zeros((), dtype=s.dtype)
    for n in range(s.dim()):
        gram = s.movedim(n, 0).flatten(1) @ s.movedim(n, 0).flatten(1).T
        for i, j in itertools.permutations(range(gram.shape[0]), 2):
            penalty = penalty + gram[i, j] ** 2
    return penalty


def mlsvd(tensor: Tensor, ranks: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Truncated multilinear SVD from the SVD of every unfolding; the largest entry of a singular vector is
    positive.
    """
    bases = []
    for n, rank in enumerate(ranks):
        u = torch.linalg.svd(tensor.movedim(n, 0).flatten(1), full_matrices=False)[0][:, :rank]
        largest = u.detach().abs().argmax(dim=0)
        bases.append(u * torch.sign(u.detach()[largest, torch.arange(u.shape[1])]))
    core = tensor
    for n, u in enumerate(bases):
        core = torch.tensordot(core, u, dims=([n], [0])).movedim(-1, n)
    return core, bases


def mlsvd_core(s: Tensor) -> Tensor:
    """Eq. 3-15."""
    return mlsvd(s, s.shape)[0]


def dual_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    rank: int,
    num_samples: int | None = None,
) -> tuple[Tensor, dict[tuple[int, int], list[Tensor]]]:
    """y and the dual scores K_(n) (U (x) U) S_(n)^T, K the cubemax tensor of the sampled tokens."""
    p, scores = x.shape[2] // num_heads, {}
    for b, h in itertools.product(range(x.shape[0]), range(num_heads)):
        modes = modes_of(real_tokens(x, mask, b), weights, h, p)
        count = len(modes[0])
        sampled = spaced(num_samples or count, count)
        samples = [[mode[i] for i in sampled] for mode in modes]
        kernel, normalizers = cubemax(samples)
        core, bases = mlsvd(kernel, [min(rank, len(sampled))] * len(modes))
        result = []
        for n in range(len(modes)):
            read = [modes[m] if m == n else samples[m] for m in range(len(modes))]
            mine = kernel if num_samples is None else cubemax(read, None if n == 0 else normalizers)[0]
            kronecker = torch.ones(1, 1, dtype=x.dtype)
            for m, u in enumerate(bases):
                kronecker = kronecker if m == n else torch.kron(kronecker, u)
            e = mine.movedim(n, 0).flatten(1) @ kronecker @ core.movedim(n, 0).flatten(1).T
            result.append(torch.nn.functional.pad(e, (0, rank - e.shape[1])))
        scores[b, h] = result
    return joined(x, weights, mask, scores, num_heads), scores


def cubemax(
    modes: Sequence[Sequence[Tensor]], normalizers: Sequence[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Eq. 3-3 to 3-6: A entry by entry, then a softmax over every i-slice; and the logarithms of the slices'
    sums.
    """
    p, order = modes[0][0].shape[0], len(modes)
    slices, sums = [], []
    for i, q in enumerate(modes[0]):
        logits = [
            (q * math.prod(mode[t] for mode, t in zip(modes[1:], at, strict=True))).sum()
            / p ** ((order - 1) / 2)
            for at in itertools.product(*(range(len(mode)) for mode in modes[1:]))
        ]
        logits = torch.stack(logits)
        sums.append(torch.log(torch.exp(logits).sum()))
        entries = torch.exp(logits - (sums[-1] if normalizers is None else normalizers[i]))
        slices.append(entries.clamp_max(1.0).reshape([len(mode) for mode in modes[1:]]))
    return torch.stack(slices), sums


def tensor_attention(
    x: Tensor, weights: Mapping[str, Tensor], mask: Tensor | None = None, *, num_heads: int, option: int
) -> tuple[Tensor, dict[tuple[int, int], list[Tensor]]]:
    """y and the scores of eq. 4-10, read as the cyclic pattern of eq. 2-23, entry by entry of K."""
    p, scores = x.shape[2] // num_heads, {}
    for b, h in itertools.product(range(x.shape[0]), range(num_heads)):
        modes = modes_of(real_tokens(x, mask, b), weights, h, p)
        kernel, order = by_index(cubemax(modes)[0]), len(modes)
        result = []
        for n in range(order):
            others, rights = [m for m in range(order) if m != n], {}
            for at in itertools.product(range(len(modes[n])), repeat=order - 1):
                if option == 1:
                    rights[at] = torch.ones(1, dtype=x.dtype)
                    for m, t in zip(others, at, strict=True):
                        rights[at] = torch.kron(rights[at], weights["w"][m, h, t])
                else:
                    rights[at] = weights["w"][n, h][at]
            rows = []
            for i in range(len(modes[n])):
                part = 0.0
                for at, right in rights.items():
                    part = part + kernel[*at[:n], i, *at[n:]] * right
                if option != 3:
                    part = weights["core"][h].movedim(n, 0).flatten(1) @ part
                rows.append(part)
            result.append(torch.stack(rows))
        scores[b, h] = result
    return joined(x, weights, mask, scores, num_heads), scores


def by_index(tensor: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Every entry under its indices; read one by one, each costs a gradient of the size of the tensor."""
    return dict(zip(itertools.product(*map(range, tensor.shape)), tensor.flatten().unbind(), strict=True))


def real_tokens(x: Tensor, mask: Tensor | None, b: int) -> list[Tensor]:
    return [x[b, i] for i in range(x.shape[1]) if mask is None or bool(mask[b, i])]


def modes_of(tokens: Sequence[Tensor], weights: Mapping[str, Tensor], h: int, p: int) -> list[list[Tensor]]:
    """Queries, keys and fibers of one head, a list of vectors each."""
    own, modes = slice(h * p, (h + 1) * p), []
    for name in ("q_proj", "k_proj", "f_proj"):
        if f"{name}.weight" in weights:
            whole = [linear(weights, name, token) for token in tokens]
            width = weights["q_proj.weight"].shape[0]
            parts = weights[f"{name}.weight"].shape[0] // width
            modes += [
                [vector[part * width : (part + 1) * width][own] for vector in whole] for part in range(parts)
            ]
    return modes


def feature_rows(rows: Sequence[Tensor], feature_map: str, is_causal: bool) -> list[Tensor]:
    if feature_map == "cosine":
        return [row / torch.sqrt((row * row).sum()) for row in rows]
    assert feature_map == "frobenius"
    result = []
    for i, row in enumerate(rows):
        read = rows[: i + 1] if is_causal else rows
        result.append(row / torch.sqrt(sum((other * other).sum() for other in read)))
    return result


def sample(tokens, start, p, num_rows, max_len, is_causal):
    """Rows of the head's own slice of the input, and for each the first token that may read it."""
    grid = spaced(num_rows, max_len if is_causal else len(tokens))
    grid = [t for t in grid if t < len(tokens)]
    return [tokens[t][start : start + p] for t in grid], [t if is_causal else 0 for t in grid]


def against(phi, i, sampled, seen, width):
    """f(X) phi(x_i): one feature a sampled row, zero past the rows there are."""
    values = [
        phi @ row if first <= i else torch.zeros((), dtype=phi.dtype)
        for row, first in zip(sampled, seen, strict=True)
    ]
    return torch.stack(values + [torch.zeros((), dtype=phi.dtype)] * (width - len(values)))


def spaced(count: int, length: int) -> list[int]:
    """``count`` of 0..length - 1, as evenly as whole numbers allow: floor(m (length - 1) / (count - 1))."""
    count = min(count, length)
    return [0] * count if count == 1 else [m * (length - 1) // (count - 1) for m in range(count)]


def joined(x: Tensor, weights: Mapping[str, Tensor], mask: Tensor | None, scores, num_heads: int) -> Tensor:
    """Eq. 3-7 and the heads' concatenation: y (B, N, d)."""
    y = []
    for b in range(x.shape[0]):
        rows = [torch.zeros(x.shape[2], dtype=x.dtype)] * x.shape[1]
        real = [i for i in range(x.shape[1]) if mask is None or bool(mask[b, i])]
        for n, i in enumerate(real):
            heads = [
                linear(weights, "concat", torch.cat([e[n] for e in scores[b, h]])) for h in range(num_heads)
            ]
            rows[i] = linear(weights, "out_proj", torch.cat(heads))
        y.append(torch.stack(rows))
    return torch.stack(y)


def linear(weights: Mapping[str, Tensor], name: str, vector: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ vector
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def unfolded(tensor: Tensor, mode: int) -> Tensor:
    """Kolda's mode-n unfolding: the first of the other modes runs fastest, as eq. 2-18's Kronecker products
    need.
    """
    moved = tensor.movedim(mode, 0)
    return moved.permute(0, *range(moved.dim() - 1, 0, -1)).reshape(tensor.shape[mode], -1)


def kronecker(matrices: list[Tensor]) -> Tensor:
    """W_D (x) .. (x) W_1 of the matrices given."""
    # A single column of an SVD has strides that torch.kron cannot take.
    ordered = [matrix.clone(memory_format=torch.contiguous_format) for matrix in reversed(matrices)]
    return functools.reduce(torch.kron, ordered)


def without(items: list[Tensor], n: int) -> list[Tensor]:
    return [item for m, item in enumerate(items) if m != n]
