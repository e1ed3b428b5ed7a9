"""Sequences of any length: splits, scale, loaders, augmentation, and the training of a model of them.

Legend of shapes: n_i steps of case i, c channels, B cases of a batch, N steps of its longest case.
"""

from kernel_attention.series.sequences import as_sequences, windows_of
from kernel_attention.series.splits import Batch, SequenceSplit, Standardizer, make_loader, stratified_split

__all__ = [
    "Batch",
    "SequenceSplit",
    "Standardizer",
    "as_sequences",
    "make_loader",
    "stratified_split",
    "windows_of",
]
