"""The price of a layer: time and memory at several lengths, before and after a conversion."""

from __future__ import annotations

import inspect
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernel_attention.analysis.conversion.recording import AttentionCall

LENGTHS = (128, 512, 2048)
_ROUNDS = 3


@dataclass(frozen=True)
class LayerPrice:
    """The price of one layer for one sequence, in evaluation mode without gradients.

    Attributes:
        num_tokens: N.
        milliseconds: the median of three calls; of the processor where the layer is on one.
        peak_bytes: the most bytes that tensors made in the call held at a time. On a CPU, workspaces inside
            of an operation are not counted.
    """

    num_tokens: int
    milliseconds: float
    peak_bytes: int


@torch.no_grad()
def measure_price(
    layer: nn.Module,
    call: AttentionCall,
    projection: nn.Module | None = None,
    *,
    lengths: Sequence[int] = LENGTHS,
) -> dict[int, LayerPrice]:
    """The price of a layer at several lengths, by length.

    The recorded tokens of the call's first sequence are repeated up to the length, without a mask. A length
    that the layer cannot read (a window, a table of positions) is left out.

    Args:
        layer: a host's attention, in the host.
        call: one that it has answered.
        projection: a host's output projection outside of the layer.
        lengths: N.
    """
    found = {}
    for length in lengths:
        try:
            arguments, named = _stretched(layer, call, length)

            def run(arguments: Any = arguments, named: Any = named) -> Any:
                y = layer(*arguments, **named)
                return y if projection is None else projection(y[0] if isinstance(y, tuple) else y)

            run()
            found[length] = LayerPrice(length, _milliseconds(run, call.output.device), _peak(run, call))
        except Exception:  # a foreign layer's own words about a length that it cannot read
            continue
    return found


def _stretched(layer: nn.Module, call: AttentionCall, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the tokens of one sequence repeated, and without masks."""
    bound = inspect.signature(layer.forward).bind(*call.arguments, **call.named)
    batch, tokens = (1, 0) if getattr(layer, "batch_first", True) is False else (0, 1)
    count, cases = call.output.size(tokens), call.output.size(batch)
    places = torch.arange(length) % count

    def stretch(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        if value.size(tokens) == count and value.size(batch) in (1, cases):
            one = value.narrow(batch, 0, 1)
            return one.index_select(tokens, places.to(value.device)).contiguous()
        return value

    def kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: kept(value)
            if isinstance(value, dict)
            else None
            if "mask" in name and isinstance(value, Tensor)
            else tree_map(stretch, value)
            for name, value in arguments.items()
        }

    made: dict[str, Any] = {}
    # The same tensor stays the same one: nn.MultiheadAttention tells self-attention by identity.
    seen: dict[int, Any] = {}
    for name, value in kept(bound.arguments).items():
        original = bound.arguments[name]
        made[name] = seen.setdefault(id(original), value) if isinstance(original, Tensor) else value
    bound.arguments.update(made)
    return bound.args, bound.kwargs


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    is_cuda = device.type == "cuda"
    clock = time.perf_counter if is_cuda else time.process_time
    times = []
    for _ in range(_ROUNDS):
        begin = clock()
        run()
        if is_cuda:
            torch.cuda.synchronize(device)
        times.append(1e3 * (clock() - begin))
    return statistics.median(times)


def _peak(run: Callable[[], Any], call: AttentionCall) -> int:
    device = call.output.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with _Made() as made:
        run()
    return made.peak


class _Made(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        """Call the operation, and count what it has made."""
        out = function(*arguments, **(named or {}))
        given = {
            x.untyped_storage().data_ptr() for x in tree_leaves((arguments, named)) if isinstance(x, Tensor)
        }
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            place = storage.data_ptr()
            if place in given or place in self.live or not storage.nbytes():
                continue
            self.live[place] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, place, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out
