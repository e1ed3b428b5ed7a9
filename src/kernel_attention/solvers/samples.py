"""The inputs of two-sample solvers: samples, their features, and random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sklearn.utils import check_random_state
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import read_array, read_matrix
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, frobenius, get_feature_map


def read_first(estimator: Any, X: Any, *, reset: bool) -> Tensor:
    """X (n, p) as a tensor in single or double precision, which decompositions need.

    Raises:
        InputError: for a tensor that is not a finite matrix of the expected width and precision.
        ValueError: scikit-learn's, for anything else.
    """
    x = read_matrix(estimator, X, reset=reset)
    if x.dtype not in (torch.float32, torch.float64):
        raise InputError(f"X has dtype {x.dtype}, expected torch.float32 or torch.float64")
    return x


def read_second(Z: Any, like: Tensor | None) -> Tensor:
    """Z (m, q) as a tensor on the device and in the precision of X's.

    Raises:
        InputError: for a tensor that is not a finite matrix.
        ValueError: scikit-learn's, for anything else.
    """
    if isinstance(Z, Tensor) and (Z.dim() != 2 or Z.size(0) < 1 or Z.size(1) < 1):
        raise InputError(f"Z has shape {tuple(Z.shape)}, expected (m, features) with m at least 1")
    z = read_array("Z", Z)
    return z if like is None else z.to(like)


def features(feature_map: FeatureMapSpec | Callable[[Tensor], Tensor], x: Tensor, name: str) -> Tensor:
    """phi of the rows of (n, d), (n, p); ``name`` is that of the argument, for errors.

    Raises:
        InputError: for an unknown map, one that is not of single points, or one that returns another shape or
            numbers that are not finite.
    """
    if callable(feature_map):
        phi = feature_map(x)  # type: ignore[call-arg]
    else:
        found = get_feature_map(feature_map, head_dim=x.size(1))
        if found is frobenius:
            raise InputError(f"{name}={feature_map!r} is a map of a whole sequence, not of single points")
        if isinstance(found, nn.Module):
            found = found.to(x)
        phi = found(x[None, None], None, False)[0, 0]
    if not isinstance(phi, Tensor) or phi.dim() != 2 or phi.size(0) != x.size(0):
        got = tuple(phi.shape) if isinstance(phi, Tensor) else type(phi).__name__
        raise InputError(f"{name} must return a tensor of shape ({x.size(0)}, p) here, not {got}")
    if not phi.isfinite().all():
        raise InputError(
            f"{name}={feature_map!r} returns NaN or infinity for these points, expected finite numbers"
        )
    return phi.detach()


def make_generator(random_state: Any) -> torch.Generator:
    """A torch generator on the CPU, whose numbers are the same for every device.

    Args:
        random_state: a whole number, a NumPy or torch generator, or None for a new one.
    """
    if isinstance(random_state, torch.Generator):
        return random_state
    generator = torch.Generator()
    if random_state is None:
        generator.seed()
        return generator
    if isinstance(random_state, int):
        return generator.manual_seed(random_state)
    return generator.manual_seed(int(check_random_state(random_state).randint(2**31)))
