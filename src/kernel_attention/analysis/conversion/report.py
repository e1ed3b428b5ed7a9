"""The findings of a conversion, as data and as text: errors, and time and memory at several lengths."""

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
from kernel_attention.hosts.replace import ReplacementReport

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
    """The price of a layer, a host's in its host, at several lengths N, by length.

    The tokens of the first sequence of a recorded call are repeated up to the length, without a mask. A
    length that the layer cannot read (a window, a table of positions) is left out. ``projection`` is a host's
    output projection outside of the layer.
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


@dataclass(frozen=True)
class ConvertedLayer:
    """The conversion of one layer.

    Errors are the share of the variance of the old layer's outputs that the new layer misses, on batches that
    are not trained on: 0 = the same outputs, 1 = as good as the best constant.

    Attributes:
        path: dotted name of the module.
        old: class of the module that was replaced.
        attention: name of the new mechanism.
        options: its options, including those taken from the host.
        carried_error: with the weights that ``replace_attention`` carries over.
        start_error: at the start of the training.
        error: after attention transfer.
        steps: of the transfer.
        seconds: of start and transfer.
        is_converted: False where ``layers="auto"`` left the old layer.
        cost: the model's ``error`` with this layer alone converted; known with "auto".
    """

    path: str
    old: str
    attention: str
    options: Mapping[str, Any]
    carried_error: float
    start_error: float
    error: float
    steps: int
    seconds: float
    is_converted: bool = True
    cost: float | None = None


@dataclass(frozen=True)
class LayerPrices:
    """The price of a kind of layer before and after, measured on the first layer of the kind.

    Attributes:
        path: of that layer.
        attention: name of the new mechanism.
        before: the price of the old layer by number of tokens; lengths that it cannot read are absent.
        after: of the new layer.
    """

    path: str
    attention: str
    before: Mapping[int, LayerPrice]
    after: Mapping[int, LayerPrice]

    @property
    def pays_from(self) -> int | None:
        """The least measured number of tokens from which on the new layer is faster; None: nowhere."""
        found = None
        for length in sorted(self.before.keys() & self.after.keys(), reverse=True):
            if self.after[length].milliseconds >= self.before[length].milliseconds:
                break
            found = length
        return found

    def __str__(self) -> str:
        lines = []
        for length in sorted(self.before.keys() | self.after.keys()):
            sides = [side.get(length) for side in (self.before, self.after)]
            times = " -> ".join("-" if x is None else f"{x.milliseconds:.2f}" for x in sides)
            sizes = " -> ".join("-" if x is None else f"{x.peak_bytes / 2**20:.1f}" for x in sides)
            lines.append(f"{length:6} tokens: {times} ms, {sizes} MiB")
        pays = "is slower at every length measured"
        if self.pays_from is not None:
            pays = f"is faster from {self.pays_from} tokens on"
        return "\n".join([f"one sequence in {self.path}, {self.attention} {pays}", *lines])


@dataclass(frozen=True)
class ConversionReport:
    """The conversion of a model; ``str`` gives a table.

    Attributes:
        layers: first to last.
        replaced: the report of ``replace_attention``.
        carried_error: share of the variance of the model's own outputs that the converted model missed
            before any training, on batches that are not trained on.
        error: the same after the conversion.
        cosine: mean cosine similarity of the outputs of both models, token by token.
        num_batches: of the data that were read; the last eighth of them is held out.
        recorded_bytes: of the recordings.
        end_to_end_steps: made on the whole model.
        seconds: of everything.
        finished: False where ``time_limit`` ended a training before its last step.
        neighbours: the share of the nearest neighbours among the held-out sequences, by the cosine of their
            mean outputs, that are nearest in the old model too: of 10, or of half of the others where they
            are few. None for less than three sequences.
        prices: time and memory of one layer of every kind.
    """

    layers: tuple[ConvertedLayer, ...]
    replaced: ReplacementReport
    carried_error: float
    error: float
    cosine: float
    num_batches: int
    recorded_bytes: int
    end_to_end_steps: int
    seconds: float
    finished: bool
    neighbours: float | None = None
    prices: tuple[LayerPrices, ...] = ()

    def __str__(self) -> str:
        width = max(len(layer.path) for layer in self.layers)
        is_auto = any(layer.cost is not None for layer in self.layers)
        head = f"{'layer':{width}}  {'attention':16} carried   start   after  steps  seconds"
        lines = [head + ("   cost" if is_auto else "")]
        for layer in self.layers:
            errors = (layer.carried_error, layer.start_error, layer.error)
            numbers = " ".join(f"{_short(error):>7}" for error in errors)
            lines.append(
                f"{layer.path:{width}}  {layer.attention:16} {numbers}  {layer.steps:5}  {layer.seconds:7.1f}"
                + (f"{'':2}{_short(layer.cost):>5}" if layer.cost is not None else "")
                + ("" if layer.is_converted else "  left as it was")
            )
        lines.append(
            f"the model's own output: error {_short(self.carried_error)} before any training, "
            f"{_short(self.error)} after it; cosine {self.cosine:.3f} to the old model's"
            + ("" if self.neighbours is None else f", {self.neighbours:.2f} of the nearest neighbours kept")
        )
        lines += [str(prices) for prices in self.prices]
        lines.append(
            f"{self.num_batches} batches, {self.recorded_bytes / 2**20:.0f} MiB recorded, "
            f"{self.seconds:.0f} s" + ("" if self.finished else "; time_limit ended the training early")
        )
        return "\n".join(lines)


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"
