"""Kernel functions: the implicit side, k(x_i, z_j) for all pairs of two samples.

Every function takes ``x`` (n, p) and ``z`` (m, p) and returns (n, m). Those whose rows are normalised also
take ``reference`` (m', p), the sample over which a row sums to 1; the default is ``z``. It serves to compare
a new z with the sample of the fit.

Asymmetric kernels as in Tao, Tonin, Chen, Suykens, "Nonlinear SVD with asymmetric kernels: feature learning
and asymmetric Nystrom method", 2023; the exponential and softmax kernels are those of attention (Tsai et al.,
"Transformer dissection", EMNLP 2019).
"""

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown

KernelFunction = Callable[..., Tensor]
"""``kernel(x, z, **parameters)``: (n, p), (m, p) -> (n, m)."""


def linear(x: Tensor, z: Tensor) -> Tensor:
    """x.z."""
    return x @ z.mT


def cosine(x: Tensor, z: Tensor) -> Tensor:
    """The cosine of the angle between x and z; 0 where one of them is zero."""
    return _unit_rows(x) @ _unit_rows(z).mT


def _unit_rows(x: Tensor) -> Tensor:
    """Every row over its norm, of any size; a zero row stays."""
    # A number of the size of the row keeps its squares in range; it cancels, in the gradient too.
    size = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / size.where(size > 0, 1.0)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(0.5)


def polynomial(
    x: Tensor, z: Tensor, *, gamma: float | None = None, degree: float = 3, coef0: float = 1
) -> Tensor:
    """(gamma x.z + coef0)^degree; gamma is 1/p by default."""
    return (_or_inverse(gamma, x.size(-1)) * (x @ z.mT) + coef0).pow(degree)


def rbf(x: Tensor, z: Tensor, *, gamma: float | None = None) -> Tensor:
    """exp(-gamma ||x - z||^2); gamma is 1/p by default."""
    # Rounding can make a squared distance slightly negative, and the kernel slightly larger than 1.
    return _minus_squared_distances(x, z, gamma).clamp_max_(0.0).exp_()


def exponential(x: Tensor, z: Tensor, *, gamma: float | None = None) -> Tensor:
    """exp(gamma x.z); gamma is 1/sqrt(p) by default, which makes it the numerator of softmax attention."""
    return (x @ (_or_inverse(gamma, math.sqrt(x.size(-1))) * z).mT).exp_()


def softmax(x: Tensor, z: Tensor, *, gamma: float | None = None, reference: Tensor | None = None) -> Tensor:
    """exp(gamma x.z) divided by its sum over z, the attention matrix; gamma is 1/sqrt(p) by default."""
    scale = _or_inverse(gamma, math.sqrt(x.size(-1)))
    logits = x @ (scale * z).mT
    against = logits if reference is None else x @ (scale * reference).mT
    return (logits - against.logsumexp(dim=-1, keepdim=True)).exp_()


def sne(x: Tensor, z: Tensor, *, gamma: float | None = None, reference: Tensor | None = None) -> Tensor:
    """exp(-gamma ||x - z||^2) divided by its sum over z: the probability that x picks z as its neighbour.

    gamma is 1/p by default. Source: Hinton, Roweis, "Stochastic neighbor embedding", NIPS 2002, eq. 1, with
    one width for all points, here for two samples.
    """
    logits = _minus_squared_distances(x, z, gamma)
    against = logits if reference is None else _minus_squared_distances(x, reference, gamma)
    return (logits - against.logsumexp(dim=-1, keepdim=True)).exp_()


def _or_inverse(gamma: float | None, default: float) -> float:
    return 1.0 / default if gamma is None else gamma


def _minus_squared_distances(x: Tensor, z: Tensor, gamma: float | None) -> Tensor:
    """-gamma ||x - z||^2 as one matrix product, because memory access is the cost of such a kernel."""
    scale = _or_inverse(gamma, x.size(-1))
    # The shift changes no distance. Far from the origin, products would lose the distances to rounding.
    middle = z.detach().mean(dim=-2)
    x, z = x - middle, z - middle
    x_norm, z_norm = (part.square().sum(dim=-1, keepdim=True) for part in (x, z))
    left = torch.cat([2 * scale * x, -scale * x_norm, torch.ones_like(x_norm)], dim=-1)
    return left @ torch.cat([z, torch.ones_like(z_norm), -scale * z_norm], dim=-1).mT


KERNEL_FUNCTIONS: dict[str, KernelFunction] = {
    "cosine": cosine, "exponential": exponential, "linear": linear, "polynomial": polynomial, "rbf": rbf,
    "sne": sne, "softmax": softmax,
}  # fmt: skip
_POSITIVE = {("rbf", "gamma"), ("sne", "gamma"), ("polynomial", "degree")}


def parameters_of(kernel: str) -> list[str]:
    """Names of the parameters of a named kernel.

    Raises:
        InputError: for an unknown name.
    """
    if kernel not in KERNEL_FUNCTIONS:
        raise unknown("kernel", kernel, KERNEL_FUNCTIONS)
    return [
        name
        for name in inspect.signature(KERNEL_FUNCTIONS[kernel]).parameters
        if name not in {"x", "z", "reference"}
    ]


def get_kernel_function(kernel: str | KernelFunction, **parameters: Any) -> KernelFunction:
    """The kernel with these parameters, as a function of x, z and, where it has one, ``reference``.

    Args:
        kernel: a name in ``KERNEL_FUNCTIONS``, or a callable (x, z, **parameters) -> (n, m).
        parameters: the parameters of that kernel; None stands for the default.

    Raises:
        InputError: for an unknown name or parameter, or a value that is not accepted.
    """
    if callable(kernel):
        return functools.partial(kernel, **parameters) if parameters else kernel
    if not isinstance(kernel, str):
        raise InputError(f"kernel={kernel!r} must be a callable or one of: {', '.join(KERNEL_FUNCTIONS)}")
    accepted = parameters_of(kernel)
    for name, value in parameters.items():
        if name not in accepted:
            raise unknown(f"parameter of kernel {kernel!r}", name, accepted)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name}={value!r} of kernel {kernel!r} must be a finite number")
        if (kernel, name) in _POSITIVE and value <= 0:
            raise InputError(f"{name}={value!r} of kernel {kernel!r} must be above 0")
    return functools.partial(
        KERNEL_FUNCTIONS[kernel], **{k: v for k, v in parameters.items() if v is not None}
    )


def takes_reference(kernel: KernelFunction) -> bool:
    """True where the rows of the kernel are normalised over a sample, its argument ``reference``."""
    try:
        return "reference" in inspect.signature(kernel).parameters
    except ValueError:  # a callable without a signature
        return False
