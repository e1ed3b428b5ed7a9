"""The machine of a measurement, and its ceilings."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.benchmarking.plans import Setting
from kernel_attention_lab.provenance import code_revision, processor_name

_LARGE = 1536  # rows of the square product that gives the ceiling of arithmetic
_COPIED = 1 << 28  # bytes, far beyond every cache
_SLICE = 1024  # tokens the fused layer takes at a time
# A GPU is not busy with sizes that fill a processor, and starting its work takes longer than the work.
_GPU_SCALE = 4
_GPU_CALLS = 20


def describe_machine(devices: set[str]) -> dict[str, object]:
    """Processor, cores, software, date, and the revision of this code."""
    described: dict[str, object] = {
        **code_revision(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if "cuda" in devices:
        described |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return described


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], device: str = "cpu", **described: Any) -> None:
    """Write a record of a script's measurements: the machine, what else is given, and the rows."""
    record = {"machine": describe_machine({torch.device(device).type}), **described, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, json.dumps(record, indent=1) + "\n")


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes; [] where the system does not report them."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else []


def measure_ceilings(setting: Setting) -> dict[str, float]:
    """Operations and bytes per second of a large product, a product of the layer's slices, and a copy.

    A GPU takes all tokens at once.
    """
    torch.set_num_threads(setting.threads)
    kind = {"device": setting.device, "dtype": setting.torch_dtype}
    is_gpu = setting.device == "cuda"
    large, copied = (size * _GPU_SCALE if is_gpu else size for size in (_LARGE, _COPIED))
    square = torch.randn(large, large, **kind)  # type: ignore[call-overload]
    d, slice_length = setting.embed_dim, setting.length if is_gpu else _SLICE
    tokens = torch.randn(setting.batch_size, slice_length, d, **kind)  # type: ignore[call-overload]
    weight = torch.randn(2 * d, d, **kind)  # type: ignore[call-overload]
    source = torch.zeros(copied // square.element_size(), **kind)  # type: ignore[call-overload]
    target = torch.zeros_like(source)
    return {
        "large_product": 2 * large**3 / _fastest(lambda: square @ square, setting),
        "slice_product": 4 * d**2 * setting.batch_size * slice_length
        / _fastest(lambda: torch.nn.functional.linear(tokens, weight), setting),
        "copy": 2 * copied / _fastest(lambda: target.copy_(source), setting),
    }  # fmt: skip


def roofline(
    setting: Setting, ceilings: dict[str, float], seconds: dict[str, float], layer: AttentionLayer
) -> list[dict[str, object]]:
    """The counted work of a layer, the time that the ceilings allow, and the time it takes.

    Args:
        setting: the sizes.
        ceilings: of ``measure_ceilings``.
        seconds: measured, by pass.
        layer: it says what a token costs, see ``token_work``; no row for a layer that does not.
    """
    rows: list[dict[str, object]] = []
    for kind, measured in seconds.items():
        work = layer.token_work(training=kind == "step", length=setting.length)
        if work is None:
            continue
        operations = setting.tokens * work.operations
        moved = setting.tokens * work.numbers * setting.torch_dtype.itemsize
        arithmetic, memory = operations / ceilings["slice_product"], moved / ceilings["copy"]
        rows.append(
            {
                "pass": kind,
                "operations": operations,
                "bytes": moved,
                "seconds_arithmetic": arithmetic,
                "seconds_memory": memory,
                "seconds_measured": measured,
                "share": max(arithmetic, memory) / measured,
                "copy_share": memory / measured,
            }
        )
    return rows


def _fastest(work: Callable[[], object], setting: Setting) -> float:
    """The seconds of a call: the lower quartile of a dozen, because a ceiling is the best possible value."""
    is_gpu = setting.device == "cuda"
    wait, calls = (torch.cuda.synchronize, _GPU_CALLS) if is_gpu else ((lambda: None), 1)
    taken = []
    for _ in range(12):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(sorted(taken)[:6])
