"""The calls of the old attention layers and their outputs, and a file of the new layers that are trained."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kernel_attention.analysis.capture import call_model
from kernel_attention.errors import InputError, writing
from kernel_attention.hosts.known import CACHES, TransformersAttention
from kernel_attention.hosts.masks import kept, padding_of_tokens, read_attention_mask
from kernel_attention.hosts.projections import output_owner
from kernel_attention.hosts.sites import Site


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention layer, by its positional and named arguments.

    ``output`` is the old layer's in its own layout, its output projection included, and ``real`` (bool,
    without the features) says which tokens are real.
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
        tokens_first: whether the layers take (N, B, d).
    """

    batches: list[Any] = field(default_factory=list)
    calls: dict[str, list[AttentionCall]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0
    tokens_first: bool = False

    def real_outputs(self, index: int) -> Tensor | None:
        """Real tokens among the model's outputs of a batch, where the output has the layers' tokens."""
        times = [len(calls) // len(self.batches) for calls in self.calls.values()]
        real = next(iter(self.calls.values()))[index * times[0]].real
        shape = self.outputs[index].shape[:-1]
        return real if real.shape == shape else real.mT if real.mT.shape == shape else None

    def sequences(self, index: int) -> Callable[[Tensor], Tensor] | None:
        """A function from the model's output for a batch to one vector a sequence, the mean of real tokens.

        None where the output has neither the layers' tokens nor a row for every sequence.
        """
        output, real = self.outputs[index], self.real_outputs(index)
        if output.dim() == 2:
            return lambda y: y
        if real is None or output.dim() != 3:
            return None
        weight = real[..., None].to(output.dtype)
        first = next(iter(self.calls.values()))[0].real
        is_turned = first.shape != output.shape[:-1] and first.mT.shape == output.shape[:-1]
        tokens = 0 if self.tokens_first != is_turned else 1
        return lambda y: (y * weight).sum(tokens) / weight.sum(tokens).clamp_min(1)


def run(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch.

    Raises:
        InputError: for a batch of another type than a tensor, a mapping or a sequence of arguments, and for
            one that the model cannot read.
    """
    _require_known_tokens(model, batch)
    try:
        return call_model(model, batch, "data: a batch")
    except InputError:
        raise
    except Exception as error:  # a foreign model's own words
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"data: {type(model).__name__} cannot read a batch ({reason})") from None


def _require_known_tokens(model: nn.Module, batch: Any) -> None:
    """Refuse numbers of tokens outside of the vocabulary, which a GPU would answer with its own death."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    embeddings = getattr(model, "get_input_embeddings", None)
    if not isinstance(ids, Tensor) or ids.is_floating_point() or not ids.numel() or embeddings is None:
        return
    try:
        table = embeddings()
    except NotImplementedError:  # a model without one
        return
    size, low, high = getattr(table, "num_embeddings", None), int(ids.min()), int(ids.max())
    if size is not None and (low < 0 or high >= size):
        raise InputError(
            f"data: token {low if low < 0 else high} is none of the {size} in the vocabulary of "
            f"{type(model).__name__}; was another model's tokenizer used?"
        )


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
    found = Recording(
        calls={site.path: [] for site in sites},
        tokens_first=any(getattr(site.module, "batch_first", True) is False for site in sites),
    )
    with _listening(sites, found):
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
def _listening(sites: list[Site], found: Recording) -> Iterator[None]:
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


def projection_beside(site: Site) -> nn.Module | None:
    """A host's output projection that is outside of the layer, as BERT's; it moves into the new layer."""
    if site.host_class is not TransformersAttention:
        return None
    owner = output_owner(site.module, site.owners[-1])
    return None if owner is None or owner[0] is site.module else getattr(owner[0], owner[1])


class _Listener:
    """A hook that keeps the calls of one layer."""

    def __init__(self, site: Site, calls: list[AttentionCall]) -> None:
        self.calls = calls
        self.projection = projection_beside(site)

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


class Checkpoint:
    """The trained layers of a conversion, by their dotted names.

    Args:
        path: the file; None: nothing is kept.
        settings: of the conversion. A file of other settings is refused.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]) -> None:
        self.path = None if path is None else Path(path)
        self.settings = json.loads(json.dumps(settings, default=str))
        self.layers: dict[str, Any] = {}
        if self.path is not None and self.path.exists():
            self.layers = self._read(self.path)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            settings, layers = content["settings"], content["layers"]
        except Exception as error:  # the unpickler's own of many kinds
            reason = str(error).partition("\n")[0]
            raise InputError(f"checkpoint {path}: not a file of a conversion ({reason})") from None
        names = self.settings.keys() | settings.keys()
        other = sorted(name for name in names if self.settings.get(name) != settings.get(name))
        if other:
            raise InputError(
                f"checkpoint {path}: is of a conversion with other {', '.join(other)}; remove it or go on "
                "with the same"
            )
        return dict(layers)

    def keep(self, path: str, layer: nn.Module, **found: Any) -> None:
        """Add a trained layer and what was found about it, and write the file."""
        if self.path is None:
            return
        weights = {name: value.detach().cpu().clone() for name, value in layer.state_dict().items()}
        self.layers[path] = {"weights": weights, **found}
        with writing(f"checkpoint {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(f"{self.path.name}.part")
            torch.save({"settings": self.settings, "layers": self.layers}, part)
            part.replace(self.path)


def digest(batches: Sequence[Any]) -> str:
    """A short digest of the tensors of batches."""
    found = hashlib.sha256()
    for batch in batches:
        parts = dict(batch) if isinstance(batch, Mapping) else batch
        for value in tree_leaves(parts):
            if isinstance(value, Tensor):
                found.update(repr((value.dtype, tuple(value.shape))).encode())
                found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
