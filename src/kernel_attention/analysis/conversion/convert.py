"""Conversion of a trained model to other attention, in place.

Source: the two stages of LoLCATs (Zhang et al. 2024, arXiv 2410.10254): each new layer learns the old one's
outputs on the old one's inputs ("attention transfer"), then optionally the whole model its own old outputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import (
    AttentionCall,
    Recording,
    first_tensor,
    record,
    run,
)
from kernel_attention.analysis.conversion.report import ConversionReport, ConvertedLayer
from kernel_attention.analysis.conversion.start import start_layer
from kernel_attention.analysis.conversion.transfer import (
    Descent,
    evaluating,
    relative_error,
    train_whole,
    transfer_attention,
)
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.validation import require_positive
from kernel_attention.errors import InputError, unknown
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.replace import PlannedLayer, install_layers, plan_replacement
from kernel_attention.mechanisms import AttentionSpec

ConversionStart = Literal["carried", "fitted", "random"]
_STARTS = ("carried", "fitted", "random")
_HELD_OUT = 8  # one batch in so many


class ConversionProgress(NamedTuple):
    """A stage of a conversion that has ended: "record", a layer's dotted name, or "end_to_end"."""

    stage: str
    done: int
    total: int
    seconds: float


def convert_attention(
    model: nn.Module,
    layers: Mapping[int | str, AttentionSpec],
    data: Iterable[Any],
    *,
    start: ConversionStart = "carried",
    steps: int = 200,
    learning_rate: float = 4e-3,
    end_to_end: int = 0,
    end_to_end_rate: float = 3e-4,
    time_limit: float | None = None,
    max_bytes: int = 2**30,
    seed: int = 0,
    on_progress: Callable[[ConversionProgress], None] | None = None,
    **options: Any,
) -> ConversionReport:
    """Replace attention layers of a trained model, in place, by new ones that do what the old ones did.

    The old model reads the batches once. The inputs and outputs of the chosen layers are recorded. Then the
    layers are replaced as ``replace_attention`` does, and each learns to return the recorded outputs on the
    recorded inputs (Adam). With ``end_to_end`` all new layers then learn together to make the model return
    its own old outputs. No labels are needed. Everything outside the replaced attention modules stays
    bit-equal; so do training mode and ``requires_grad``. The model is in evaluation mode meanwhile. A layer
    whose error on the held-out batches would rise keeps the weights of its start.

    Args:
        model: any that ``replace_attention`` takes.
        layers: {which: mechanism}, see there.
        data: batches that the model takes: tensors, mappings of named arguments (the output of a tokenizer),
            or sequences of arguments. The last eighth is held out for the errors of the report.
        start: of the training. "carried": the weights that ``replace_attention`` carries over. "fitted": a
            closed form on top of them, the ridge regression of ``out_proj``, and for ``primal_values`` the
            nested objective against the old attention. "random": a new layer's weights.
        steps: of the training of each layer, one batch each.
        learning_rate: of it; the highest of a schedule that ends at zero.
        end_to_end: steps of the training of all new layers together.
        end_to_end_rate: its learning rate.
        time_limit: seconds after which no step begins; each layer gets an equal share of what is left.
        max_bytes: of the recordings, 2 d numbers a token and layer, and the model's own outputs. The reading
            ends with the batch that exceeds it.
        seed: of new weights and of the order of batches. The global generator stays as it was.
        on_progress: called after every stage.
        options: options of every new layer, as in ``replace_attention``.

    Returns:
        The errors of every layer and of the model before and after; ``print`` shows a table.

    Raises:
        InputError: as ``replace_attention``; for data without batches or that the model cannot read; for a
            layer that is converted already. The model is unchanged then.
    """
    begin = time.monotonic()
    _check(start, time_limit, steps=steps, end_to_end=end_to_end)
    require_positive(max_bytes=max_bytes)
    deadline = math.inf if time_limit is None else begin + time_limit
    batches = _batches(data)

    def tell(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(ConversionProgress(stage, done, total, time.monotonic() - begin))

    with evaluating(model):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            plans = plan_replacement(model, layers, options)
        for plan in plans:
            _require_unconverted(plan)
        recording = record(model, [plan.site for plan in plans], batches, max_bytes)
        tell("record", 1, 1)
        count = len(recording.batches)
        held_out = range(count - max(1, count // _HELD_OUT) if count > 1 else 0, count)
        replaced = install_layers(model, plans)
        for plan in plans:
            plan.layer.eval()
        carried_error, _ = _agreement(model, recording, held_out)
        converted = []
        for index, (plan, record_of_it) in enumerate(zip(plans, replaced, strict=True)):
            began = time.monotonic()
            layer = model.get_submodule(plan.site.path)
            fitted, tested = _split(recording.calls[plan.site.path], count, held_out)
            raw = relative_error(layer, tested)
            start_layer(start, plan, layer, fitted, seed)
            first = raw if start == "carried" else relative_error(layer, tested)
            share = (deadline - began) / (len(plans) - index + (1 if end_to_end else 0))
            descent = Descent(steps, learning_rate, began + share, seed)
            before = {name: value.clone() for name, value in layer.state_dict().items()}
            done, error = transfer_attention(layer, fitted, descent), relative_error(layer, tested)
            if not error <= first:  # nothing to learn, or a diverged descent
                layer.load_state_dict(before)
                error = first
            converted.append(
                ConvertedLayer(
                    plan.site.path, record_of_it.old, plan.name, record_of_it.options,
                    raw, first, error, done, time.monotonic() - began,
                )
            )  # fmt: skip
            tell(plan.site.path, index + 1, len(plans))
        whole = 0
        if end_to_end:
            weights = [w for plan in plans for w in model.get_submodule(plan.site.path).parameters()]
            descent = Descent(end_to_end, end_to_end_rate, deadline, seed)
            trained_on = range(held_out.start) or held_out
            whole = train_whole(model, weights, recording, trained_on, descent)
            tell("end_to_end", 1, 1)
        error, cosine = _agreement(model, recording, held_out)
    return ConversionReport(
        layers=tuple(converted), replaced=replaced, carried_error=carried_error, error=error, cosine=cosine,
        num_batches=count, recorded_bytes=recording.num_bytes, end_to_end_steps=whole,
        seconds=time.monotonic() - begin,
        finished=whole == end_to_end and all(layer.steps == steps for layer in converted),
    )  # fmt: skip


def _check(start: str, time_limit: float | None, **counts: int) -> None:
    if start not in _STARTS:
        raise unknown("start", start, _STARTS)
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InputError(f"{name}={value!r} must be a whole number of at least 0")
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"time_limit={time_limit!r} must be a number of seconds above 0")


def _batches(data: Iterable[Any]) -> Iterable[Any]:
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise InputError(f"data is a {type(data).__name__}, expected an iterable of batches: [batch] for one")
    return data


def _require_unconverted(plan: PlannedLayer) -> None:
    module = plan.site.module
    before = InterfaceAttention.old_of(module)
    old = module.attention if isinstance(module, HostedAttention) else before
    if isinstance(old, AttentionLayer) and old is not module and old.mechanism_name != "softmax":
        raise InputError(
            f"layers: {plan.site.path} holds {old.mechanism_name!r} already; convert the original model"
        )


def _split(
    calls: Sequence[AttentionCall], count: int, held_out: range
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """Calls to train on and calls held out; a layer may run several times a batch."""
    times = len(calls) // count
    border = held_out.start * times
    return list(calls[:border] or calls), list(calls[border:])


@torch.no_grad()
def _agreement(model: nn.Module, recording: Recording, held_out: range) -> tuple[float, float]:
    """The share of the old outputs' variance that is missed, and the mean cosine similarity."""
    pairs = []
    for index in held_out:
        y, wanted = first_tensor(run(model, recording.batches[index])), recording.outputs[index]
        real = recording.real_outputs(index)
        pairs.append((y[real], wanted[real]) if real is not None else (y, wanted))
    found, wanted = (torch.cat([p[side].flatten(0, -2) for p in pairs]).double() for side in (0, 1))
    size = (wanted - wanted.mean(dim=0)).square().sum().clamp_min(1e-300)
    cosine = nn.functional.cosine_similarity(found, wanted, dim=-1).mean()
    return float((found - wanted).square().sum() / size), float(cosine)
