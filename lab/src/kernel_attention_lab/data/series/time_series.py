"""A data set of time series as two splits of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_attention.series import SequenceSplit, Standardizer


@dataclass(frozen=True, eq=False)
class TimeSeriesData:
    """A named data set; `class_names[k]` is the label of class index k (empty in regression).

    `channel_names[k]` is the name of channel k; empty where the files name none.

    The sequences are kept in the precision that the channels of the training split need, see `Standardizer`.
    """

    name: str
    task: str
    train: SequenceSplit
    test: SequenceSplit
    class_names: tuple[str, ...] = ()
    channel_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(sequence.dtype == np.float64 for sequence in (*self.train.sequences, *self.test.sequences)):
            dtype = Standardizer.fit(self.train.sequences).dtype
            for name in ("train", "test"):
                object.__setattr__(self, name, getattr(self, name).in_precision(dtype))

    @property
    def num_features(self) -> int:
        """Channels of a sequence."""
        return int(self.train.sequences[0].shape[1])

    @property
    def max_len(self) -> int:
        """Steps of the longest sequence of both splits."""
        return max(len(sequence) for split in (self.train, self.test) for sequence in split.sequences)

    @property
    def num_outputs(self) -> int:
        """Classes, or 1 in regression."""
        return len(self.class_names) if self.task == "classification" else 1
