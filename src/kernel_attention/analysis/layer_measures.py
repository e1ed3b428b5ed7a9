"""The measurements of one layer on one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kernel_attention.analysis import measures
from kernel_attention.analysis.captured import (
    CapturedAttention,
    kernel_tensor,
    near_softmax,
    objective_of,
    scores,
)
from kernel_attention.errors import InputError
from kernel_attention.tensors.sampling import evenly_spaced

if TYPE_CHECKING:
    from kernel_attention.solvers import ProjectionLoss

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
    values = measures.singular_values(matrix)
    return {
        "singular_values": measures.resized(_over_largest(values), count),
        "explained_variance": measures.resized(measures.explained_variance(values), count, 1.0),
        "effective_rank": measures.effective_rank(values),
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
    values = torch.stack(measures.mode_singular_values(kernel))
    shares = measures.explained_variance(values)
    return {
        "mode_singular_values": measures.resized(_over_largest(values), settings.num_values),
        "mode_explained_variance": measures.resized(shares, settings.num_values, 1.0),
        "mode_rank": measures.numerical_rank(values).float(),
    }


def _distances(attention: CapturedAttention, case: int, matrix: Tensor) -> dict[str, Tensor]:
    pairs = measures.head_distances(matrix)
    # Where queries were sampled, the squares of all rows are estimated from those of the sample.
    whole = (int(attention.real_queries[case].sum()) / matrix.size(-2)) ** 0.5
    found = {
        "head_distances": pairs,
        "head_distance": measures.mean_of_pairs(pairs),
        "matrix_distances": whole * measures.head_matrix_distances(matrix),
    }
    parts = attention.parts(case)
    if parts is not None and parts[2] is not None and parts[2].size(1) == matrix.size(-1):
        outputs = matrix @ parts[2]
        found["output_distance"] = measures.mean_of_pairs(measures.head_distances(outputs))
        found["output_matrix_distances"] = whole * measures.head_matrix_distances(outputs)
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
