"""The inputs of estimators, numpy or torch in and the same out, and computations that do not overflow."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, validate_data
from torch import Tensor, nn

from kernel_attention.containers import as_numbers
from kernel_attention.errors import InputError
from kernel_attention.tensors.features.feature_maps import FeatureMapSpec, frobenius, get_feature_map


def require_finite(name: str, x: Tensor) -> None:
    """Refuse an argument that holds NaN or infinity.

    Raises:
        InputError: with the argument's name.
    """
    if not x.isfinite().all():
        raise InputError(f"{name} holds NaN or infinity, expected finite numbers")


def require_range(name: str, results: str, *computed: Tensor) -> None:
    """Refuse a finite argument whose ``results`` are not finite.

    Raises:
        InputError: with the argument's name.
    """
    for part in computed:
        if not part.isfinite().all():
            raise InputError(
                f"{name} holds numbers so large that {results} leave the range of {part.dtype}: scale {name}"
            )


def binary_unit(x: Tensor) -> float:
    """The largest power of two that is no larger than the largest entry's size; 1 where all are zero.

    Division by it is exact, and later squares of the quotients do not overflow. It is kept between the
    smallest normal number and its inverse, so that its own inverse does not overflow.
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return 1.0
    tiny = torch.finfo(x.dtype).tiny
    return min(max(math.ldexp(1.0, math.frexp(largest)[1] - 1), tiny), 1 / tiny)


def size_of(x: Tensor) -> float:
    """The 2-norm of all entries, whose squares may overflow."""
    unit = binary_unit(x)
    return unit * float(torch.linalg.vector_norm(x / unit))


def times_exp(x: Tensor, exponent: Tensor) -> Tensor:
    """x exp(exponent): 0 where x is 0, and infinite only where the product itself overflows."""
    # In two steps: where the square root overflows, so does its square times any normal number.
    root = (exponent / 2).exp()
    return torch.where(x == 0, 0.0, x * root * root)


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
    """Numbers of any shape as a floating tensor: a tensor as it is, all else as scikit-learn's
    ``check_array`` does.

    Raises:
        InputError: for a tensor that is not finite, with the argument's ``name``.
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
