"""An estimator in one file without pickle: safetensors weights with JSON beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernel_attention.errors import InputError, writing
from kernel_attention.fields import plain
from kernel_attention.models import SequenceClassifier
from kernel_attention.series.closed_form import ClosedForm
from kernel_attention.training.modes import plain_modes
from kernel_attention.version import __version__
from kernel_attention.weights import read_metadata, read_weights, write_weights

_KEY = "estimator"
_FITTED = (
    "n_features_in_", "seeds_", "max_len_", "equal_length_", "model_options_", "history_", "best_epoch_",
    "best_epochs_", "temperature_", "target_mean_", "target_scale_", "residuals_", "feature_names_in_",
    "closed_form_weights_", "member_weight_",
)  # fmt: skip


def save_estimator(estimator: Any, path: Path) -> None:
    """Write a fitted estimator; the file is whole or absent.

    Raises:
        InputError: for labels or parameters that are no numbers, strings, booleans, lists or dicts of them,
            and for a place that cannot be written.
    """
    state: dict[str, Any] = {
        "class": type(estimator).__name__,
        "version": __version__,
        "parameters": plain(estimator.get_params(deep=False)),
        "fitted": {name: _plain(getattr(estimator, name)) for name in _FITTED if hasattr(estimator, name)},
    }
    if isinstance(state["parameters"]["random_state"], np.random.RandomState):
        state["parameters"]["random_state"] = None  # its state has been used up
    state["parameters"]["callbacks"] = None  # code, which a file does not hold
    if hasattr(estimator, "classes_"):
        classes = estimator.classes_
        state["classes"] = {"dtype": classes.dtype.str, "values": classes.tolist()}
    weights = {
        f"members.{index}.{name}": value
        for index, model in enumerate(estimator.models_)
        for name, value in model.state_dict().items()
    }
    closed = getattr(estimator, "closed_form_", None)
    if closed is not None:
        state["closed_form"] = closed.options
        weights |= {f"closed_form.{name}": value for name, value in closed.state_dict().items()}
    try:
        text = json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{type(estimator).__name__} cannot be saved as JSON ({error}): pickle it") from None
    with writing(f"path {path}"):
        write_weights(path, weights, {_KEY: text})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def load_estimator(kind: type, path: Path) -> Any:
    """The estimator in a file of ``save_estimator``; nothing in the file is executed.

    Raises:
        InputError: for a file that is missing, damaged, or holds an estimator of another class.
    """
    weights = read_weights(path)
    try:
        state = json.loads(read_metadata(path)[_KEY])
    except (KeyError, ValueError):
        raise InputError(f"{path}: holds no estimator of kernel-attention") from None
    if state["class"] != kind.__name__:
        raise InputError(f"{path}: holds an estimator of {state['class']}, expected {kind.__name__}")
    # A file of an earlier release has members alone.
    estimator = kind(**{"closed_form": False} | state["parameters"])
    models = []
    for index, options in enumerate(state["fitted"]["model_options_"]):
        prefix = f"members.{index}."
        with plain_modes():
            model = SequenceClassifier(**options, dtype=torch.float32)
        model.load_state_dict(_under(prefix, weights))
        models.append(model.eval())
    estimator.closed_form_ = None
    if "closed_form" in state:
        with plain_modes():
            estimator.closed_form_ = ClosedForm(**state["closed_form"])
        estimator.closed_form_.load_state_dict(_under("closed_form.", weights))
        estimator.closed_form_.eval()
    for name, value in state["fitted"].items():
        setattr(estimator, name, np.array(value, dtype=object) if name == "feature_names_in_" else value)
    if "classes" in state:
        estimator.classes_ = np.array(state["classes"]["values"], dtype=np.dtype(state["classes"]["dtype"]))
    estimator.models_ = models
    return estimator


def _under(prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
