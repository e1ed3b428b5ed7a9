"""Feature maps and small linear algebra: tensors in, tensors out."""

from kernel_attention.kernels.feature_maps import FEATURE_MAPS, FeatureMap, cosine, get_feature_map, identity
from kernel_attention.kernels.statistics import (
    accumulation_dtype,
    evenly_spaced,
    gather_ranks,
    rows_before,
    running_mean,
    sample_rows,
    valid_ranks,
)

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "accumulation_dtype",
    "cosine",
    "evenly_spaced",
    "gather_ranks",
    "get_feature_map",
    "identity",
    "rows_before",
    "running_mean",
    "sample_rows",
    "valid_ranks",
]
