"""Feature maps of queries and keys, random features, and kernel functions of two samples."""

from kernel_attention.tensors.features.feature_maps import (
    FEATURE_MAPS,
    FEATURE_MODULES,
    FeatureMap,
    FeatureMapSpec,
    cosine,
    elu,
    frobenius,
    get_feature_map,
    hedgehog,
    identity,
    is_positive,
    is_tokenwise,
    relu,
)
from kernel_attention.tensors.features.kernel_functions import (
    KERNEL_FUNCTIONS,
    KernelFunction,
    get_kernel_function,
)
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures, TaylorFeatures

__all__ = [
    "FEATURE_MAPS",
    "FEATURE_MODULES",
    "KERNEL_FUNCTIONS",
    "FeatureMap",
    "FeatureMapSpec",
    "KernelFunction",
    "SoftmaxPlusFeatures",
    "TaylorFeatures",
    "cosine",
    "elu",
    "frobenius",
    "get_feature_map",
    "get_kernel_function",
    "hedgehog",
    "identity",
    "is_positive",
    "is_tokenwise",
    "relu",
]
