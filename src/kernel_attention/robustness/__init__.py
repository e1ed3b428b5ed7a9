"""Attacks on inputs, and what a model makes of them."""

from kernel_attention.robustness.word_swap import GENERIC_WORD, swap_words

__all__ = ["GENERIC_WORD", "swap_words"]
