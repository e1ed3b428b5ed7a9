"""Feature maps and small linear algebra: tensors in, tensors out."""

from kernel_attention.kernels.feature_maps import (
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
from kernel_attention.kernels.functions import KERNEL_FUNCTIONS, KernelFunction, get_kernel_function
from kernel_attention.kernels.softmax_features import SoftmaxPlusFeatures, TaylorFeatures
from kernel_attention.kernels.statistics import (
    accumulation_dtype,
    evenly_spaced,
    gather_ranks,
    num_real,
    part_positions,
    rows_before,
    running_mean,
    sample_positions,
    sample_rows,
    valid_ranks,
)
from kernel_attention.kernels.thresholds import shrink

__all__ = [
    "FEATURE_MAPS",
    "FEATURE_MODULES",
    "KERNEL_FUNCTIONS",
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
    "get_kernel_function",
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
