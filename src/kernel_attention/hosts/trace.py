"""The trace of ``replace_attention`` in the configuration of a Hugging Face model.

``save_pretrained`` writes the configuration beside the weights. It then says two things:

* under ``kernel_attention``, which layers of which class were replaced by what, so that ``from_pretrained``
  makes the model in the same way;
* under ``attn_implementation``, the name of the module that knows how. transformers refuses an implementation
  that is not registered. So a program that has not imported the module gets an error with its name. Without
  the error it would get the original model with new weights.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from kernel_attention.hosts.sites import Site

HUGGING_FACE = "kernel_attention.hosts.hugging_face"
"""The module to import before a replaced model is loaded, and its name as an attention implementation."""

TRACE = "kernel_attention"
"""The key of the configuration that holds the replaced layers, ``{class: {path: {mechanism: options}}}``."""

LOST = "kernel_attention_cannot_restore"
"""The key of the configuration that holds the reasons why the model cannot be made again."""


class NewLayer(NamedTuple):
    """The place of a replaced layer, and the mechanism that is there now."""

    site: Site
    name: str
    options: Mapping[str, Any]


def leave_trace(layers: Iterable[NewLayer]) -> None:
    """Write replaced layers into the configuration of their model, where it is one of transformers.

    The ``loss`` of the model includes the layers' auxiliary loss from then on.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # no model of transformers can be there before this module
        return
    models: dict[int, nn.Module] = {}
    for layer in layers:
        around = [owner for owner in layer.site.owners if isinstance(owner, modeling.PreTrainedModel)]
        models.update((id(model), model) for model in around)
        if around:
            _write(layer, around[0])
        elif isinstance(config := getattr(layer.site.module, "config", None), modeling.PreTrainedConfig):
            part = type(layer.site.owners[0]).__name__
            _lose(config, f"replace_attention was called on a part of the model, {part}")
    if models:
        restoring = importlib.import_module("kernel_attention.hosts.restoring")
        restoring.watch_models()
        for model in models.values():
            restoring.include_auxiliary_loss(model)


def _write(layer: NewLayer, model: Any) -> None:
    # The base model, such as BertModel, is saved alone too, and inside every model with a head.
    owners = layer.site.owners
    base = model.base_model if any(owner is model.base_model for owner in owners) else model
    above = next(index for index, owner in enumerate(owners) if owner is base)
    path = ".".join(layer.site.path.split(".")[above:])
    try:
        spec = json.loads(json.dumps({layer.name: dict(layer.options)}))
    except (TypeError, ValueError) as error:
        _lose(base.config, f"an option of {layer.name!r} cannot be written as JSON ({error})")
        return
    classes = {key: dict(value) for key, value in getattr(base.config, TRACE, {}).items()}
    classes.setdefault(type(base).__name__, {})[path] = spec
    setattr(base.config, TRACE, classes)
    base.config.attn_implementation = HUGGING_FACE


def _lose(config: Any, reason: str) -> None:
    setattr(config, LOST, sorted({*getattr(config, LOST, ()), reason}))
    config.attn_implementation = HUGGING_FACE
