"""The kernel-machine view of self-attention as software: layers, functions, solvers, recipes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_attention import functional
from kernel_attention.attention import (
    DualMultilinearAttention,
    LinearAttention,
    MultilinearAttention,
    PrimalAttention,
    RobustPrincipalAttention,
    ScaledAttention,
    SoftmaxAttention,
    SparseAttention,
    SupportVectorAttention,
    TensorAttention,
    auxiliary_loss,
    create_attention,
    list_attention,
    replace_attention,
    shard_sequence,
    timm_attention,
)
from kernel_attention.errors import InputError

if TYPE_CHECKING:
    from kernel_attention.estimators import AttentionClassifier, AttentionRegressor

__version__ = "0.1.0"

__all__ = [
    "AttentionClassifier",
    "AttentionRegressor",
    "DualMultilinearAttention",
    "InputError",
    "LinearAttention",
    "MultilinearAttention",
    "PrimalAttention",
    "RobustPrincipalAttention",
    "ScaledAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SupportVectorAttention",
    "TensorAttention",
    "auxiliary_loss",
    "create_attention",
    "functional",
    "list_attention",
    "replace_attention",
    "shard_sequence",
    "timm_attention",
]

_ESTIMATORS = ("AttentionClassifier", "AttentionRegressor")
_ROOMS = ("analysis", "models", "reporting", "solvers")


def __getattr__(name: str) -> Any:
    """Rooms that need more than torch are opened when first asked for."""
    if name in _ESTIMATORS:
        return getattr(importlib.import_module("kernel_attention.estimators"), name)
    if name in _ROOMS:
        return importlib.import_module(f"kernel_attention.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, *_ROOMS})
