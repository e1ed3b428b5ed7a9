"""Feature maps and small linear algebra: tensors in, tensors out."""

from kernel_attention.features.feature_maps import (
    FEATURE_MAPS,
    FEATURE_MODULES,
    FeatureMap,
    FeatureMapSpec,
    cosine,
    elu,
    frobenius,
    get_feature_map,
    identity,
    is_positive,
    is_tokenwise,
    relu,
)
from kernel_attention.features.kernel_functions import KERNELS, KernelFunction, get_kernel
from kernel_attention.features.softmax_features import SoftmaxPlusFeatures, TaylorFeatures
from kernel_attention.tensors.sampling import (
    evenly_spaced,
    gather_ranks,
    part_positions,
    rows_before,
    sample_positions,
    sample_rows,
)
from kernel_attention.tensors.shrinkage import shrink
from kernel_attention.tensors.statistics import accumulation_dtype, num_real, running_mean, valid_ranks

__all__ = [
    "FEATURE_MAPS",
    "FEATURE_MODULES",
    "KERNELS",
    "FeatureMap",
    "FeatureMapSpec",
    "KernelFunction",
    "SoftmaxPlusFeatures",
    "TaylorFeatures",
    "accumulation_dtype",
    "cosine",
    "elu",
    "evenly_spaced",
    "frobenius",
    "gather_ranks",
    "get_feature_map",
    "get_kernel",
    "identity",
    "is_positive",
    "is_tokenwise",
    "num_real",
    "part_positions",
    "relu",
    "rows_before",
    "running_mean",
    "sample_positions",
    "sample_rows",
    "shrink",
    "valid_ranks",
]
