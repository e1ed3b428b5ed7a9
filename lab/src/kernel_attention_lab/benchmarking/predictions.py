"""Times of training steps on a GPU as they follow from operations, bytes and launches, not yet measured.

A step is run on the device ``meta``, and every operator that launches a kernel is an entry: its operations,
which are those of products, and the bytes of the tensors that it reads and writes. Its work takes

    max(operations / (share * peak), bytes / (share * bandwidth)).

Eager, an operator takes its work or the host's time to launch it, whichever is longer. In a CUDA graph it
takes its work and a gap. Compiled, in a graph too, neighbours that are no products become one kernel, which
moves what the largest of them moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kernel_attention.testing import counting_launches
from kernel_attention_lab.benchmarking.contenders import find_contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.plans import ContenderSpec, Setting
from kernel_attention_lab.benchmarking.sitting import CAUSAL_LAYERS, LAYERS
from kernel_attention_lab.benchmarking.timing import layer_and_data


class Gpu(NamedTuple):
    """A GPU in numbers, of which the first six are the maker's.

    Attributes:
        bfloat16: operations per second of dense products.
        float32: the same, without the rounding to TF32.
        bandwidth: bytes per second of its memory.
        share: of these that kernels attain.
        launch: seconds of the host for an operator of PyTorch, forward or backward.
        gap: seconds between the kernels of a CUDA graph.
    """

    bfloat16: float
    float32: float
    bandwidth: float
    share: float
    launch: float
    gap: float

    def seconds(self, operations: float, moved: float, dtype: torch.dtype) -> float:
        """The time of a kernel's work."""
        peak = self.bfloat16 if dtype in (torch.bfloat16, torch.float16) else self.float32
        return max(operations / peak, moved / self.bandwidth) / self.share


H100 = Gpu(989e12, 67e12, 3.35e12, 0.6, 7e-6, 1e-6)
_IN_PLACE = {torch.ops.aten.baddbmm_, torch.ops.aten.addmm_}


class _Work(NamedTuple):
    operations: float
    moved: float
    dtype: torch.dtype


class _Recorder(TorchDispatchMode):
    """The work of every launch, in order."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self.counter = counter
        self.work: list[_Work] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options = options or {}
        before = self.counter.launches.total()
        found = function(*arguments, **options)
        if self.counter.launches.total() > before:
            tensors = {id(each): each for each in tree_leaves((arguments, options, found))
                       if isinstance(each, Tensor)}  # fmt: skip
            moved = sum(each.numel() * each.element_size() for each in tensors.values())
            read = [each.dtype for each in tree_leaves(arguments) if isinstance(each, Tensor)]
            operations = _operations(function, arguments, options, found)
            self.work.append(_Work(operations, moved, read[0] if read else torch.float32))
        return found


def _operations(function: Any, arguments: tuple[Any, ...], options: Any, found: Any) -> float:
    packet = function._overloadpacket
    if packet in _IN_PLACE:
        return 2.0 * math.prod(arguments[1].shape) * arguments[2].size(-1)
    if packet not in flop_registry:
        return 0.0
    tensors = [each for each in arguments if not isinstance(each, torch.dtype)]  # of a product in float32
    operations = float(flop_registry[packet](*tensors, **options, out_val=found))
    names = [each.name for each in function._schema.arguments]
    given = dict(zip(names, arguments, strict=False)) | options
    return operations / 2 if given.get("is_causal") else operations  # half of the scores


def predict(spec: ContenderSpec, setting: Setting, gpu: Gpu = H100) -> dict[str, Any]:
    """Launches forward and backward, operations, bytes, and seconds of a training step in every form."""
    contender = find_contender(spec)
    layer, x, cotangent = layer_and_data(contender.make, Setting(**setting.record() | {"device": "meta"}))
    layer.train()
    with torch.no_grad():
        layer(x)  # makes what is kept
    with counting_launches() as counter, _Recorder(counter) as forward:
        y = layer(x)
        own = penalty(layer)
    outputs, slopes = [y], [cotangent]
    if own is not None and own.requires_grad:
        outputs, slopes = [y, own], [cotangent, torch.empty_like(own)]
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]
    with counting_launches() as counter, _Recorder(counter) as backward:
        torch.autograd.grad(outputs, leaves, slopes, allow_unused=True)
    work = [*forward.work, *backward.work]
    fused = [*_fused(forward.work), *_fused(backward.work)]
    return {
        "contender": contender.name,
        "launches_forward": len(forward.work),
        "launches_backward": len(backward.work),
        "launches_compiled": len(fused),
        "operations": sum(each.operations for each in work),
        "bytes": sum(each.moved for each in work),
        "eager": sum(max(gpu.launch, gpu.seconds(*each)) for each in work),
        "graph": sum(gpu.gap + gpu.seconds(*each) for each in work),
        "compiled": sum(gpu.gap + gpu.seconds(*each) for each in fused),
    }


def _fused(work: list[_Work]) -> Iterator[_Work]:
    """Runs of neighbours without products as one kernel each."""
    largest: _Work | None = None
    for each in work:
        if each.operations:
            if largest is not None:
                yield largest
            largest = None
            yield each
        elif largest is None or each.moved > largest.moved:
            largest = each
    if largest is not None:
        yield largest


def predictions(
    lengths: tuple[int, ...] = (4096, 16384), embed_dim: int = 512, num_heads: int = 8
) -> Iterator[dict[str, Any]]:
    """``predict`` for every layer of the sitting, in bfloat16, with ``ratio``: SDPA's graph over its own."""
    for is_causal in (False, True):
        for length in lengths:
            setting = Setting(
                length=length, embed_dim=embed_dim, num_heads=num_heads, dtype="bfloat16", is_causal=is_causal
            )
            baseline = None
            for spec in CAUSAL_LAYERS if is_causal else LAYERS:
                if spec == "flash-linear-attention":  # needs its device
                    continue
                found = predict(spec, setting)
                baseline = found if baseline is None else baseline
                forms = ("eager", "graph", "compiled")
                faster = {f"{form}_faster": baseline["graph"] / found[form] for form in forms}
                yield setting.record() | found | faster
