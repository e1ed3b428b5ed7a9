"""Feature maps phi: the explicit side of a kernel k(x, y) = <phi(x), phi(y)>.

Every map takes ``x`` (B, h, N, p) and returns (B, h, N, p'). ``attention_mask`` (B, N; True = real token)
and ``is_causal`` matter to the maps that normalise over the sequence; the token-wise maps do not read them.
The maps with a state of their own are modules, in ``kernel_attention.tensors.features.softmax_features``.
"""

import inspect
import math
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.specs import Spec, SpecReader
from kernel_attention.tensors.affine import wide
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures, TaylorFeatures
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, smallest
from kernel_attention.tensors.unit_rows import unit_rows

FeatureMap = Callable[[Tensor, Tensor | None, bool], Tensor]

SMALLEST_NORM = 1e-12  # shorter rows count as zero rows in the kernels for GPUs


def cosine(x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """x / ||x|| per token, the map of the cosine-similarity kernel (Primal-Attention, section 4.1).

    The norm accumulates in float32 for 16-bit inputs, and its squares do not overflow. A zero row stays zero
    and passes no gradient.
    """
    return unit_rows(x)


def balanced(x: Tensor, size: Tensor) -> Tensor:
    """x divided by the power of two next to ``size``, about its largest entry.

    Squares of the result do not overflow. The division is exact. Differentiation takes the power of two for a
    constant.
    """
    return x * balancing(size, x.dtype).to(x.dtype)


def balancing(size: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the power of two next to ``size``, clipped to the range of ``dtype``."""
    reach = math.log2(torch.finfo(dtype).max) - 2
    exponent = size.detach().clamp(smallest(size.dtype), torch.finfo(size.dtype).max).log2().round()
    return exponent.clamp(-reach, reach).neg().exp2()


def frobenius(
    x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False, before: Tensor | None = None
) -> Tensor:
    """X / ||X||_F per sequence and head over its real tokens (KMLSVD thesis, eq. 3-8); 0 at padded tokens.

    The causal form divides token i by the norm of x_0..x_i. Its square begins with ``before``, (B, h, 1, 1),
    that of the tokens ahead of x. The norm accumulates in float32 for 16-bit inputs. Where it is zero, the
    output is zero and no gradient passes. The causal form sums the squares of a prefix without scaling, so
    its inputs must stay below the square root of the largest number.
    """
    x = zero_padding(x, attention_mask)
    if not is_causal:
        x = balanced(x, exactly(x.detach()).abs().amax(dim=(-2, -1), keepdim=True))
    energy = x.to(accumulation_dtype(x.dtype)).square().sum(dim=-1, keepdim=True)
    energy = energy.cumsum(dim=2) if is_causal else energy.sum(dim=2, keepdim=True)
    if before is not None:
        energy = energy + before
    return (x * inverse_norm(energy)).to(x.dtype)


def inverse_norm(energy: Tensor) -> Tensor:
    """1 / ||x|| from ||x||^2; 0 with no gradient where ||x|| counts as zero."""
    return energy.masked_fill(energy < smallest(energy.dtype), torch.inf).rsqrt()


def identity(x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """x itself, the map of the linear kernel."""
    return x


def elu(x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """The map elu + 1 of Katharopoulos et al. 2020, per component: x + 1 where x > 0, exp(x) elsewhere.

    exp(x) - 1 + 1 would round to zero for every x below -17 in float32.
    """
    return x.clamp_max(0.0).exp() + x.relu()


def relu(x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """max(x, 0) per component; never negative."""
    return x.relu()


def hedgehog(x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """[softmax(x); softmax(-x)] per token: 2p positive features (Zhang et al. 2024, arXiv 2402.04347).

    The paper's trainable matrix ahead of the softmax is a factor of the head's query or key projection here.
    """
    return torch.cat([x.softmax(dim=-1), x.neg().softmax(dim=-1)], dim=-1)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "cosine": cosine, "elu": elu, "frobenius": frobenius, "hedgehog": hedgehog, "identity": identity,
    "relu": relu,
}  # fmt: skip
FEATURE_MODULES: dict[str, type[nn.Module]] = {"softmax_plus": SoftmaxPlusFeatures, "taylor": TaylorFeatures}

FeatureMapSpec = Spec | FeatureMap
"""A feature map: its name, ``{name: options}`` for one with options, or the callable itself."""


def named_feature_map(feature_map: Any) -> Any:
    """The name of a feature map that has one, anything else as it is."""
    return next((name for name, known in FEATURE_MAPS.items() if known is feature_map), feature_map)


def get_feature_map(
    feature_map: FeatureMapSpec,
    head_dim: int | None = None,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> FeatureMap:
    """The feature map of that name; a callable of the same signature passes through.

    Args:
        feature_map: a name, ``{name: options}`` (``{"softmax_plus": {"num_features": 128, "seed": 1}}``) or a
            callable.
        head_dim: width p of the inputs. The maps with a state, "softmax_plus" and "taylor", need it; they
            come as new modules, which the layer keeps as a submodule of its own.
        device: where such a module's buffers are made; None: the default device.
        dtype: their precision; None: the module's own.

    Raises:
        InputError: for an unknown name, option or value, or a map with a state where ``head_dim`` is not
            given.
    """
    if callable(feature_map):
        return feature_map
    name, options = FEATURE_MAP_SPECS.read(feature_map)
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    if head_dim is None:
        raise InputError(f"feature_map={feature_map!r} has a state, which this mechanism cannot keep")
    return FEATURE_MODULES[name](head_dim, **options, device=device, dtype=dtype)


def _options_of(name: str) -> list[str]:
    if name in FEATURE_MAPS:
        return []
    accepted = inspect.signature(FEATURE_MODULES[name]).parameters
    return [option for option in accepted if option not in ("head_dim", "device", "dtype")]


FEATURE_MAP_SPECS = SpecReader(
    argument="feature_map",
    kind="feature_map",
    names=ChainMap[str, Any](FEATURE_MAPS, FEATURE_MODULES),
    options_of=_options_of,
    forms="a name, {name: options} or a callable",
)


def is_positive(feature_map: FeatureMap) -> bool:
    """True where <phi(x), phi(y)> is never negative, so that its sum over y can divide it.

    Maps from outside this library are assumed to be positive.
    """
    if isinstance(feature_map, TaylorFeatures):
        return feature_map.order % 2 == 0
    return feature_map not in (cosine, frobenius, identity)


def is_tokenwise(feature_map: FeatureMap) -> bool:
    """True where phi of a token is known to depend on that token alone."""
    return feature_map in (cosine, elu, hedgehog, identity, relu) or isinstance(feature_map, TaylorFeatures)


def features_in_range(
    feature_map: FeatureMap, x: Tensor, attention_mask: Tensor | None, is_causal: bool
) -> Tensor:
    """phi(x), in float32 in the place of float16 where phi holds powers or exponentials of x."""
    grows = isinstance(feature_map, SoftmaxPlusFeatures | TaylorFeatures)
    return feature_map(wide(x) if grows else x, attention_mask, is_causal)


def energy_before(feature_map: FeatureMap, x: Tensor) -> Tensor | None:
    """||X||^2 of no tokens, (B, h, 1, 1), for maps that divide by it; x (B, h, N, p) gives the sizes."""
    return (
        x.new_zeros(*x.shape[:2], 1, 1, dtype=accumulation_dtype(x.dtype))
        if feature_map is frobenius
        else None
    )


def features_of(feature_map: FeatureMap, x: Tensor, energy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """phi of one token, (B, h, 1, p), and ||X||^2 of the prefix with it.

    Every map but the Frobenius map is taken to be token-wise.
    """
    if energy is None:
        return feature_map(x, None, True), None
    energy = energy + exactly(x).square().sum(dim=-1, keepdim=True)
    return (x * inverse_norm(energy)).to(x.dtype), energy
