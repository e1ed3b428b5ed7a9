"""The folder of a benchmark: its record, its tables and its pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import InputError
from kernel_attention.experiments.reporting.benchmark_tables import benchmark_markdown


def write_benchmark(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``benchmark.json``, ``tables.md`` and pictures. Return the files written.

    Raises:
        InputError: where the folder cannot be written to.
    """
    from kernel_attention.experiments.reporting.benchmark_plots import (
        benchmark_plot,
        is_paper_record,
        paper_ratio_plot,
    )

    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "benchmark.json", folder / "tables.md"]
        # A run writes these again after every setting, and a kill must not destroy the earlier results.
        texts = (json.dumps(record, indent=1, allow_nan=False) + "\n", benchmark_markdown(record))
        for path, text in zip(files, texts, strict=True):
            write_text_atomically(path, text)
        plots = {"benchmark.svg": benchmark_plot}
        if is_paper_record(record):
            plots["primal-dual-figures.svg"] = paper_ratio_plot
        for name, plot in plots.items():
            plot(record).savefig(folder / name, metadata={"Date": None})
            files.append(folder / name)
    except OSError as error:
        raise InputError(f"output {folder}: cannot be written ({error.strerror or error})") from None
    return files
