"""Suites that compare forms of a layer pair by pair, or count what is decoded and played in a second.

Runs take turns in a random order, round by round, and a ratio is taken within each round. On one thread the
clock is that of the process, which does not count what other processes do meanwhile, though they share the
caches.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.core.decoding import state_bytes
from kernel_attention.models import DecisionTransformer, Memory, RecurrentMemory, SlidingMemory
from kernel_attention.tensors import dropout
from kernel_attention.tensors.softmax import attention as fused_softmax
from kernel_attention.training.task import OPTIMIZERS
from kernel_attention_lab.benchmarking import machine, timing
from kernel_attention_lab.benchmarking.contenders import find_contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.plans import Setting

Row = dict[str, Any]
Settings = Mapping[str, Any]
Run = Callable[[], float]
"""One run; its seconds."""

_WARMUP = 3
_WITHOUT_STATE = "softmax, whole prefix"  # it attends to all tokens again for every new one
_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "primal": ("primal", {"rank": 20}),
    "primal, objective": ("primal", {"rank": 30, "eta": 0.1}),
    "primal, data-independent": ("primal", {"rank": 20, "data_dependent": False}),
    "multilinear": ("multilinear", {}),
    "multilinear, objective": ("multilinear", {"eta": 0.1}),
    "batch_norm": ("batch_norm", {}),
    "rpc": ("rpc", {"iterations": 4}),
}


@dataclass(frozen=True)
class RowSuite:
    """A suite whose record has a row for every ratio or rate.

    Args:
        measure: gives the rows of these settings.
        settings: sizes, ``rounds`` and ``threads``; they stand in the record.
    """

    measure: Callable[[Settings], Iterator[Row]]
    settings: Settings


def run_rows(
    name: str, *, rounds: int | None = None, on_progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """The record of a suite of ``ROW_SUITES``: the machine, the settings and the rows."""
    suite = ROW_SUITES[name]
    settings = {"threads": 1, **suite.settings} | ({} if rounds is None else {"rounds": rounds})
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(settings["threads"])
    rows = []
    for row in suite.measure(settings):
        rows.append(row)
        on_progress(", ".join(str(value) for value in row.values() if isinstance(value, str | int)))
    return {"machine": machine.describe_machine({"cpu"}), "settings": settings, "rows": rows}


def take_turns(runs: Mapping[Any, Run], rounds: int) -> dict[Any, list[float]]:
    """The seconds of every run in every round, in a random order after a warm-up."""
    for run in [*runs.values()] * _WARMUP:
        run()
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(runs[name]())
    return times


def ratio_row(times: Mapping[Any, Sequence[float]], form: Any, other: Any) -> Row:
    """Medians of two runs, and median and quartiles of their ratio."""
    low, middle, high = (
        float(each) for each in np.quantile(np.divide(times[form], times[other]), [0.25, 0.5, 0.75])
    )
    seconds, theirs = (statistics.median(times[name]) for name in (form, other))
    row = {"form": form, "other": other, "seconds": seconds, "other_seconds": theirs}
    return row | {"ratio_lower": low, "ratio_median": middle, "ratio_upper": high}


def pass_of(
    layer: nn.Module, x: Tensor, *, training: bool = True, is_causal: bool = False, autocast: bool = False,
    clock: Callable[[], float] = time.process_time,
) -> Run:  # fmt: skip
    """A training step with the layer's objective, or a forward pass; under ``autocast`` in bfloat16."""
    keywords = {"is_causal": True} if is_causal else {}

    def run() -> float:
        layer.train(training)
        layer.zero_grad(set_to_none=True)
        x.grad = None
        start = clock()
        with torch.set_grad_enabled(training):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = layer(x, **keywords).square().mean()
            if training:
                (loss + ka.auxiliary_loss(layer)).backward()
        return clock() - start

    return run


# --- forms of layers ----------------------------------------------------------------------------------------


def primal_forms(settings: Settings) -> Iterator[Row]:
    """The nested objective over J^2, ``primal_values`` over primal; causal weights of both kinds."""
    sizes, rank = (settings["embed_dim"], settings["num_heads"]), settings["rank"]
    squared = {"rank": rank, "max_len": settings["length"], "eta": 0.1}
    nested, independent = {"objective_form": "nested"}, {"data_dependent": False}
    made = {
        "eta 0": ("primal", {"rank": rank, "max_len": settings["length"]}),
        "penalty": ("primal", squared),
        "nested": ("primal", squared | nested),
        "penalty, data-independent": ("primal", squared | independent),
        "nested, data-independent": ("primal", squared | independent | nested),
        "values, eta 0": ("primal_values", {"rank": rank}),
        "values, nested": ("primal_values", {"rank": rank, "eta": 0.1}),
    }
    x = torch.randn(settings["batch"], settings["length"], settings["embed_dim"])
    layers = {name: ka.create_attention(kind, *sizes, **given) for name, (kind, given) in made.items()}
    times = take_turns({name: pass_of(layer, x) for name, layer in layers.items()}, settings["rounds"])
    pairs = [("nested", "penalty"), ("nested, data-independent", "penalty, data-independent"),
             ("values, nested", "penalty"), ("values, eta 0", "eta 0")]  # fmt: skip
    for form, other in pairs:
        yield {"length": settings["length"], **ratio_row(times, form, other)}
    for length in settings["causal_lengths"]:
        x = torch.randn(1, length, settings["embed_dim"], requires_grad=True)
        runs = {}
        for name, given in {"causal": {"max_len": length}, "causal, data-independent": independent}.items():
            options = {"rank": rank, **given}
            layer = ka.create_attention("primal", sizes[0], settings["causal_heads"], **options)
            runs[name] = pass_of(layer, x, is_causal=True)
        times = take_turns(runs, settings["causal_rounds"])
        yield {"length": length, **ratio_row(times, "causal", "causal, data-independent")}


def precisions(settings: Settings) -> Iterator[Row]:
    """Steps in bfloat16, weights and input, and under autocast to it, over those in float32."""
    for name in settings["layers"]:
        for width in settings["embed_dim"]:
            runs = {}
            for precision in ("float32", "bfloat16", "autocast"):
                dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
                torch.manual_seed(0)
                kind, given = _LAYERS[name]
                layer = ka.create_attention(kind, width, settings["num_heads"], **given).to(dtype)
                x = torch.randn(settings["batch"], settings["length"], width).to(dtype).requires_grad_()
                runs[precision] = pass_of(layer, x, autocast=precision == "autocast")
            times = take_turns(runs, settings["rounds"])
            for form in ("bfloat16", "autocast"):
                yield {"layer": name, "embed_dim": width, **ratio_row(times, form, "float32")}


class _Step(nn.Module):
    """A layer's output and its term of the loss in one, so that both are compiled."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, N, d) -> (B, N, d), and the penalty in training."""
        y = self.layer(x)
        return y, penalty(self.layer) if self.training else None


def compiled_forms(settings: Settings) -> Iterator[Row]:
    """Forms of layers, eager and under ``torch.compile``, over the eager formulas."""
    ways = ("eager",) if settings["eager"] else ("eager", "compiled")
    for name in settings["layers"]:
        for width in settings["embed_dim"]:
            for length in settings["length"]:
                steps: dict[Any, Any] = {}  # modules, and compiled ones
                for form in settings["forms"]:
                    kind, given = _LAYERS[name]
                    torch.manual_seed(0)
                    layer = ka.create_attention(kind, width, settings["num_heads"], **given, impl=form)
                    for how in ways:
                        step = _Step(copy.deepcopy(layer))
                        steps[how, form] = torch.compile(step, fullgraph=True) if how == "compiled" else step
                x = torch.randn(settings["batch_size"], length, width, requires_grad=True)
                for kind in ("forward", "step"):
                    runs = {key: _median_pass(step, x, kind == "step") for key, step in steps.items()}
                    times = take_turns(runs, settings["rounds"])
                    for how, form in list(runs)[1:]:
                        row = ratio_row(times, (how, form), ("eager", "reference"))
                        ratios = {key: row[key] for key in row if key.startswith("ratio")}
                        where = {"layer": name, "embed_dim": width, "length": length, "pass": kind}
                        yield where | {"how": how, "form": form} | ratios
                torch.compiler.reset()


def _median_pass(step: Any, x: Tensor, training: bool) -> Run:
    cotangent = torch.randn_like(x)

    def once() -> float:
        step.train(training)
        step.zero_grad(set_to_none=True)
        x.grad = None
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            y, own = step(x)
            if training:
                has_own = own is not None and own.requires_grad
                torch.autograd.backward([y, own] if has_own else [y], [cotangent, None][: 1 + has_own])
        return time.perf_counter() - start

    return lambda: statistics.median(once() for _ in range(3))


# --- what is around attention -------------------------------------------------------------------------------

_DEMO = {"primal": {"rank": 20, "eta": 0.1, "rank_multiplier": 5}}
_SERIES: dict[str, Any] = {"body": "series", "num_heads": 4, "batch_size": 16}
_LANGUAGE: dict[str, Any] = {"body": "language", "embed_dim": 192, "num_heads": 4, "batch_size": 16}
_MODELS: dict[str, tuple[Any, Setting]] = {
    "series, primal, N 29 (demo)": (_DEMO, Setting(length=29, **_SERIES)),
    "series, primal, N 200": (_DEMO, Setting(length=200, **_SERIES)),
    "series, softmax, N 200": ("softmax", Setting(length=200, **_SERIES)),
    "sequences, primal, N 1024": ("primal", Setting(body="tokens", length=1024)),
    "sequences, softmax, N 1024": ("softmax", Setting(body="tokens", length=1024)),
    "texts, softmax, N 64": ("softmax", Setting(length=64, is_causal=True, **_LANGUAGE)),
}


@contextmanager
def _pytorchs_masks() -> Iterator[None]:
    """Inside the block PyTorch draws the masks, and attention with dropout is PyTorch's."""
    with (
        mock.patch.object(dropout, "draws_masks", return_value=False),
        mock.patch.object(fused_softmax, "draws_masks", return_value=False),
    ):
        yield


def around(settings: Settings) -> Iterator[Row]:
    """Steps of models with our dropout masks and PyTorch's; steps of both optimizers in both ways."""
    for name, (spec, setting) in _MODELS.items():
        layer, x, cotangent = timing.layer_and_data(find_contender(spec).make, setting)
        parameters = list(layer.train().parameters())

        def step(layer: nn.Module = layer, x: Tensor = x, cotangent: Tensor = cotangent) -> None:
            layer.zero_grad(set_to_none=True)
            timing.step(layer, x, cotangent)

        runs = {"step, ours": _timed(step), "step, PyTorch's": _timed(_pytorchs_masks()(step))}
        for key, plain in (("adamw", torch.optim.AdamW), ("radam", torch.optim.RAdam)):
            runs[f"{key}, ours"] = _timed(OPTIMIZERS[key](parameters, lr=1e-6).step)
            runs[f"{key}, PyTorch's"] = _timed(plain(parameters, lr=1e-6).step)
        times = take_turns(runs, settings["rounds"])
        ratios = ratio_row(times, "step, ours", "step, PyTorch's")
        medians = {key: statistics.median(found) for key, found in times.items()}
        yield {"model": name, **{key: ratios[key] for key in ratios if key.startswith("ratio")}, **medians}


def _timed(call: Callable[[], object]) -> Run:
    def run() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    return run


# --- decoding and roll-outs ---------------------------------------------------------------------------------


@torch.no_grad()
def decoding(settings: Settings) -> Iterator[Row]:
    """Tokens a second after contexts of several lengths, and the bytes of the state per sequence.

    Every contender reads a context and decodes the same few tokens after it, again and again from there. The
    bytes are counted right after the context: growing buffers hold up to twice as much.
    """
    width, heads, batch = (settings[key] for key in ("embed_dim", "num_heads", "batch_size"))
    further: dict[str, dict[str, dict[str, Any]]] = {
        "primal": {"primal": {}, "primal, independent": {"data_dependent": False}},
        "multilinear": {"multilinear": {}, "multilinear, data-dependent": {"variant": "data_dependent"}},
    }
    for length in settings["lengths"]:
        x = torch.randn(batch, length, width)
        tokens = torch.randn(settings["steps"], batch, width)
        runs: dict[str, Run] = {}
        held = {_WITHOUT_STATE: 0}
        for mechanism in (each for each in ka.list_attention() if each.decoding != "no"):
            shared = {"max_len": length + len(tokens)} if "max_len" in mechanism.options else {}
            for name, options in further.get(mechanism.name, {mechanism.name: {}}).items():
                layer = ka.create_attention(mechanism.name, width, heads, **shared, **options).eval()
                state = layer.prefill(x)[1]
                held[name] = state_bytes(state)
                runs[name] = _decode(layer, layer.step(tokens[0], state)[1], tokens[1:])
                if name == "softmax":
                    prefix = _timed(partial(layer, x, is_causal=True))
        times = take_turns(runs, settings["rounds"])
        times[_WITHOUT_STATE] = [prefix() for _ in range(settings["prefix_rounds"])]
        for name, found in times.items():
            rate = batch / statistics.median(found)
            yield {"attention": name, "length": length, "tokens_per_second": rate} | {
                "state_bytes": held[name] // batch
            }


def _decode(layer: Any, state: Any, tokens: Tensor) -> Run:
    def run() -> float:
        now, start = state, time.thread_time()
        for token in tokens:
            _, now = layer.step(token, now)
        return (time.thread_time() - start) / len(tokens)

    return run


_STATE, _ACTION = 17, 6  # of HalfCheetah and Walker2d
_PRIMAL = {"primal": {"rank": 64, "data_dependent": False}}
_POLICIES: dict[str, Any] = {
    "primal, recurrent": _PRIMAL,
    "primal last, recurrent": ["softmax", "softmax", _PRIMAL],
    "softmax, cached": "softmax",
    "softmax, sliding": "softmax",
    "primal last, sliding": ["softmax", "softmax", _PRIMAL],
}


def rollouts(settings: Settings) -> Iterator[Row]:
    """Steps a second of untrained decision transformers in made-up episodes, at their end.

    Recurrent ones keep a state of the whole episode, cached ones its keys and values; sliding ones read the
    last steps of a context anew, as the released code does.
    """
    episodes = settings["episodes"]
    for length in settings["lengths"]:
        begin = max(length - settings["steps"], 0)
        memories: dict[tuple[str, int | None], Memory] = {}
        for name, attention in _POLICIES.items():
            for context in settings["contexts"] if name.endswith("sliding") else (None,):
                torch.manual_seed(0)
                sizes = {"context": context or 1, "max_timestep": length + 1}
                model = DecisionTransformer(_STATE, _ACTION, attention, **sizes).eval()
                memory: Memory = RecurrentMemory(model, episodes)
                if context is not None:
                    memory = SlidingMemory(model, context)
                    memory.timestep = max(begin - context, 0)  # the last steps count, at their own time
                _play(memory, episodes, min(context or begin, begin))
                memories[name, context] = memory
        runs = {key: _played(memory, episodes, settings["steps"]) for key, memory in memories.items()}
        for (name, context), found in take_turns(runs, settings["rounds"]).items():
            rate = settings["steps"] * episodes / statistics.median(found)
            memory = memories[name, context]
            state = state_bytes(memory.state) // episodes if isinstance(memory, RecurrentMemory) else None
            yield {"contender": name, "context": context, "length": length} | {
                "steps_per_second": round(rate, 1), "state_bytes": state,
            }  # fmt: skip


def _play(memory: Memory, episodes: int, steps: int) -> None:
    for _ in range(steps):
        memory.act(torch.full((episodes,), 3600.0), torch.randn(episodes, _STATE))
        memory.observe(torch.rand(episodes, _ACTION))


def _played(memory: Memory, episodes: int, steps: int) -> Run:
    """From a copy of the memory, so that a run leaves it as it was."""
    return lambda: _timed(lambda: _play(copy.copy(memory), episodes, steps))()


_COMPILED = {"length": [256, 1024, 4096], "embed_dim": [64], "num_heads": 2, "batch_size": 4, "rounds": 9}
_PRIMAL_LAYERS = ["primal, objective", "primal", "primal, data-independent"]
_EAGER_AND_COMPILED = {"forms": ["reference", "fused"], "eager": False}
_DECODING = {"rounds": 15, "prefix_rounds": 3, "steps": 17, "batch_size": 1}
ROW_SUITES = {
    "primal-forms": RowSuite(primal_forms, {
        "batch": 8, "length": 512, "embed_dim": 64, "num_heads": 4, "rank": 20, "rounds": 60,
        "causal_lengths": [1024, 2048, 4096, 16384, 65536], "causal_heads": 2, "causal_rounds": 31,
    }),
    "precisions": RowSuite(precisions, {
        "layers": [
            "softmax", "linear", "primal", "primal, objective", "multilinear, objective", "batch_norm", "rpc",
        ],
        "batch": 4, "length": 1024, "embed_dim": [64, 256], "num_heads": 4, "rounds": 15,
    }),
    "compiled-forms": RowSuite(compiled_forms, _COMPILED | _EAGER_AND_COMPILED | {
        "layers": [*_PRIMAL_LAYERS, "multilinear", "multilinear, objective"],
    }),
    "compiled-forms-wide": RowSuite(compiled_forms, _COMPILED | _EAGER_AND_COMPILED | {
        "layers": _PRIMAL_LAYERS[:1], "embed_dim": [128, 256], "num_heads": 4, "length": [1024, 4096],
    }),
    "native-forms": RowSuite(compiled_forms, _COMPILED | {
        "layers": _PRIMAL_LAYERS[:2], "eager": True, "forms": ["reference", "fused", "native"], "threads": 2,
        "embed_dim": [64, 128, 256], "num_heads": 4, "length": [64, 256, 1024, 4096],
    }),
    "around": RowSuite(around, {"rounds": 31}),
    "decoding": RowSuite(decoding, _DECODING | {
        "embed_dim": 512, "num_heads": 8, "lengths": [512, 2048, 8192],
    }),
    "decoding-small": RowSuite(decoding, _DECODING | {
        "embed_dim": 64, "num_heads": 2, "lengths": [1024, 8192, 65536], "prefix_rounds": 1,
    }),
    "rollouts": RowSuite(rollouts, {
        "lengths": [20, 100, 300, 1000], "contexts": [5, 20, 60], "episodes": 20, "steps": 8, "rounds": 5,
    }),
}  # fmt: skip
"""Suites that leave rows; their tables are on docs/performance.md and docs/control-results.md."""
