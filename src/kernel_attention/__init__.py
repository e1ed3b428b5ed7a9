"""The kernel-machine view of self-attention as software: layers, functions, solvers, recipes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_attention import functional, mechanisms
from kernel_attention.core.layer import auxiliary_loss
from kernel_attention.core.registry import create_attention, list_attention
from kernel_attention.core.sharding import shard_sequence
from kernel_attention.errors import InputError
from kernel_attention.hosts.replace import replace_attention
from kernel_attention.hosts.timm_class import timm_attention
from kernel_attention.mechanisms.kernel_pca.layer import RobustPrincipalAttention, ScaledAttention
from kernel_attention.mechanisms.linear.layer import LinearAttention
from kernel_attention.mechanisms.multilinear.dual_layer import DualMultilinearAttention
from kernel_attention.mechanisms.multilinear.layer import MultilinearAttention
from kernel_attention.mechanisms.multilinear.tensor_layer import TensorAttention
from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention.mechanisms.softmax.layer import SoftmaxAttention
from kernel_attention.mechanisms.sparse.layer import SparseAttention
from kernel_attention.mechanisms.support_vector.layer import SupportVectorAttention
from kernel_attention.version import __version__

if TYPE_CHECKING:
    from kernel_attention.estimators import AttentionClassifier, AttentionRegressor

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
_ROOMS = {
    "analysis": "analysis",
    "experiments": "experiments",
    "hosts": "hosts",
    "models": "models",
    "reporting": "experiments.reporting",
    "solvers": "solvers",
    "testing": "testing",
}


def __getattr__(name: str) -> Any:
    """Rooms that need more than torch are opened when first asked for."""
    if name in _ESTIMATORS:
        return getattr(importlib.import_module("kernel_attention.estimators"), name)
    if name in _ROOMS:
        return importlib.import_module(f"kernel_attention.{_ROOMS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, *_ROOMS})
