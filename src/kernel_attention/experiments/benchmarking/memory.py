"""The peak memory of a pass above the memory before it, in a separate process for every contender.

On CPU the peak is that of the resident set (``VmHWM``, reset through ``/proc/self/clear_refs``) above its
size once everything is imported, the layer and its input exist, and a short sequence went through. The
child returns freed blocks at once (``MALLOC_MMAP_THRESHOLD_``), so the figure is the largest memory in use,
temporaries included, and does not depend on the allocator. On CUDA it is
``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from kernel_attention.errors import InputError
from kernel_attention.experiments.benchmarking.plans import ContenderSpec, Setting
from kernel_attention.experiments.plugins import load_plugins, loaded_plugins

_WARM_LENGTH = 128  # divisible by the buckets and landmarks of other libraries


def measure_peaks(spec: ContenderSpec, setting: Setting, passes: Sequence[str]) -> dict[str, object]:
    """Bytes by pass, ``{"forward": .., "step": ..}``, and ``"how"``; ``{"failed": why}`` where it fails."""
    asked = json.dumps(
        {"spec": spec, "setting": setting.record(), "passes": list(passes), "plugins": loaded_plugins()}
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(setting.threads)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kernel_attention.experiments.benchmarking.memory"],
        input=asked, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        words = child.stderr.strip().splitlines()
        told = words[-1] if words else f"the process ended with {child.returncode}"
        return {"failed": told[:200]}
    return dict(json.loads(lines[-1]))


def _peaks(spec: ContenderSpec, setting: Setting, passes: Sequence[str]) -> dict[str, object]:
    from kernel_attention.experiments.benchmarking import timing
    from kernel_attention.experiments.benchmarking.contenders import find_contender

    torch.set_num_threads(setting.threads)
    layer, x, cotangent = timing.layer_and_data(find_contender(spec).make, setting)
    measured: dict[str, object] = {}
    for kind in passes:
        short = slice(None), slice(0, min(_WARM_LENGTH, setting.length))
        if setting.length > _WARM_LENGTH:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # accepts its own length only
                timing.seconds(kind, layer, x.detach()[short].requires_grad_(), cotangent[short])
        layer.zero_grad(set_to_none=True)
        before = _reset(x.is_cuda)
        timing.seconds(kind, layer, x, cotangent)
        peak, measured["how"] = _peak(x.is_cuda)
        measured[kind] = max(peak - before, 0)
    return measured


def _reset(is_cuda: bool) -> int:
    """Bytes held now; the peak is counted from here."""
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    status = _status("VmRSS")
    if status is None:
        return _largest_resident()
    Path("/proc/self/clear_refs").write_text("5")
    return status


def _peak(is_cuda: bool) -> tuple[int, str]:
    if is_cuda:
        return torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    status = _status("VmHWM")
    if status is None:
        return _largest_resident(), "ru_maxrss, which cannot be reset: a lower bound"
    return status, "VmHWM above VmRSS"


def _status(name: str) -> int | None:
    """A line of /proc/self/status in bytes; None where the system has no such file."""
    path = Path("/proc/self/status")
    if not path.is_file() or not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    found = [line for line in path.read_text().splitlines() if line.startswith(f"{name}:")]
    return 1024 * int(found[0].split()[1])


def _largest_resident() -> int:
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    known = {field.name for field in dataclasses.fields(Setting)}
    if set(asked["setting"]) != known:
        raise InputError(f"setting={asked['setting']!r} must have {', '.join(sorted(known))}")
    load_plugins(asked["plugins"])
    print(json.dumps(_peaks(asked["spec"], Setting(**asked["setting"]), asked["passes"])))


if __name__ == "__main__":
    _main()
