"""Time series by name, as sequences of shape (time, channels), and the loader that pads and shuffles them.

Legend of shapes: n_i steps of case i, c channels, B cases of a batch, N steps of its longest case.
"""

from kernel_attention.experiments.data.archive import DatasetInfo, list_time_series
from kernel_attention.experiments.data.batches import Batch, EpochSampler, make_loader
from kernel_attention.experiments.data.loading import load_time_series, read_sequences
from kernel_attention.experiments.data.sequences import as_sequences, windows_of
from kernel_attention.experiments.data.time_series import (
    SequenceSplit,
    Standardizer,
    TimeSeriesData,
    stratified_split,
)

__all__ = [
    "Batch",
    "DatasetInfo",
    "EpochSampler",
    "SequenceSplit",
    "Standardizer",
    "TimeSeriesData",
    "as_sequences",
    "list_time_series",
    "load_time_series",
    "make_loader",
    "read_sequences",
    "stratified_split",
    "windows_of",
]
