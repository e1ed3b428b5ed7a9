"""Everything that is timed on a GPU in one sitting, the most important first, kept piece by piece.

    python -m kernel_attention_lab.benchmarking.sitting --seconds 400

A piece is a training step of one contender in one setting and one form: called as it is, compiled
(``mode="reduce-overhead"``) or captured in a CUDA graph; SDPA by its flash and its cuDNN kernels. Its row is
written at once. A sitting that is interrupted, or whose time is up, goes on where it ended, and tries
again what failed. The record of another revision, device or torch is moved aside.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel_attention_lab.benchmarking import machine, timing
from kernel_attention_lab.benchmarking.contenders import Contender, find_contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.operations import count_operations
from kernel_attention_lab.benchmarking.plans import ContenderSpec, Setting

RECORD = Path("results/benchmarks/gpu-sitting.json")
LAYERS: tuple[ContenderSpec, ...] = (
    "sdpa", {"primal": {"rank": 30, "eta": 0.1}}, {"primal": {"rank": 30}}, "linear",
    {"primal_values": {"eta": 0.1}}, "primal_values", {"multilinear": {"eta": 0.1}}, "multilinear", "cosine",
    "ridge", "rpc", "batch_norm_scaled_heads",
)  # fmt: skip
CAUSAL_LAYERS: tuple[ContenderSpec, ...] = (
    "sdpa", "flash-linear-attention", "linear", {"primal": {"rank": 30, "eta": 0.1}},
    {"primal": {"rank": 30, "data_dependent": False}}, {"primal_values": {"eta": 0.1}},
    {"multilinear": {"eta": 0.1}}, "ridge", "delta", "rpc", "batch_norm_scaled_heads",
)  # fmt: skip
MODELS: tuple[ContenderSpec, ...] = ("softmax", *LAYERS[1:5])
FORMS = ("eager", "graph", "flash", "cudnn", "compiled")
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_SECONDS, _FEWEST, _MOST = 0.3, 3, 50  # of the timed steps of a piece


class Timed(NamedTuple):
    """One row of the record."""

    contender: ContenderSpec
    setting: Setting
    form: str


def pieces(
    device: str = "cuda",
    dtype: str = "bfloat16",
    widths: Sequence[int] = (512, 1024, 256),
    lengths: Sequence[int] = (4096, 16384, 1024, 65536),
    model_length: int = 4096,
) -> Iterator[Timed]:
    """All pieces, those first that the claims rest on; the rest of what has to be compiled last."""

    def of(contenders: Sequence[ContenderSpec], forms: Sequence[str], **sizes: Any) -> Iterator[Timed]:
        setting = Setting(num_heads=8, batch_size=4, device=device, dtype=dtype, **sizes)
        for contender in contenders:
            for form in forms:
                if contender == "sdpa" or form not in _BACKENDS:
                    yield Timed(contender, setting, form)

    quick, first = FORMS[:4], widths[0]
    shapes = [(width, length) for width in widths for length in lengths]
    early = [shape for shape in shapes if shape[0] == first]
    for width, length in early:
        yield from of(LAYERS, quick, embed_dim=width, length=length)
        yield from of(LAYERS[:4], ["compiled"], embed_dim=width, length=length)
    for width, length in early:
        yield from of(CAUSAL_LAYERS, quick, embed_dim=width, length=length, is_causal=True)
    for body in ("vit", "tokens"):
        yield from of(
            MODELS[:3], ["eager", "graph", "compiled"], embed_dim=first, length=model_length, body=body
        )
    for width, length in shapes[len(early) :]:
        yield from of(LAYERS, quick, embed_dim=width, length=length)
        yield from of(CAUSAL_LAYERS, quick, embed_dim=width, length=length, is_causal=True)
    for body in ("vit", "tokens"):
        yield from of(
            MODELS[3:], ["eager", "graph", "compiled"], embed_dim=first, length=model_length, body=body
        )
    for width, length in shapes:
        rest = LAYERS[4:] if width == first else LAYERS
        yield from of(rest, ["compiled"], embed_dim=width, length=length)
        yield from of(CAUSAL_LAYERS, ["compiled"], embed_dim=width, length=length, is_causal=True)


def sit(
    plan: Sequence[Timed],
    seconds: float,
    path: Path,
    on_progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure until the time is up, and write ``path`` after every piece.

    Returns:
        The record: ``machine``, ``rows`` and ``left``, the number of pieces without a row. A row has the
        piece, and ``seconds`` (median and quartiles), ``operations`` and ``share`` of the roofline, or
        ``failed``.
    """
    start = time.monotonic()
    described = machine.describe_machine({piece.setting.device for piece in plan})
    record: dict[str, Any] = {"machine": described, "rows": [], "left": len(plan)}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        same = ("revision", "gpu", "torch")
        if all(before["machine"].get(key) == described.get(key) for key in same):
            record["rows"] = [row for row in before["rows"] if "failed" not in row]
        else:
            path.replace(
                path.with_name(f"{path.stem}-{before['machine'].get('revision', 'before')}{path.suffix}")
            )
    ceilings: dict[Setting, dict[str, float]] = {}
    done = {_key(row) for row in record["rows"]}
    for chosen in plan:
        row = _row(chosen)
        if _key(row) in done:
            continue
        if time.monotonic() - start > seconds:
            break
        on_progress(", ".join(f"{value}" for value in row.values()))
        try:
            row |= _measured(chosen, ceilings)
        except Exception as error:  # of a compiler or a kernel that this device has not
            row["failed"] = timing.reason(error)
            if chosen.setting.device == "cuda":
                torch.cuda.synchronize()  # a broken device ends the sitting here
                torch.cuda.empty_cache()
        done.add(_key(row))
        record["rows"].append(row)
        record["left"] = sum(_key(_row(each)) not in done for each in plan)
        machine.write_rows(path, record["rows"], chosen.setting.device, left=record["left"])
    return record


def _row(piece: Timed) -> dict[str, Any]:
    name = find_contender(piece.contender).name
    return {"contender": name, "form": piece.form, "setting": piece.setting.record()}


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps([row["contender"], row["form"], row["setting"]], sort_keys=True)


def _measured(piece: Timed, ceilings: dict[Setting, dict[str, float]]) -> dict[str, Any]:
    contender, setting = find_contender(piece.contender), piece.setting
    if why := contender.absence(setting):
        return {"failed": why}
    backend = _BACKENDS.get(piece.form)
    with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
        layer, x, cotangent = timing.layer_and_data(contender.make, setting)
        taken = _times(_step(layer.train(), x, cotangent, piece.form), setting.device)
    lower, median, upper = statistics.quantiles(taken, n=4)
    measured = {"seconds": {"lower": lower, "median": median, "upper": upper}}
    return measured | _share(contender, setting, median, ceilings)


def _step(layer: nn.Module, x: Tensor, cotangent: Tensor, form: str) -> Callable[[], object]:
    """A training step: gradients of the input and of every parameter, the objective's with them."""
    leaves = [each for each in (x, *layer.parameters()) if each.requires_grad]

    def forward(x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = layer(x)
        return y, penalty(layer)

    called: Callable[[Tensor], tuple[Tensor, Tensor | None]] = forward
    if form == "compiled":
        torch.compiler.reset()  # else a layer of the same class at another length may be left uncompiled
        is_gpu = x.device.type == "cuda"
        how: dict[str, Any] = {"mode": "reduce-overhead"} if is_gpu else {"backend": "aot_eager"}
        called = torch.compile(forward, fullgraph=True, **how)

    def step() -> object:
        if form == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        y, own = called(x)
        outputs, slopes = [y], [cotangent]
        if own is not None and own.requires_grad:
            outputs, slopes = [y, own], [cotangent, torch.ones_like(own)]
        return torch.autograd.grad(outputs, leaves, slopes, allow_unused=True)

    return _captured(step) if form == "graph" else step


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def _times(step: Callable[[], object], device: str) -> list[float]:
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    taken: list[float] = []
    for _ in range(3):
        step()
    wait()
    while len(taken) < _FEWEST or (sum(taken) < _SECONDS and len(taken) < _MOST):
        start = time.perf_counter()
        step()
        wait()
        taken.append(time.perf_counter() - start)
    return taken


def _share(
    contender: Contender, setting: Setting, seconds: float, ceilings: dict[Setting, dict[str, float]]
) -> dict[str, Any]:
    """Operations and bytes of the step, and the time that the ceilings allow over that it took.

    Operations are those of the matrix products. Bytes are the least: input and output, and their gradients.
    """
    counted = _counted(contender.name, setting)
    operations = counted.get("step")
    if not isinstance(operations, int):
        return counted
    of = Setting(embed_dim=setting.embed_dim, device=setting.device, dtype=setting.dtype)
    if of not in ceilings:
        ceilings[of] = machine.measure_ceilings(of)
    moved = 4 * setting.tokens * setting.embed_dim * setting.torch_dtype.itemsize
    allowed = max(operations / ceilings[of]["large_product"], moved / ceilings[of]["copy"])
    return {
        "operations": operations, "bytes": moved, "share": allowed / seconds, "ceilings": ceilings[of]
    }  # fmt: skip


_SPECS: dict[str, ContenderSpec] = {
    find_contender(spec).name: spec for spec in (*LAYERS, *CAUSAL_LAYERS, *MODELS)
}


@functools.cache
def _counted(name: str, setting: Setting) -> dict[str, object]:
    """The forms of a contender do the same work."""
    return count_operations(find_contender(_SPECS[name]), setting, ["step"])


def run_sitting(arguments: Sequence[str] | None = None) -> int:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seconds", type=float, default=400.0, help="no piece begins later")
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 1024, 65536])
    parser.add_argument("--model-length", type=int, default=4096)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --device cpu with small --widths and --lengths tries the program")
    plan = list(pieces(options.device, options.dtype, options.widths, options.lengths, options.model_length))
    record = sit(plan, options.seconds, options.record, lambda line: print(line, flush=True))
    print(f"{len(record['rows'])} rows in {options.record}, {record['left']} pieces left")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_sitting())
