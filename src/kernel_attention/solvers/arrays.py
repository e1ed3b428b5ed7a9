"""Arrays of the estimators: numpy or torch in, the same out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.utils.validation import check_array, validate_data
from torch import Tensor

from kernel_attention.containers import as_numbers
from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import require_finite


def read_matrix(
    estimator: Any, X: Any, *, reset: bool, min_samples: int = 1, allow_nan: bool = False
) -> Tensor:
    """X (n, features) as a floating tensor, checked as scikit-learn checks it.

    A tensor keeps its device and precision; everything else passes through numpy. ``reset`` stores
    ``n_features_in_``, otherwise X must have that many. ``allow_nan`` lets NaN through, infinity never.

    Raises:
        InputError: for a tensor that is not a finite matrix of the expected width.
        ValueError: scikit-learn's, for anything else.
    """
    if not isinstance(X, Tensor):
        checked = validate_data(
            estimator, unmasked(X), reset=reset, dtype=_TYPES, ensure_min_samples=min_samples,
            ensure_all_finite="allow-nan" if allow_nan else True,
        )  # fmt: skip
        return _cpu_tensor(checked)
    if X.dim() != 2 or X.size(0) < min_samples or X.size(1) < 1:
        raise InputError(
            f"X has shape {tuple(X.shape)}, expected (n, features) with n at least {min_samples}"
        )
    X = X.detach()
    X = X if X.is_floating_point() else X.to(torch.float64)
    require_finite("X", X.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf) if allow_nan else X)
    if reset:
        estimator.n_features_in_ = X.size(1)
        if hasattr(estimator, "feature_names_in_"):
            del estimator.feature_names_in_
    elif X.size(1) != estimator.n_features_in_:
        raise InputError(f"X has {X.size(1)} features, expected {estimator.n_features_in_} as in fit")
    return X


def read_array(name: str, values: Any, **options: Any) -> Tensor:
    """Numbers of any shape as a floating tensor: a tensor as it is, all else as scikit-learn checks it.

    Args:
        name: of the argument, for errors.
        values: the numbers.
        options: of ``sklearn.utils.check_array``.

    Raises:
        InputError: for a tensor that is not finite.
        ValueError: scikit-learn's, for anything else.
    """
    if isinstance(values, Tensor):
        values = values.detach()
        require_finite(name, values)
        return values if values.is_floating_point() else values.to(torch.float64)
    return _cpu_tensor(check_array(unmasked(values), dtype=_TYPES, input_name=name, **options))


def unmasked(values: Any) -> Any:
    """Values for scikit-learn's checks: NaN at every mark of a missing value; a frame keeps its names."""
    is_frame = hasattr(values, "columns") and hasattr(values, "iloc")
    is_plain = isinstance(values, np.ndarray) and values.dtype != object
    if not isinstance(values, np.ma.MaskedArray) and (is_plain or hasattr(values, "tocsr")):
        return values
    if not (is_frame or isinstance(values, np.ndarray | list | tuple) or hasattr(values, "isna")):
        return values
    try:
        numbers = as_numbers(values)
        return type(values)(numbers, columns=values.columns) if is_frame else numbers
    except (TypeError, ValueError, RuntimeError):
        return values  # scikit-learn says why it is no array


def _cpu_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))


_TYPES = [np.float64, np.float32]


def give_back(result: Tensor, X: Any) -> Any:
    """The result in the type of X: a tensor for a tensor, otherwise an array."""
    return result if isinstance(X, Tensor) else result.cpu().numpy()


def fitted(attribute: Any, like: Tensor) -> Tensor:
    """A fitted attribute, array or tensor, on the device and in the precision of ``like``."""
    return torch.as_tensor(attribute, device=like.device, dtype=like.dtype)
