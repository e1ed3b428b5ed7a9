"""Attacks on the inputs of a model, corrupted inputs, and inputs of no known class."""

from kernel_attention.experiments.robustness.corruption_error import (
    ALEXNET_ERRORS,
    corruption_accuracies,
    corruption_errors,
    mean_corruption_error,
)
from kernel_attention.experiments.robustness.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    corrupt_image,
    corrupt_images,
    corrupted_images,
)
from kernel_attention.experiments.robustness.out_of_distribution import (
    detection_figures,
    out_of_distribution_scores,
)
from kernel_attention.experiments.robustness.word_swap import GENERIC_WORD, swap_words

__all__ = [
    "ALEXNET_ERRORS",
    "CORRUPTIONS",
    "GENERIC_WORD",
    "SEVERITIES",
    "corrupt_image",
    "corrupt_images",
    "corrupted_images",
    "corruption_accuracies",
    "corruption_errors",
    "detection_figures",
    "mean_corruption_error",
    "out_of_distribution_scores",
    "swap_words",
]
