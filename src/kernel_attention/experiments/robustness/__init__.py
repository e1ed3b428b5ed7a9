"""Attacks on the inputs of a model."""

from kernel_attention.experiments.robustness.word_swap import GENERIC_WORD, swap_words

__all__ = ["GENERIC_WORD", "swap_words"]
