"""Data sets by name: time series with the loader that pads and shuffles them, images, label maps, and
generated tasks.

Legend of shapes: n_i steps of case i, c channels, B cases of a batch, N steps of its longest case.
"""

from kernel_attention.series import (
    Batch,
    SequenceSplit,
    Standardizer,
    as_sequences,
    make_loader,
    stratified_split,
    windows_of,
)
from kernel_attention.series.files import SeriesColumns, SeriesFile
from kernel_attention.training.samplers import EpochSampler
from kernel_attention_lab.data.archive import DatasetInfo, list_time_series
from kernel_attention_lab.data.decisions.d4rl import convert_d4rl, read_d4rl
from kernel_attention_lab.data.decisions.episodes import Episodes
from kernel_attention_lab.data.decisions.loading import load_decisions
from kernel_attention_lab.data.decisions.sets import DecisionData, list_decision_sets
from kernel_attention_lab.data.images.out_of_distribution import OutOfDistribution, load_ood
from kernel_attention_lab.data.images.sets import (
    ClassSubset,
    list_image_sets,
    load_class_subset,
    load_images,
)
from kernel_attention_lab.data.images.splits import ImageData, ImageSplit
from kernel_attention_lab.data.positions import POSITION_TASKS, make_position_task
from kernel_attention_lab.data.positions.task import PositionTask
from kernel_attention_lab.data.segmentation.sets import (
    SegmentationData,
    SegmentationSplit,
    load_segmentation,
)
from kernel_attention_lab.data.series.loading import (
    load_time_series,
    read_sequences,
    read_series_file,
)
from kernel_attention_lab.data.series.own_files import is_series_file, load_series_files
from kernel_attention_lab.data.series.time_series import TimeSeriesData

__all__ = [
    "POSITION_TASKS",
    "Batch",
    "ClassSubset",
    "DatasetInfo",
    "DecisionData",
    "Episodes",
    "EpochSampler",
    "ImageData",
    "ImageSplit",
    "OutOfDistribution",
    "PositionTask",
    "SegmentationData",
    "SegmentationSplit",
    "SequenceSplit",
    "SeriesColumns",
    "SeriesFile",
    "Standardizer",
    "TimeSeriesData",
    "as_sequences",
    "convert_d4rl",
    "is_series_file",
    "list_decision_sets",
    "list_image_sets",
    "list_time_series",
    "load_class_subset",
    "load_decisions",
    "load_images",
    "load_ood",
    "load_segmentation",
    "load_series_files",
    "load_time_series",
    "make_loader",
    "make_position_task",
    "read_d4rl",
    "read_sequences",
    "read_series_file",
    "stratified_split",
    "windows_of",
]
