"""Replaced Hugging Face models made again from their configuration, and their auxiliary loss in ``loss``.

transformers has no hook between the making of a model and the loading of its weights that serves every class.
So ``watch_models`` puts three methods of ``PreTrainedModel`` behind functions that do nothing to a model
whose configuration has no trace of ``replace_attention``.
"""

import copy
import functools
import threading
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import ObjectiveCollector, take_calls
from kernel_attention.core.registry import MECHANISMS
from kernel_attention.errors import InputError
from kernel_attention.hosts.interface import InterfaceAttention
from kernel_attention.hosts.known import HostedAttention
from kernel_attention.hosts.replace import install_layers, plan_replacement, replace_attention
from kernel_attention.hosts.sites import find_sites
from kernel_attention.hosts.trace import HUGGING_FACE, LOST, TRACE

_WANTED = "_kernel_attention_wanted"  # an attn_implementation of our names, until the layers are there


@functools.cache
def watch_models() -> None:
    """Make replaced models again wherever transformers makes one from its configuration."""
    original: Any = PreTrainedModel
    make, finish, load = original.__init__, original.post_init, original.from_pretrained.__func__

    @functools.wraps(make)
    def __init__(self: Any, config: Any, *inputs: Any, **options: Any) -> None:
        _prepare(config)
        make(self, config, *inputs, **options)

    @functools.wraps(finish)
    def post_init(self: Any) -> None:
        finish(self)
        _restore(self)

    @functools.wraps(load)
    def from_pretrained(cls: Any, *inputs: Any, **options: Any) -> Any:
        wants_report = options.pop("output_loading_info", False)
        model, report = load(cls, *inputs, output_loading_info=True, **options)
        _complete(model, {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
        return (model, report) if wants_report else model

    original.__init__, original.post_init = __init__, post_init
    original.from_pretrained = classmethod(from_pretrained)


def _prepare(config: Any) -> None:
    """Take the mark back: the layers that were not replaced have the implementation that a new model has."""
    if reasons := getattr(config, LOST, None):
        stated = reasons if isinstance(reasons, list) else [reasons]
        raise InputError(
            f"{type(config).__name__}: the attention of this model was replaced, and the model cannot be "
            f"made again: {'; '.join(map(str, stated))}"
        )
    _check_trace(config)
    implementation = getattr(config, "_attn_implementation", None)
    if implementation in MECHANISMS and implementation not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        setattr(config, _WANTED, implementation)
        config._attn_implementation = None
    if implementation == HUGGING_FACE:
        config._attn_implementation = None
        config.attn_implementation = HUGGING_FACE  # for the next save_pretrained


def _check_trace(config: Any) -> None:
    """Refuse a trace that ``replace_attention`` does not write; a damaged file, say."""
    if not hasattr(config, TRACE):
        return
    classes = getattr(config, TRACE)
    layers = classes.values() if isinstance(classes, dict) else [None]
    if not all(isinstance(paths, dict) and all(map(_is_spec, paths.values())) for paths in layers):
        raise InputError(
            f"{type(config).__name__}: {TRACE}={_short(classes)} of the configuration is not "
            "{class: {path: {mechanism: options}}}, as replace_attention writes it"
        )


def _is_spec(spec: object) -> bool:
    return (
        isinstance(spec, dict) and len(spec) == 1 and all(isinstance(value, dict) for value in spec.values())
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _restore(model: Any) -> None:
    """Replace the layers that the configuration names for this class, at the end of its constructor."""
    if wanted := getattr(model.config, _WANTED, None):
        delattr(model.config, _WANTED)
        _implement(model, wanted)
        return
    classes = getattr(model.config, TRACE, None)
    if not classes:
        return
    if layers := classes.get(type(model).__name__):
        install_layers(model, plan_replacement(model, layers, {}, is_complete=True))
    include_auxiliary_loss(model)


def _implement(model: Any, name: str) -> None:
    """Serve ``attn_implementation=name`` where the weights of a file keep their names and their meaning."""
    sites = [site for site in find_sites(model) if not site.cross]
    strange = [site for site in sites if site.host_class is not InterfaceAttention]
    call = f"load the model without it and call replace_attention(model, {{'all': {name!r}}})"
    if strange or not sites:
        place = type(strange[0].module if strange else model).__name__
        raise InputError(
            f"attn_implementation={name!r}: {place} would get weights of other names than its file's; {call}"
        )
    try:
        replace_attention(model, {"all": name})
    except InputError as error:
        raise InputError(f"attn_implementation={name!r}: {error}") from None


def _complete(model: nn.Module, missing: Set[str]) -> None:
    """Check that every recorded layer is there, and fill what the file of weights does not hold.

    Those are tables, and the missing parameters of our layers. transformers makes the model on ``meta``, and
    draws parameters of its own layers only.
    """
    classes = {type(module).__name__ for module in model.modules()}
    for module in model.modules():
        absent = set(getattr(getattr(module, "config", None), TRACE, ())) - classes
        if isinstance(module, PreTrainedModel) and absent:
            raise InputError(
                f"{type(model).__name__}: the attention of {', '.join(sorted(absent))} was replaced in the "
                f"saved model, and {type(model).__name__} holds no such part"
            )
    for path, module in model.named_modules():
        if isinstance(module, HostedAttention):
            fill_tables(module)
            _draw_missing(module.attention, {key.removeprefix(f"{path}.attention.") for key in missing})


@torch.no_grad()
def _draw_missing(layer: AttentionLayer, missing: Set[str]) -> None:
    """Draw these parameters as a new layer draws them. Names of other layers have no effect."""
    if missing.isdisjoint(name for name, _ in layer.named_parameters()):
        return
    drawn = copy.deepcopy(layer)
    drawn.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name in missing:
            parameter.copy_(drawn.get_parameter(name))


def fill_tables(model: nn.Module) -> None:
    """Fill the buffers that are in no file of weights, in submodules that hold nothing else."""
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        if own and len(module._non_persistent_buffers_set) == len(own):
            module.reset_parameters()  # type: ignore[operator]


def include_auxiliary_loss(model: nn.Module) -> None:
    """Let the ``loss`` that a model of transformers returns in training include ``auxiliary_loss``.

    A plain ``transformers.Trainer`` then trains the layers' objective. A callback cannot do this, because it
    does not see the loss, and a subclass of the trainer would be needed once for every trainer there is. The
    mixture-of-experts models of transformers return their auxiliary loss in the same way.

    What is in ``loss`` is taken from the layers and from the collectors around the call, so that
    ``loss + auxiliary_loss(model)`` is the same number. Nothing is added where the model computes no loss: in
    evaluation, or where the trainer keeps the labels for label smoothing or a ``compute_loss_func``.
    """
    if _add_auxiliary_loss not in model._forward_hooks.values():
        model.register_forward_pre_hook(_collect)
        # Also after an error: the collector would stay open.
        model.register_forward_hook(_add_auxiliary_loss, with_kwargs=True, always_call=True)


class _LossCollector(ObjectiveCollector):
    """The objectives of one forward of a model that computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _Open:
    """The collectors of the models whose forward one thread is in, the innermost last."""

    def __init__(self) -> None:
        self.collectors: tuple[_LossCollector, ...] = ()


class _Thread(threading.local):
    # A compiler loses what is written to a threading.local itself.
    def __init__(self) -> None:
        self.open = _Open()


_THREAD = _Thread()


def _collect(model: nn.Module, inputs: Any) -> None:
    collector = _LossCollector(model)
    _THREAD.open.collectors = (*_THREAD.open.collectors, collector)
    collector.__enter__()


def _add_auxiliary_loss(model: nn.Module, inputs: Any, options: dict[str, Any], output: Any) -> Any:
    collectors = _THREAD.open.collectors
    # Those of parts that ended with an error may lie above.
    places = [index for index, each in enumerate(collectors) if each.model is model]
    if not places:
        return None
    own = collectors[places[-1]]
    _THREAD.open.collectors = collectors[: places[-1]]
    own.close()
    calls = own.calls
    if not calls:
        return None
    if isinstance(output, dict):
        if isinstance(loss := output.get("loss"), Tensor):
            output["loss"] = loss + (take_calls(calls) * _share_of_step(model, options)).to(loss)
    elif isinstance(output, tuple) and isinstance(options.get("labels"), Tensor) and output[0].dim() == 0:
        loss = output[0] + (take_calls(calls) * _share_of_step(model, options)).to(output[0])
        return (loss, *output[1:])
    return None


def _share_of_step(model: nn.Module, options: dict[str, Any]) -> float | Tensor:
    """The part of a step's labels that this micro-batch has.

    A trainer that accumulates gradients adds up the losses of its micro-batches and says how many labels the
    whole step has, so that its objective is a mean.
    """
    items, labels = options.get("num_items_in_batch"), options.get("labels")
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    shifted = LOSS_MAPPING.get(getattr(model, "loss_type", None)) is ForCausalLMLoss  # type: ignore[arg-type]
    if shifted and not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        labels = labels[..., 1:]
    return labels.ne(-100).sum() / items
