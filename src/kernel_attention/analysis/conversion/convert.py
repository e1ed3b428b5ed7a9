"""Conversion of a trained model to other attention, in place.

Source: the two stages of LoLCATs (Zhang et al. 2024, arXiv 2410.10254): each new layer learns the old one's
outputs on the old one's inputs ("attention transfer"), then optionally the whole model its own old outputs.
"""

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.analysis.conversion.recording import (
    AttentionCall,
    Checkpoint,
    Recording,
    digest,
    projection_beside,
    record,
)
from kernel_attention.analysis.conversion.report import (
    LENGTHS,
    ConversionReport,
    ConvertedLayer,
    LayerPrice,
    LayerPrices,
    measure_price,
)
from kernel_attention.analysis.conversion.transfer import (
    Descent,
    choose_greedily,
    converted_meanwhile,
    evaluating,
    measure_agreement,
    relative_error,
    start_layer,
    train_whole,
    transfer_attention,
)
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError, require_positive, unknown
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.replace import (
    PlannedLayer,
    ReplacementReport,
    install_layers,
    plan_replacement,
)
from kernel_attention.hosts.sites import LayerKey, find_sites
from kernel_attention.mechanisms import AttentionSpec

ConversionStart = Literal["carried", "fitted", "random"]
_STARTS = ("carried", "fitted", "random")
_HELD_OUT = 8  # one batch in so many


class ConversionProgress(NamedTuple):
    """A stage of a conversion that has ended: "record", a layer's dotted name, "choice", "end_to_end"."""

    stage: str
    done: int
    total: int
    seconds: float


def convert_attention(
    model: nn.Module,
    layers: Mapping[LayerKey, AttentionSpec] | Literal["auto"],
    data: Iterable[Any],
    *,
    tolerance: float = 0.05,
    start: ConversionStart = "carried",
    steps: int = 200,
    learning_rate: float = 4e-3,
    end_to_end: int = 0,
    end_to_end_rate: float = 3e-4,
    time_limit: float | None = None,
    max_bytes: int = 2**30,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
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
        layers: {which: mechanism}, see there. ``{"auto": mechanism}`` trains all self-attention layers in a
            copy of the model and converts those that cost least, one after another, by the measured loss of
            the whole model. "auto" alone takes ``linear`` with the features of hedgehog.
        data: batches that the model takes: tensors, mappings of named arguments (the output of a tokenizer),
            or sequences of arguments. The last eighth is held out for the errors of the report.
        tolerance: of "auto": the highest ``error`` of the model before the training of all layers together.
        start: of the training. "carried": the weights that ``replace_attention`` carries over. "fitted": a
            closed form on top of them, the ridge regression of ``out_proj``, and for ``primal_values`` the
            truncated SVD of the old attention between the spans of its features; meant for ``steps=0``.
            "random": a new layer's weights.
        steps: of the training of each layer, one batch each.
        learning_rate: of it; the highest of a schedule that ends at zero.
        end_to_end: steps of the training of all new layers together.
        end_to_end_rate: its learning rate.
        time_limit: seconds after which no step begins; each layer gets an equal share of what is left.
        max_bytes: of the recordings, 2 d numbers a token and layer, and the model's own outputs. The reading
            ends with the batch that exceeds it.
        seed: of new weights and of the order of batches. The global generator stays as it was.
        checkpoint: a file that keeps every layer when it is trained. A conversion that was interrupted and
            is called again, with the same arguments and data, takes them from there. The training of all
            layers together begins anew.
        lengths: numbers of tokens at which time and memory are measured; () for none.
        on_progress: called after every stage.
        options: options of every new layer, as in ``replace_attention``.

    Returns:
        The errors of every layer and of the model before and after; ``print`` shows a table.

    Raises:
        InputError: as ``replace_attention``; for data without batches or that the model cannot read; for a
            layer that is converted already; for a checkpoint of another conversion. The model is unchanged
            then.
    """
    begin = time.monotonic()
    _check(start, time_limit, steps=steps, end_to_end=end_to_end)
    require_positive(max_bytes=max_bytes)
    if not tolerance >= 0:
        raise InputError(f"tolerance={tolerance!r} must be a number of at least 0")
    deadline = math.inf if time_limit is None else begin + time_limit
    batches = _batches(data)
    is_auto = layers == "auto" or (isinstance(layers, Mapping) and "auto" in layers)
    spec: Any = _candidates(layers) if is_auto else layers

    def tell(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(ConversionProgress(stage, done, total, time.monotonic() - begin))

    with evaluating(model):
        # With "auto" the old layers serve the measurements, and the new ones are trained in a copy.
        trained = copy.deepcopy(model) if is_auto else model
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            plans = plan_replacement(trained, spec, options)
        for plan in plans:
            _require_unconverted(plan)
        recording = record(trained, [plan.site for plan in plans], batches, max_bytes)
        tell("record", 1, 1)
        count = len(recording.batches)
        held_out = range(count - max(1, count // _HELD_OUT) if count > 1 else 0, count)
        kept = Checkpoint(
            checkpoint,
            {
                "layers": [[plan.site.path, plan.name, dict(plan.options)] for plan in plans],
                "start": start, "steps": steps, "learning_rate": learning_rate, "seed": seed,
                "data": digest(recording.batches),
            },
        )  # fmt: skip
        kinds = _kinds(plans)
        old_prices = [_price(plan, plan.site.module, recording, lengths) for plan in kinds]
        replaced = install_layers(trained, plans)
        for plan in plans:
            plan.layer.eval()
        carried_error = measure_agreement(trained, recording, held_out).error
        descent = Descent(steps, learning_rate, deadline, seed)
        converted = []
        for layer in _trained_layers(
            trained, plans, replaced, recording, held_out, start, descent, kept, also=int(end_to_end > 0)
        ):
            converted.append(layer)
            tell(layer.path, len(converted), len(plans))
        new_prices = [
            _price(plan, trained.get_submodule(plan.site.path), recording, lengths) for plan in kinds
        ]
        if is_auto:
            converted = _choose(model, trained, converted, recording, held_out, tolerance, deadline)
            tell("choice", 1, 1)
            chosen = {layer.path: spec["all"] for layer in converted if layer.is_converted}
            plans, replaced = _install_trained(model, trained, chosen, options)
        whole = 0
        if end_to_end and plans:
            weights = [w for plan in plans for w in model.get_submodule(plan.site.path).parameters()]
            trained_on = range(held_out.start) or held_out
            descent = Descent(end_to_end, end_to_end_rate, deadline, seed)
            whole = train_whole(model, weights, recording, trained_on, descent)
            tell("end_to_end", 1, 1)
        last = measure_agreement(model, recording, held_out)
    prices = zip(kinds, old_prices, new_prices, strict=True)
    return ConversionReport(
        layers=tuple(converted), replaced=replaced, carried_error=carried_error, error=last.error,
        cosine=last.cosine, num_batches=count, recorded_bytes=recording.num_bytes, end_to_end_steps=whole,
        seconds=time.monotonic() - begin,
        finished=whole == (end_to_end if plans else 0) and all(layer.steps == steps for layer in converted),
        neighbours=last.neighbours,
        prices=tuple(LayerPrices(plan.site.path, plan.name, old, new) for plan, old, new in prices),
    )  # fmt: skip


def _price(
    plan: PlannedLayer, layer: nn.Module, recording: Recording, lengths: Sequence[int]
) -> dict[int, LayerPrice]:
    """Time and memory of a layer, old or new, on the last call that was recorded at its place."""
    beside = projection_beside(plan.site) if layer is plan.site.module else None
    return measure_price(layer, recording.calls[plan.site.path][-1], beside, lengths=lengths)


def _trained_layers(
    trained: nn.Module,
    plans: Sequence[PlannedLayer],
    replaced: ReplacementReport,
    recording: Recording,
    held_out: range,
    start: str,
    descent: Descent,
    kept: Checkpoint,
    also: int,
) -> Iterator[ConvertedLayer]:
    """Train the new layers of the model ``trained`` one after another, or take them from the checkpoint
    ``kept``.

    Each gets an equal share of the time that is left; ``also`` further shares wait for theirs.
    """
    for index, (plan, record_of_it) in enumerate(zip(plans, replaced, strict=True)):
        began = time.monotonic()
        path, layer = plan.site.path, trained.get_submodule(plan.site.path)
        fitted, tested = _split(recording.calls[path], len(recording.batches), held_out)
        found = kept.layers.get(path, {})
        if found.get("steps", -1) >= descent.steps:
            layer.load_state_dict(found["weights"])
        else:
            share = (descent.deadline - began) / (len(plans) - index + also)
            found = _train_layer(plan, layer, fitted, tested, start, replace(descent, deadline=began + share))
            found["seconds"] = time.monotonic() - began
            kept.keep(path, layer, **found)
        numbers = {key: value for key, value in found.items() if key != "weights"}
        yield ConvertedLayer(path, record_of_it.old, plan.name, record_of_it.options, **numbers)


def _choose(
    model: nn.Module,
    trained: nn.Module,
    layers: Sequence[ConvertedLayer],
    recording: Recording,
    held_out: range,
    tolerance: float,
    deadline: float,
) -> list[ConvertedLayer]:
    """The layers with their costs, marked as converted where the greedy choice takes them."""
    old = [site for site in find_sites(model) if site.path in recording.calls]
    new = [trained.get_submodule(site.path) for site in old]

    def loss(chosen: Sequence[int]) -> float:
        with converted_meanwhile([old[i] for i in chosen], [new[i] for i in chosen]):
            return measure_agreement(model, recording, held_out).error

    chosen, costs = choose_greedily(len(old), loss, tolerance, lambda: time.monotonic() >= deadline)
    return [
        replace(layer, is_converted=index in chosen, cost=cost)
        for index, (layer, cost) in enumerate(zip(layers, costs, strict=True))
    ]


def _candidates(layers: object) -> dict[LayerKey, AttentionSpec]:
    """The layers that "auto" chooses among, with their mechanism."""
    if layers == "auto":
        return {"all": {"linear": {"feature_map": "hedgehog"}}}
    assert isinstance(layers, Mapping)
    if len(layers) > 1:
        raise InputError(
            f"layers: 'auto' chooses among all layers, and stands without {len(layers) - 1} more"
        )
    return {"all": layers["auto"]}


def _kinds(plans: Sequence[PlannedLayer]) -> list[PlannedLayer]:
    """The first layer of every mechanism and class of hosts."""
    found: dict[Any, PlannedLayer] = {}
    for plan in plans:
        found.setdefault((plan.name, str(dict(plan.options)), type(plan.site.module)), plan)
    return list(found.values())


def _train_layer(
    plan: PlannedLayer,
    layer: nn.Module,
    fitted: Sequence[AttentionCall],
    tested: Sequence[AttentionCall],
    start: str,
    descent: Descent,
) -> dict[str, Any]:
    """Start and train a layer; the fields of a ``ConvertedLayer``."""
    raw = relative_error(layer, tested)
    start_layer(start, plan, layer, fitted, descent.seed)
    first = raw if start == "carried" else relative_error(layer, tested)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    done, error = transfer_attention(layer, fitted, descent), relative_error(layer, tested)
    if not error <= first:  # nothing to learn, or a diverged descent
        layer.load_state_dict(before)
        error = first
    return {"carried_error": raw, "start_error": first, "error": error, "steps": done}


def _install_trained(
    model: nn.Module, trained: nn.Module, layers: Mapping[str, AttentionSpec], options: Mapping[str, Any]
) -> tuple[list[PlannedLayer], ReplacementReport]:
    """Replace layers of a model by those that are trained in its copy."""
    if not layers:
        return [], ReplacementReport()
    with torch.random.fork_rng():
        plans = plan_replacement(model, dict(layers.items()), options)
    report = install_layers(model, plans)
    for path in layers:
        model.get_submodule(path).load_state_dict(trained.get_submodule(path).state_dict())
        model.get_submodule(path).eval()
    return plans, report


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
