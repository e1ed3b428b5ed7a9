"""The peak memory of a pass above the memory before it, on CPU in a separate process for every contender.

On CPU the peak is that of the resident set (``VmHWM``, reset through ``/proc/self/clear_refs``) above its
size once everything is imported, the layer and its input exist, and a short sequence, or one case of a whole
model, went through. The child returns freed blocks at once (``MALLOC_MMAP_THRESHOLD_``), so the figure is the
largest memory in use, temporaries included, and does not depend on the allocator. On CUDA it is
``torch.cuda.max_memory_allocated``, which counts tensors and needs no other process. A whole pass goes before
the one that is measured, because kernels try out their block sizes in it. See
``kernel_attention_lab.peak_memory`` for other systems.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking.plans import ContenderSpec, Setting
from kernel_attention_lab.peak_memory import peak_resident, reset_peak_resident
from kernel_attention_lab.plugins import load_plugins, loaded_plugins

_WARM_LENGTH = 128  # divisible by the buckets and landmarks of other libraries


def measure_peaks(spec: ContenderSpec, setting: Setting, passes: Sequence[str]) -> dict[str, object]:
    """Bytes by pass, ``{"forward": .., "step": ..}``, and ``"how"``; ``{"failed": why}`` where it fails."""
    if setting.device == "cuda":
        from kernel_attention_lab.benchmarking import timing

        try:
            return _peaks(spec, setting, passes)
        except Exception as error:  # of compilers too
            return {"failed": timing.reason(error)}
    asked = json.dumps(
        {"spec": spec, "setting": setting.record(), "passes": list(passes), "plugins": loaded_plugins()}
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": str(setting.threads)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "kernel_attention_lab.benchmarking.memory"],
        input=asked, capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        words = child.stderr.strip().splitlines()
        message = words[-1] if words else f"the process ended with {child.returncode}"
        return {"failed": message[:200]}
    return dict(json.loads(lines[-1]))


def _peaks(spec: ContenderSpec, setting: Setting, passes: Sequence[str]) -> dict[str, object]:
    from kernel_attention_lab.benchmarking import timing
    from kernel_attention_lab.benchmarking.bodies import WholeModel
    from kernel_attention_lab.benchmarking.contenders import find_contender

    torch.set_num_threads(setting.threads)
    layer, x, cotangent = timing.layer_and_data(find_contender(spec).make, setting)
    measured: dict[str, object] = {}
    for kind in passes:
        is_whole = isinstance(layer, WholeModel)
        short = (slice(0, 1),) if is_whole else (slice(None), slice(0, _WARM_LENGTH))
        if x.is_cuda:
            timing.seconds(kind, layer, x, cotangent)
        elif is_whole or setting.length > _WARM_LENGTH:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # accepts its own length only
                few = x.detach()[short].requires_grad_(x.requires_grad)
                timing.seconds(kind, layer, few, cotangent[short])
        layer.zero_grad(set_to_none=True)
        x.grad = None
        before, can_reset = _start(x.is_cuda)
        timing.seconds(kind, layer, x, cotangent)
        peak = torch.cuda.max_memory_allocated() if x.is_cuda else peak_resident()
        if before is None or peak is None:
            return {"failed": f"{sys.platform} does not tell the memory of a process"}
        measured[kind] = max(peak - before, 0)
        measured["how"] = _how(x.is_cuda, can_reset)
    return measured


def _start(is_cuda: bool) -> tuple[int | None, bool]:
    """Bytes held now, from which the peak is counted, and whether it is counted from now on."""
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), True
    resident = reset_peak_resident()
    return (peak_resident(), False) if resident is None else (resident, True)


def _how(is_cuda: bool, can_reset: bool) -> str:
    if is_cuda:
        return "torch.cuda.max_memory_allocated"
    return "VmHWM above VmRSS" if can_reset else "the peak, which cannot be reset: a lower bound"


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    known = {field.name for field in dataclasses.fields(Setting)}
    if set(asked["setting"]) != known:
        raise InputError(f"setting={asked['setting']!r} must have {', '.join(sorted(known))}")
    load_plugins(asked["plugins"])
    print(json.dumps(_peaks(asked["spec"], Setting(**asked["setting"]), asked["passes"])))


if __name__ == "__main__":
    _main()
