"""The calls of a model's attention layers and their outputs, recorded while the old model reads batches."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.analysis.capture import call_model
from kernel_attention.errors import InputError
from kernel_attention.hosts.known import CACHES, TransformersAttention
from kernel_attention.hosts.masks import kept, padding_of_tokens, read_attention_mask
from kernel_attention.hosts.projections import output_owner
from kernel_attention.hosts.sites import Site


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention layer.

    Attributes:
        arguments: positional arguments of the layer's own call.
        named: the others.
        output: the old layer's output, its output projection included; the layout of the layer's own.
        real: bool, the output's shape without the features; True = real token.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    output: Tensor
    real: Tensor

    @property
    def num_tokens(self) -> int:
        """Real tokens of all sequences."""
        return int(self.real.sum())


@dataclass
class Recording:
    """Batches, the calls of the layers that they caused, and the outputs of the old model.

    Attributes:
        batches: the batches, as the model takes them.
        calls: of every layer by its dotted name, one a batch and use.
        outputs: the model's own first output for every batch.
        num_bytes: of all recorded tensors.
    """

    batches: list[Any] = field(default_factory=list)
    calls: dict[str, list[AttentionCall]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    def real_outputs(self, index: int) -> Tensor | None:
        """Real tokens among the model's outputs of a batch, where the output has the layers' tokens."""
        times = [len(calls) // len(self.batches) for calls in self.calls.values()]
        real = next(iter(self.calls.values()))[index * times[0]].real
        shape = self.outputs[index].shape[:-1]
        return real if real.shape == shape else real.mT if real.mT.shape == shape else None


def run(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch.

    Raises:
        InputError: for a batch of another type than a tensor, a mapping or a sequence of arguments, and for
            one that the model cannot read.
    """
    try:
        return call_model(model, batch, "data: a batch")
    except InputError:
        raise
    except Exception as error:  # a foreign model's own words
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"data: {type(model).__name__} cannot read a batch ({reason})") from None


def first_tensor(output: Any) -> Tensor:
    """The first tensor of numbers in a model's output."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, Mapping) else output
    found = next((part for part in parts if isinstance(part, Tensor) and part.is_floating_point()), None)
    if found is None:
        raise InputError(f"model: its output, a {type(output).__name__}, holds no tensor of numbers")
    return found


@torch.no_grad()
def record(model: nn.Module, sites: Iterable[Site], data: Iterable[Any], max_bytes: int) -> Recording:
    """Let the model read batches, and keep what its layers were given and returned.

    The memory is at most ``max_bytes`` and one batch: the reading ends with the batch that exceeds it. A
    token takes 2 d numbers a layer, and those of the model's own output.

    Raises:
        InputError: where there are no batches, or a layer did not run.
    """
    sites = list(sites)
    found = Recording(calls={site.path: [] for site in sites})
    seen: set[int] = set()
    with _listening(sites, found, seen):
        for batch in data:
            found.outputs.append(first_tensor(run(model, batch)).detach().clone())
            found.batches.append(batch)
            found.num_bytes = sum(size for size in _sizes(found))
            if found.num_bytes >= max_bytes:
                break
    if not found.batches:
        raise InputError("data holds no batch; expected batches that the model takes")
    silent = [path for path, calls in found.calls.items() if not calls]
    if silent:
        raise InputError(f"layers: {silent[0]} did not run when the model read the data")
    return found


@contextmanager
def _listening(sites: list[Site], found: Recording, seen: set[int]) -> Iterator[None]:
    handles = []
    try:
        for site in sites:
            handles.append(
                site.module.register_forward_hook(_Listener(site, found.calls[site.path]), with_kwargs=True)
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Listener:
    """A hook that keeps the calls of one layer."""

    def __init__(self, site: Site, calls: list[AttentionCall]) -> None:
        self.calls = calls
        self.projection: nn.Module | None = None
        if (
            site.host_class is TransformersAttention
        ):  # BERT's projection beside the layer moves into the new one
            owner = output_owner(site.module, site.owners[-1])
            if owner is not None and owner[0] is not site.module:
                self.projection = getattr(owner[0], owner[1])

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> None:
        y = first_tensor(output).detach()
        y = y.clone() if self.projection is None else self.projection(y)
        # A cache would grow with every later call.
        named = {name: None if name in CACHES else value for name, value in named.items()}
        self.calls.append(AttentionCall(arguments, named, y, real_tokens(module, arguments, named, y)))


def _sizes(found: Recording) -> Iterator[int]:
    storages: dict[int, int] = {}
    tensors = [*found.outputs]
    for calls in found.calls.values():
        for call in calls:
            tensors += [
                call.output,
                *(x for x in (*call.arguments, *call.named.values()) if isinstance(x, Tensor)),
            ]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    yield from storages.values()


def real_tokens(
    module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any], output: Tensor
) -> Tensor:
    """The real tokens that a host's mask leaves, in the shape of its output without the features."""
    bound = inspect.signature(module.forward).bind(*arguments, **named).arguments
    given = {**bound, **next((value for value in bound.values() if isinstance(value, dict)), {})}
    everything = torch.ones(output.shape[:-1], dtype=torch.bool, device=output.device)
    if isinstance(mask := given.get("key_padding_mask"), Tensor):
        real = kept(mask, true_is_kept=False)
        if real.shape == everything.shape:
            return real
        return real.mT if real.mT.shape == everything.shape else everything
    mask = next((given[name] for name in ("attention_mask", "attn_mask") if name in given), None)
    if not isinstance(mask, Tensor) or output.dim() != 3:
        return everything
    if mask.dim() == 2 and mask.shape == everything.shape:
        return padding_of_tokens(mask)
    if mask.dim() == 4:
        padding, _ = read_attention_mask(kept(mask, true_is_kept=True), len(output), output.size(1), False)
        return everything if padding is None else padding
    return everything
