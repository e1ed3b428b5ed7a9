"""Measures of one sequence's attention, and the measurements of one layer on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernel_attention.analysis.captured import (
    CapturedAttention,
    kernel_tensor,
    near_softmax,
    objective_of,
    scores,
)
from kernel_attention.errors import InputError
from kernel_attention.tensors.multilinear.unfoldings import unfold
from kernel_attention.tensors.sampling import evenly_spaced

if TYPE_CHECKING:
    from kernel_attention.solvers import ProjectionLoss


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of every head's matrix (h, n, m), descending, (h, min(n, m))."""
    return torch.linalg.svdvals(matrix)


def mode_singular_values(tensor: Tensor) -> list[Tensor]:
    """Singular values of every unfolding of a kernel tensor (h, n_1, .., n_D): (h, n_n) each, descending.

    They are the norms of the slices of the multilinear SVD's core along mode n, whose squares the KMLSVD
    thesis (section 4-2-4) reads from the diagonal of S_(n) S_(n)^T.
    """
    order = tensor.dim() - 1
    exact = tensor.double()
    found = []
    for mode in range(order):
        # Not from the Gram matrix, whose rounding would leave a zero at 1e-8 of the largest.
        values = torch.linalg.svdvals(unfold(exact, mode, order))
        missing = tensor.size(1 + mode) - values.size(-1)  # rows beyond the columns
        found.append(torch.nn.functional.pad(values, (0, missing)).to(tensor.dtype))
    return found


def explained_variance(values: Tensor) -> Tensor:
    """sum_{j <= i} sigma_j^2 / sum_j sigma_j^2 of singular values (..., k); all 1 for a zero matrix."""
    energy = values.double().square().cumsum(-1)
    total = energy[..., -1:]
    return torch.where(total > 0, energy / total, 1.0).to(values.dtype)


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of sigma_i / sum_j sigma_j, (..., k) -> (...); Roy and Vetterli, EUSIPCO 2007.

    k for k equal singular values, 1 for a matrix of rank 1, 0 for a zero matrix.
    """
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1.0)
    entropy = -torch.xlogy(share, share).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0.0)


def numerical_rank(values: Tensor) -> Tensor:
    """Number of singular values (..., k) above the rounding error of the largest."""
    size = values.size(-1) * torch.finfo(values.dtype).eps
    return (values > size * values[..., :1]).sum(-1)


def head_distances(heads: Tensor) -> Tensor:
    """L2 distance between the heads' rows, averaged over the rows: (h, n, m) -> (h, h), the diagonal zero."""
    differences = heads[:, None] - heads[None]
    return torch.linalg.vector_norm(differences, dim=-1).mean(-1)


def head_matrix_distances(heads: Tensor) -> Tensor:
    """Frobenius distance between the heads' matrices: (h, n, m) -> (h, h), the diagonal zero."""
    differences = heads[:, None] - heads[None]
    return torch.linalg.matrix_norm(differences)


def mean_of_pairs(matrix: Tensor) -> Tensor:
    """Mean over the pairs of different heads, (h, h) -> (); NaN for a single head."""
    heads = matrix.size(-1)
    if heads < 2:
        return matrix.new_tensor(torch.nan)
    return (matrix.sum() - matrix.diagonal().sum()) / (heads * (heads - 1))


def above_diagonal(matrices: Tensor) -> Tensor:
    """The entries of the pairs of different heads, (..., h, h) -> (..., h (h - 1) / 2)."""
    pairs = torch.ones(matrices.shape[-2:], dtype=torch.bool, device=matrices.device).triu(1)
    return matrices[..., pairs]


def resized(values: Tensor, count: int, fill: float = 0.0) -> Tensor:
    """The first ``count`` of (..., k), ``fill`` where there are fewer."""
    missing = max(count - values.size(-1), 0)
    return torch.nn.functional.pad(values[..., :count], (0, missing), value=fill)


QUANTITIES = ("spectrum", "distance", "projection", "objective", "maps")

_TENSOR_TOKENS = 48  # of a kernel tensor, whose size is a power of them
_MAP_TOKENS = 128  # of a picture
_GIB = 2**30


class CaseSettings(NamedTuple):
    """The quantities to measure and the limits, as ``diagnose`` takes them."""

    quantities: frozenset[str]
    num_values: int
    max_tokens: int
    memory_limit: float


def measure_case(
    attention: CapturedAttention, case: int, settings: CaseSettings, with_maps: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Named tensors of one sequence, and remarks on what was sampled or left out."""
    found: dict[str, Tensor] = {}
    notes: list[str] = []
    wanted = settings.quantities
    length = int(attention.real_queries[case].sum())
    rows = None
    if length > settings.max_tokens:
        rows = evenly_spaced(settings.max_tokens, length, attention.real_queries.device)
        notes.append(f"of {length} queries {settings.max_tokens} evenly spaced ones were measured")
    matrix = None
    if wanted & {"spectrum", "distance", "maps"}:
        _check_memory(attention, case, rows, settings)
        matrix = attention.matrix(case, rows)
    if matrix is not None and "spectrum" in wanted:
        found |= _spectrum(matrix, settings.num_values)
    if "spectrum" in wanted:
        found |= _mode_spectra(attention, case, settings, notes)
    if matrix is not None and "distance" in wanted:
        found |= _distances(attention, case, matrix)
    if "projection" in wanted and near_softmax(attention) and not attention.is_cross:
        found |= _projection(attention, case, settings, rows, notes)
    if "objective" in wanted and (value := objective_of(attention, case)) is not None:
        found["objective"] = value
    if with_maps and "maps" in wanted:
        found |= _maps(attention, case, matrix, notes)
    return found, notes


def _check_memory(
    attention: CapturedAttention, case: int, rows: Tensor | None, settings: CaseSettings
) -> None:
    """InputError for a matrix above the limit. Our layers form the whole kernel, rows chosen or not."""
    keys = attention.real_keys.size(1)
    whole = attention.layer is not None and not attention.is_softmax
    queries = keys if whole else int(attention.real_queries[case].sum()) if rows is None else len(rows)
    source = attention.queries if attention.queries is not None else attention.keys
    heads = 1 if source is None else source.size(1)
    size = heads * queries * keys * 4
    if size > settings.memory_limit * _GIB:
        advice = "raise memory_limit or shorten the sequences"
        if not whole:
            advice = f"lower max_tokens={settings.max_tokens}, {advice}"
        raise InputError(
            f"layer {attention.name}: a matrix of {heads} x {queries} x {keys} numbers takes "
            f"{size / _GIB:.2f} GiB, more than memory_limit={settings.memory_limit} GiB; {advice}"
        )


def _spectrum(matrix: Tensor, count: int) -> dict[str, Tensor]:
    values = singular_values(matrix)
    return {
        "singular_values": resized(_over_largest(values), count),
        "explained_variance": resized(explained_variance(values), count, 1.0),
        "effective_rank": effective_rank(values),
    }


def _mode_spectra(
    attention: CapturedAttention, case: int, settings: CaseSettings, notes: list[str]
) -> dict[str, Tensor]:
    length = int(attention.real_keys[case].sum())
    tokens = None
    if length > _TENSOR_TOKENS:
        tokens = evenly_spaced(_TENSOR_TOKENS, length, attention.real_keys.device)
    kernel = kernel_tensor(attention, case, tokens)
    if kernel is None:
        return {}
    if tokens is not None:
        notes.append(f"the kernel tensor is that of {_TENSOR_TOKENS} of {length} tokens")
    values = torch.stack(mode_singular_values(kernel))
    shares = explained_variance(values)
    return {
        "mode_singular_values": resized(_over_largest(values), settings.num_values),
        "mode_explained_variance": resized(shares, settings.num_values, 1.0),
        "mode_rank": numerical_rank(values).float(),
    }


def _distances(attention: CapturedAttention, case: int, matrix: Tensor) -> dict[str, Tensor]:
    pairs = head_distances(matrix)
    # Where queries were sampled, the squares of all rows are estimated from those of the sample.
    whole = (int(attention.real_queries[case].sum()) / matrix.size(-2)) ** 0.5
    found = {
        "head_distances": pairs,
        "head_distance": mean_of_pairs(pairs),
        "matrix_distances": whole * head_matrix_distances(matrix),
    }
    parts = attention.parts(case)
    if parts is not None and parts[2] is not None and parts[2].size(1) == matrix.size(-1):
        outputs = matrix @ parts[2]
        found["output_distance"] = mean_of_pairs(head_distances(outputs))
        found["output_matrix_distances"] = whole * head_matrix_distances(outputs)
    return found


def _projection(
    attention: CapturedAttention, case: int, settings: CaseSettings, rows: Tensor | None, notes: list[str]
) -> dict[str, Tensor]:
    # Imported here: scikit-learn takes a second, and is an extra.
    from kernel_attention.solvers import eigenvalue_ratios, projection_loss

    parts = attention.parts(case)
    if parts is None or parts[2] is None:
        return {}
    q, k, v = parts[0], parts[1], parts[2]
    causal = attention.is_causal
    if rows is not None and causal:  # the first queries see the first keys only: this is exact for them
        first = slice(settings.max_tokens)
        q, k, v = q[:, first], k[:, first], v[:, first]
        notes.append(f"J_proj is that of the first {settings.max_tokens} tokens")
    elif rows is not None:
        q = q[:, rows.cpu()]
    exact = q.double(), k.double(), v.double()
    raw = projection_loss(*exact, is_causal=causal)
    found = {"projection_error": raw.error, **_parts("projection", raw)}
    if q.size(-1) > 1:
        found |= _parts("released", projection_loss(*exact, form="released", is_causal=causal))
    found = {key: value.float() for key, value in found.items()}
    if causal:
        notes.append("gamma is left out: a causal layer has another kernel for every query")
    elif k.size(1) > settings.max_tokens:
        notes.append(f"gamma is left out: more than {settings.max_tokens} tokens")
    elif k.size(1) > 2:
        ratios = eigenvalue_ratios(k, v)
        found |= {
            "gamma_spread": ratios.spread,
            "gamma_deviation": ratios.deviation,
            "gamma_eigenvalue": ratios.eigenvalues,
            "gamma_cosine": ratios.cosine,
        }
    return found


def _parts(form: str, loss: ProjectionLoss) -> dict[str, Tensor]:
    return {f"{form}_log_length": loss.log_length, f"{form}_output": loss.output}


def _maps(
    attention: CapturedAttention, case: int, matrix: Tensor | None, notes: list[str]
) -> dict[str, Tensor]:
    found = scores(attention, case)
    if matrix is not None:
        shown = [evenly_spaced(min(size, _MAP_TOKENS), size, matrix.device) for size in matrix.shape[-2:]]
        if max(matrix.shape[-2:]) > _MAP_TOKENS:
            notes.append(f"the attention map shows {_MAP_TOKENS} evenly spaced tokens")
        found["attention_map"] = matrix[:, shown[0]][..., shown[1]].contiguous()
    return found


def _over_largest(values: Tensor) -> Tensor:
    return values / values[..., :1].clamp_min(torch.finfo(values.dtype).tiny)
