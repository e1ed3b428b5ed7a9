"""The queries, keys and values of any model's attention layers, recorded while the model runs unchanged.

Our layers and torch's ``nn.MultiheadAttention`` are recognised by class. Of all others (timm, Hugging Face,
the user's own) the attention itself is intercepted: a call of ``scaled_dot_product_attention``, or a product,
a softmax and a product. So everything before it (fused projections, normalised queries, rotary positions,
grouped keys) has been applied.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_attention.analysis.captured import CapturedAttention, Interception, captured_own
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.errors import InputError
from kernel_attention.hosts import HostedAttention
from kernel_attention.hosts.sites import LayerKey, Site, find_sites, named_cross, select

Batch = Tensor | Sequence[Any] | Mapping[str, Any]
LayerChoice = int | str | Sequence[LayerKey]


@torch.no_grad()
def capture(model: nn.Module, batch: Batch, layers: LayerChoice = "all") -> dict[str, CapturedAttention]:
    """Queries, keys and values of a model's attention layers on a batch, by the layers' dotted names.

    The model runs twice, in evaluation mode: once to find its layers, once to keep their inputs.

    Args:
        model: any module.
        batch: what the model is called with: a tensor, a sequence of arguments, or a mapping of named ones.
            The (B, N) ``attention_mask`` of a mapping (Hugging Face: 1 = real token) is taken for the
            padding; otherwise padding is read from what the layers receive.
        layers: one choice or several: an index among the self-attention layers in the order of definition
            (negative from the end), "all", "first", "last", "first-K", "last-K", or the dotted name of a
            module or of the one module around it. "0,2" is two choices. Cross-attention is chosen by name.

    Raises:
        InputError: for a layer that does not exist or did not run, and a model without any.
    """
    return capture_chosen(model, batch, choose_layers(model, batch, layers))


def choose_layers(model: nn.Module, batch: Batch, layers: LayerChoice = "all") -> list[str]:
    """Names of the layers that ``layers`` chooses as in ``capture``, in the order of definition."""
    ran = attention_layers(model, batch)
    order = {path: place for place, (path, _) in enumerate(_unwrapped(model).named_modules())}
    found = {site.path: site.cross for site in find_sites(_unwrapped(model))}
    known = dict.fromkeys([*ran, *found])
    sites = [
        Site(path, _unwrapped(model), (), None, _is_cross(path, found))
        for path in sorted(known, key=lambda path: order.get(path.partition("#")[0], len(order)))
    ]
    keys = [layers] if isinstance(layers, int | str) else list(layers)
    if not keys:
        raise InputError("layers=[] names no layer; accepted: an index, 'all', a name, or several of them")
    paths = {site.path for key in keys for site in select(key, sites)}
    silent = sorted(paths - set(ran))
    if silent and not all(key == "all" for key in keys):
        raise InputError(
            f"layers: {silent[0]} did not attend when the model was called "
            f"(layers that did: {', '.join(ran)})"
        )
    return [site.path for site in sites if site.path in paths and site.path in ran]


def _is_cross(path: str, found: Mapping[str, bool]) -> bool:
    """True where an attention that ran, or the host around it, is cross-attention; ``found`` knows some."""
    path = path.partition("#")[0]
    return next((found[name] for name in (path, path.rpartition(".")[0]) if name in found), named_cross(path))


@torch.no_grad()
def attention_layers(model: nn.Module, batch: Batch) -> list[str]:
    """Dotted names of the layers that attend when the model is called with this batch.

    A module that attends K times in a call is named K times, the later ones as ``name#1`` and so on.

    Raises:
        InputError: where no module attends.
    """
    names: list[str] = []
    with _watching(model, lambda name, make: names.append(name)):
        call_model(model, batch)
    if not names:
        raise InputError(
            f"model: no attention was seen in {type(model).__name__} (a layer of kernel-attention, "
            "nn.MultiheadAttention, scaled_dot_product_attention, or product, softmax, product); "
            "a flash or compiled kernel of its own hides it: load the model with an sdpa or eager attention"
        )
    return names


@torch.no_grad()
def capture_chosen(model: nn.Module, batch: Batch, names: Sequence[str]) -> dict[str, CapturedAttention]:
    """The same as ``capture`` with names from ``choose_layers``, in one run of the model."""
    found: dict[str, CapturedAttention] = {}

    def keep(name: str, make: Callable[[], CapturedAttention]) -> None:
        if name in names:
            found[name] = make()

    with _watching(model, keep):
        call_model(model, batch)
    padding = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(padding, Tensor) and padding.dim() == 2:
        found = {name: attention.with_padding(padding != 0) for name, attention in found.items()}
    missing = [name for name in names if name not in found]
    if missing:
        raise InputError(f"layers: {missing[0]} did not attend on this batch, though it did on the first")
    return {name: found[name] for name in names}


def call_model(model: nn.Module, batch: Batch, name: str = "batch") -> Any:
    """The model's output for a batch; InputError, with ``name``, for a batch of another type."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):  # before the next line: the output of a tokenizer has that attribute too
        _require_tensors(batch, name)
        return model(**batch)
    if hasattr(batch, "attention_mask"):  # a Batch of a loader, which has a target too
        return model(batch.x, batch.attention_mask)  # type: ignore[attr-defined]
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return model(*batch)
    raise InputError(
        f"{name} is a {type(batch).__name__}, expected a tensor, a sequence of arguments or a mapping"
    )


def _require_tensors(batch: Mapping[str, Any], name: str) -> None:
    """InputError where an argument is a list of numbers, as a tokenizer makes it unless asked for tensors."""
    for key, value in batch.items():
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        if first is not value and isinstance(first, int | float):
            raise InputError(
                f"{name}: {key} is a list of numbers, expected a tensor; a tokenizer makes one where it is "
                "called with padding=True, return_tensors='pt'"
            )


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given: compiled code does not make the calls that we intercept."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


@contextlib.contextmanager
def _watching(
    model: nn.Module, report: Callable[[str, Callable[[], CapturedAttention]], None]
) -> Iterator[None]:
    """Inside the block, ``report(name, make)`` is called for every attention; ``make()`` has its tensors."""
    watched = _unwrapped(model)
    running: list[nn.Module] = []
    paths = _paths(watched)
    times: Counter[str] = Counter()

    def tell(module: nn.Module, make: Callable[[str], CapturedAttention]) -> None:
        path = paths[id(module)]
        name = f"{path}#{times[path]}" if times[path] else path
        times[path] += 1
        report(name, lambda: make(name))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(module)
        if module is watched:
            times.clear()
        if isinstance(module, AttentionLayer):
            tell(module, lambda name: captured_own(name, module, *args, **kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        while running and running.pop() is not module:
            pass

    handles: list[Any] = []
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module in watched.modules():
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
        model.eval()
        # Under a function mode torch does not use its fused encoder layers, which make no attention call.
        with Interception(lambda: _attending(running), tell), _eagerly(model, watched):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, was_training in modes:
            module.training = was_training


@contextlib.contextmanager
def _eagerly(model: nn.Module, watched: nn.Module) -> Iterator[None]:
    """Inside the block a compiled model runs eagerly."""
    if model is watched:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _paths(model: nn.Module) -> dict[int, str]:
    """Name of each module; a layer of ours inside another library's call goes by the name of that call."""
    paths = {id(module): path for path, module in model.named_modules()}
    for path, module in model.named_modules():
        if isinstance(module, HostedAttention):
            paths[id(module.attention)] = path
    return paths


def _attending(running: list[nn.Module]) -> nn.Module | None:
    """The module of an intercepted call; None inside a layer of ours, which is recognised by class."""
    if any(isinstance(module, AttentionLayer) for module in running):
        return None
    own = [module for module in running if not isinstance(module, nn.Softmax)]
    return own[-1] if own else None
