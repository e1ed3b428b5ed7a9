"""Series in files: readers of tables, of the archive's format and of arrays, with the line in every error.

Legend of shapes: n_i steps of case i, c channels.
"""

from kernel_attention.series.files.layouts import SeriesColumns
from kernel_attention.series.files.reading import SERIES_FILES, SeriesFile, read_series

__all__ = ["SERIES_FILES", "SeriesColumns", "SeriesFile", "read_series"]
